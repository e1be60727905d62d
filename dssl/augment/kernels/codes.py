"""The numbers by which a plan names a kernel; ``program.py`` dispatches on them."""

SKIP = 0
CROP = 1  # low, high, 10 x (area, ratio), top, left: draws in [0, 1)
RESIZE = 2  # 0: the whole image, 1: its largest centred square
FLIP = 3
BRIGHTNESS = 4  # factor
CONTRAST = 5  # factor
COLOR = 6  # factor
HUE = 7  # 0 .. 255, added modulo 256
GRAY = 8
BLUR = 9  # radius of one box pass
AUTOCONTRAST = 10  # strength
EQUALIZE = 11  # strength
INVERT = 12
AFFINE = 13  # the six numbers of Pillow's Image.transform
POSTERIZE = 14  # bits kept
SOLARIZE = 15  # threshold
SOLARIZE_ADD = 16  # whole number that is added
SHARPNESS = 17  # factor
CUTOUT = 18  # left, top, right, bottom, both ends included
JIGSAW = 19  # tiles per side, then a permutation of the tiles
CUSTOM = 20  # number of the operation, value, two draws

CROP_ATTEMPTS = 10
