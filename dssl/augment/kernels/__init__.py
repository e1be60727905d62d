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

# corruptions: three constants (0 where there are fewer), two draws
NOISE = 21  # standard deviation, of 0 .. 1
SHOT = 22  # photons of a white pixel
IMPULSE = 23  # share of the values that become black or white
SPECKLE = 24  # standard deviation of a pixel that is white
GAUSSIAN = 25  # sigma
DEFOCUS = 26  # radius, sigma of the rim
MOTION = 27  # radius, sigma
ZOOM = 28  # step and number of factors, from 1 on
FOG = 29  # strength, decay of the clouds from coarse to fine
BRIGHTEN = 30  # added to the value of HSV
ADD = 31  # added to every channel
FADE = 32  # factor of the contrast
SATURATE = 33  # factor and offset of the saturation of HSV
ELASTIC = 34  # largest shift, sigma of its smoothing, shift of the corners
PIXELATE = 35  # share of the side
JPEG = 36  # quality

CROP_ATTEMPTS = 10

# what a row of a script says, in draw.py
GO_BELOW = 0  # on to the next row where the draw is below a number, else to row [3]
GO_LESS = 1  # on to the next row where the draw is less than the one after it, else to row [3]
GO = 2  # to row [3]
PUT = 3  # kernel [3] with the first [4] of the row's numbers
DRAW_CROP = 4  # smallest and largest area
DRAW_JITTER = 5  # lowest factor and span of each, then hue; bits [3]: which of the four do something
DRAW_BLUR = 6  # smallest sigma and span
DRAW_JIGSAW = 7  # [3] tiles per side
DRAW_VALUE = 8  # operation [3] at a value
DRAW_OPERATION = 9  # one of [4] operations from [3] on, magnitude fixed or drawn from slot [5], own draws from [6] on
DRAW_CORRUPTION = 10  # kernel [3] with the row's numbers and two draws

# how the value of an operation becomes the numbers of its kernel
PLAIN, WHOLE, BITS, THRESHOLD, DEGREES, SHEAR_X, SHEAR_Y, SHIFT_X, SHIFT_Y = range(9)
SHARE_X, SHARE_Y = 9, 10  # of the image's width
SIDE, SHARE_SIDE = 11, 12  # of a square that is cut out
TURNS = 13
NUMBERED = 14  # a custom operation: its number, value and two draws
SEEDED = 15  # a corruption: its value and two draws
ROOT = 16  # pixels at 128 px, growing with the root of the size
SHARE_AROUND = 17  # of the image's width, in any direction

MAGNITUDES = 30

NEGATE = 1  # what a random sign does to a value; 0: nothing
MIRROR = 2
