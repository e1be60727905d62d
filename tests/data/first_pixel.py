"""A maker of views that is easy to check: one view, the first pixel of the image."""

import numpy as np

from dssl.augment import BaseViewMaker


class Maker(BaseViewMaker):
    """Its view `a` is the first pixel."""

    names = ("a",)

    def allocate(self, count, *, pinned=False):
        return {"a": np.zeros((count, 1, 1, 3), np.float32)}

    def plan(self, indices, *, epoch):
        return None

    def apply_many(self, plan, row, images, out, out_row):
        out["a"][out_row : out_row + len(images), 0, 0] = [image[0, 0] for image in images]
