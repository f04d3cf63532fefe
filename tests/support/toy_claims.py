"""A logistic model whose clients differ in labels alone, and claims that may be false."""

from __future__ import annotations

from typing import Any

import numpy as np

CLIENTS, CLASSES, FEATURES = 20, 5, 10


def gradients(x: Any, y: Any, w: Any) -> Any:
    """Mean gradient of the cross-entropy of softmax(x w)."""
    z = x @ w
    q = np.exp(z - z.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    q[np.arange(len(y)), y] -= 1
    return (x.T @ q / len(y)).ravel()


def federation(n: int, source: np.random.Generator, offset: float = 0.0) -> tuple[Any, Any, Any]:
    """(halves' gradients [M, d] twice, counts [M, K]); client 0's inputs are moved by `offset`."""
    centres = source.standard_normal((CLASSES, FEATURES))
    w = 0.1 * source.standard_normal((FEATURES, CLASSES))
    away = source.standard_normal(FEATURES)
    away *= offset / np.linalg.norm(away)
    first, second, counts = [], [], []
    for i in range(CLIENTS):
        y = source.choice(CLASSES, n, p=source.dirichlet(np.ones(CLASSES)))
        x = centres[y] + source.standard_normal((n, FEATURES)) + (away if i == 0 else 0.0)
        order = source.permutation(n)
        order = order[np.argsort(y[order], kind="stable")]
        halves = order[::2], order[1::2]
        first.append(gradients(x[halves[0]], y[halves[0]], w))
        second.append(gradients(x[halves[1]], y[halves[1]], w))
        counts.append(np.bincount(y, minlength=CLASSES))
    return np.stack(first), np.stack(second), np.stack(counts).astype(float)


def lie(counts: Any, distance: float, source: np.random.Generator) -> Any:
    """Client 0 claims that `distance` of its mass belongs to another label."""
    claimed = counts.copy()
    true = counts[0]
    if not distance:
        return claimed
    most = int(true.argmax())
    to = int(source.choice([y for y in range(CLASSES) if y != most]))
    moved = min(true[most], round(distance * true.sum()))
    claimed[0, most] -= moved
    claimed[0, to] += moved
    return claimed
