"""Metrics of probabilities [n, K] and labels [n], on the target's rows."""

import numpy as np


def auc(p: np.ndarray, y: np.ndarray) -> float:
    """How often a row of the first class has more of its probability than one of the others."""
    of, others = p[y == 0, 0], p[y != 0, 0]
    wins = (of[:, None] > others).mean() + (of[:, None] == others).mean() / 2
    return float(wins)
