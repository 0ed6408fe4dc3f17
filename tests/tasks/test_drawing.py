"""Colours of classes."""

from itertools import combinations

import numpy as np
from skimage.color import rgb2lab

from vitral.tasks.drawing import colour


def test_no_two_of_twenty_classes_look_alike():
    lab = rgb2lab(np.array([colour(i) for i in range(20)])[None] / 255)[0]
    assert min(np.linalg.norm(a - b) for a, b in combinations(lab, 2)) > 20
    assert len({colour(i) for i in range(256)}) > 200
