"""Label counts and targets, drawn."""

from __future__ import annotations

import numpy as np


def task(seed: int, clients: int = 30, classes: int = 6, inside: bool = False):
    rng = np.random.default_rng(seed)
    sizes = np.round(10 ** rng.uniform(0, 4, clients)).astype(int)
    shares = rng.dirichlet(np.full(classes, 0.3), size=clients)
    counts = np.stack([rng.multinomial(n, p) for n, p in zip(sizes, shares, strict=True)])
    if inside:
        target = rng.dirichlet(np.ones(clients)) @ (counts / sizes[:, None])
    else:
        target = rng.dirichlet(np.full(classes, 0.3))
    return counts, target / target.sum()
