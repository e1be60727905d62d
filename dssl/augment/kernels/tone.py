"""Tone curves: the new value of a byte depends on its old value and the channel's histogram alone."""

import numpy as np
from numba import njit


@njit(nogil=True)
def invert(planes):
    """255 minus the value."""
    for c in range(planes.shape[0]):
        row = planes[c]
        for i in range(row.size):
            row[i] = np.uint8(row[i] ^ np.uint8(255))


@njit(nogil=True)
def posterize(planes, bits):
    """Keeps the highest bits."""
    mask = np.uint8(0xFF & ~(2 ** (8 - bits) - 1))
    for c in range(planes.shape[0]):
        row = planes[c]
        for i in range(row.size):
            row[i] = np.uint8(row[i] & mask)


@njit(nogil=True)
def solarize(planes, threshold):
    """Inverts the values at or above the threshold (0 .. 256, a whole number)."""
    for c in range(planes.shape[0]):
        row = planes[c]
        for i in range(row.size):
            value = np.int32(row[i])
            row[i] = np.uint8(np.int32(255) ^ value if value >= threshold else value)


@njit(nogil=True)
def solarize_add(planes, amount):
    """Adds, clips, then inverts what is at or above 128."""
    for c in range(planes.shape[0]):
        row = planes[c]
        for i in range(row.size):
            value = np.int32(np.int32(row[i]) + amount)
            value = np.int32(255) if value > 255 else value
            value = np.int32(0) if value < 0 else value
            row[i] = np.uint8(np.int32(255) ^ value if value >= 128 else value)


@njit(nogil=True)
def _histogram(row, histogram):
    # four counters per value: equal neighbours would otherwise wait for each other's store
    parts = np.zeros((4, 256), np.int32)
    length = row.size
    whole = length - length % 4
    for i in range(0, whole, 4):
        parts[0, row[i]] += 1
        parts[1, row[i + 1]] += 1
        parts[2, row[i + 2]] += 1
        parts[3, row[i + 3]] += 1
    for i in range(whole, length):
        parts[0, row[i]] += 1
    for value in range(256):
        histogram[value] = parts[0, value] + parts[1, value] + parts[2, value] + parts[3, value]


@njit(nogil=True)
def _curve(row, table, strength):
    """Looks every value up, after blending the table with the identity as Image.blend would the images."""
    factor = np.float32(strength)
    curve = np.empty(256, np.uint8)
    for value in range(256):
        old = np.float32(value)
        curve[value] = np.uint8(np.int32(old + factor * (np.float32(table[value]) - old)))
    for i in range(row.size):
        row[i] = curve[row[i]]


@njit(nogil=True)
def autocontrast(planes, strength):
    """Stretches each channel to 0 .. 255."""
    table = np.empty(256, np.int64)
    for c in range(planes.shape[0]):
        row = planes[c]
        lowest, highest = np.uint8(255), np.uint8(0)
        for i in range(row.size):
            lowest = min(lowest, row[i])
            highest = max(highest, row[i])
        low, high = np.int64(lowest), np.int64(highest)
        if high <= low:
            continue
        scale = 255.0 / (high - low)
        offset = -low * scale
        for value in range(256):
            table[value] = min(max(int(value * scale + offset), 0), 255)
        _curve(row, table, strength)


@njit(nogil=True)
def equalize(planes, strength):
    """Pillow's histogram equalisation of each channel."""
    histogram = np.empty(256, np.int64)
    table = np.empty(256, np.int64)
    for c in range(planes.shape[0]):
        row = planes[c]
        _histogram(row, histogram)
        last = 255
        while histogram[last] == 0:
            last -= 1
        step = (row.size - histogram[last]) // 255
        if step == 0:
            continue
        running = step // 2
        for value in range(256):
            table[value] = min(running // step, 255)
            running += histogram[value]
        _curve(row, table, strength)
