"""Reads the digits from the files of the scikit-learn that is installed."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np

_HERE = Path(__file__).parents[1]


def load_digits(return_X_y):
    """Return 1,797 images of 64 pixels, and their labels, as scikit-learn does."""
    elsewhere = [folder for folder in sys.path if Path(folder) != _HERE]
    installed = Path(PathFinder.find_spec("sklearn", elsewhere).origin).parent
    table = np.loadtxt(installed / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)
