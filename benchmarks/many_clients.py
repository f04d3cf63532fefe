"""Processor time of `fs.fit` with a cohort of 100 of many clients, by that of a plain loop.

    python -m benchmarks.many_clients [clients] [rounds]

Each client has 20 rows of 16 columns and 4 labels. The plain loop trains the same network on the
same clients' rows: plain PyTorch, a mean by sizes, and an evaluation as often. It checks, holds out
and writes nothing.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedshift as fs

ROWS, COLUMNS, LABELS, COHORT, TESTED = 20, 16, 4, 100, 2000
Arrays = tuple[np.ndarray, np.ndarray]


def rows_of(clients: int) -> Arrays:
    """(x, y): 20 rows of each client, with label shares of its own, and then the target's rows."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(LABELS), size=clients)
    y = (rng.random((clients, ROWS, 1)) > shares.cumsum(1)[:, None, :-1]).sum(2).reshape(-1)
    y = np.concatenate([y, rng.integers(0, LABELS, TESTED)])
    x = rng.normal(size=(LABELS, COLUMNS))[y] + rng.normal(size=(len(y), COLUMNS))
    return x.astype(np.float32), y


def fitted(x: np.ndarray, y: np.ndarray, clients: int, rounds: int) -> tuple[float, float]:
    """(processor seconds of `fs.fit` at its defaults, accuracy)."""
    names = [f"c{i}" for i in range(clients)]
    frame = pd.DataFrame(x, columns=[f"f{i}" for i in range(COLUMNS)])
    frame["client"] = np.repeat([*names, "t"], [ROWS] * clients + [TESTED])
    frame["y"] = [f"l{k}" for k in y]
    task = fs.Task.from_frame(frame, client="client", label="y", target="t")
    start = time.process_time()
    result = fs.fit(task, "mlp", rounds=rounds, cohort=min(COHORT, clients))
    return time.process_time() - start, result.accuracy


def looped(x: np.ndarray, y: np.ndarray, clients: int, rounds: int) -> tuple[float, float]:
    """(processor seconds of the plain loop, accuracy)."""
    start = time.process_time()
    X, Y = torch.from_numpy(x), torch.from_numpy(y)
    X = (X - X.mean(0)) / X.std(0)
    test = X[-TESTED:], Y[-TESTED:]
    X, Y = (v[:-TESTED].view(clients, ROWS, *v.shape[1:]) for v in (X, Y))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, LABELS)
    )
    accuracy = 0.0
    for t in range(rounds):
        before = {k: v.clone() for k, v in net.state_dict().items()}
        total = {k: torch.zeros_like(v) for k, v in before.items()}
        cohort = torch.randperm(clients)[:COHORT]
        for i in cohort.tolist():
            net.load_state_dict(before)
            _train(net, X[i], Y[i])
            for k, v in net.state_dict().items():
                total[k] += v / len(cohort)
        net.load_state_dict(total)
        if t % 5 == 4 or t == rounds - 1:
            with torch.no_grad():
                everyone = float((net(X.flatten(0, 1)).argmax(1) == Y.flatten()).double().mean())
                accuracy = float((net(test[0]).argmax(1) == test[1]).double().mean())
            assert everyone > 0
    return time.process_time() - start, accuracy


def _train(net: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in torch.randperm(len(y)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()


def main() -> None:
    """Print both times, their ratio, and the peak of memory."""
    clients, rounds = (int(v) for v in (*sys.argv[1:], "10000", "20")[:2])
    torch.set_num_threads(1)
    fitted(*rows_of(20), 20, 1)  # imports and first passes are not measured
    x, y = rows_of(clients)
    plain, other = looped(x, y, clients, rounds)
    ours, accuracy = fitted(x, y, clients, rounds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{clients:,} clients, cohorts of {COHORT}, {rounds} rounds, processor seconds:")
    print(f"plain loop {plain:.2f} (accuracy {other:.3f}); fs.fit {ours:.2f} ({accuracy:.3f})")
    print(f"ratio {ours / plain:.1f}; peak {peak:.2f} GB")


if __name__ == "__main__":
    main()
