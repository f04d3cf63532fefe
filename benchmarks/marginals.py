"""Power of `fedshift audit marginals`: `python benchmarks/marginals.py [--quick] [--write]`.

Clients of a Dirichlet split of Fashion-MNIST; one claims part of its mass for another label than
the one it is of. How often is it found, and how often is an honest one accused, at 1 %? At the
first model and after ten rounds of FedAvg.

`--quick` tries it at small size, on the shipped subset. `--write` writes results/marginals.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
from pathlib import Path

import numpy as np
import torch

from fedshift.audit import audit_marginals
from fedshift.engine.run import run
from fedshift.experiments.claims import half_gradients
from fedshift.experiments.config.load import validate
from fedshift.experiments.experiment import method_of
from fedshift.experiments.task.preparing import prepare
from fedshift.seeds import numpy_generator

OUT = Path(__file__).parents[1] / "results" / "marginals.md"
LIES = (0.0, 0.05, 0.1, 0.2, 0.4)
CLIENTS = 30


def false_claims(counts: np.ndarray, client: int, distance: float, seed: int) -> np.ndarray:
    """The claims [M, K], where one client gives `distance` of its mass to another label."""
    source, claims = numpy_generator(seed, "lie", client), counts.copy()
    most = int(counts[client].argmax())
    to = int(source.choice([y for y in range(counts.shape[1]) if y != most]))
    moved = min(counts[client, most], round(distance * counts[client].sum()))
    claims[client, [most, to]] += [-moved, moved]
    return claims


def row(name: str, seeds: int, rounds: int, step: int) -> list[float]:
    """(found at each of `LIES`, false alarms): every `step`-th client lies once, alone."""
    detected, false, tested, lied = np.zeros(len(LIES)), 0, 0, 0
    for seed in range(seeds):
        config = validate({
            "data": {"name": name},
            "shift": {"kind": "dirichlet-per-client", "beta": 1.0, "clients": CLIENTS,
                      "target": "uniform"},
            "training": {"rounds": max(rounds, 1), "lr": 0.05}, "seeds": {"run": seed},
        })  # fmt: skip
        prepared = prepare(config)
        federation, model = prepared.federation(), prepared.model
        pair = model.init()
        if rounds:
            *_, last = run(
                method_of(config.method, config.training, prepared)(), federation, rounds
            )
            pair = last.server["params"], last.server["buffers"]
        halves = [half_gradients(model, *pair, c, i) for i, c in enumerate(federation.clients)]
        first, second = (np.stack([one[k] for one in halves]) for k in (0, 1))
        counts = federation.table["labels"].numpy()
        honest = audit_marginals(first, second, counts)
        false += sum(one.verdict == "inconsistent" for one in honest)
        tested += len(honest)
        print(f"{name}, seed {seed}, after {rounds} rounds: gradients are there", flush=True)
        liars = range(0, len(counts), step)
        lied += len(liars)
        for k, distance in enumerate(LIES):
            for client in liars:
                claims = false_claims(counts, client, distance, seed)
                verdict = audit_marginals(first, second, claims)[client].verdict
                detected[k] += verdict == "inconsistent"
    return [*(detected / lied).tolist(), false / tested]


def main() -> None:
    """The table for two models, to results unless it is a try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = "fashion-mnist-mini" if options.quick else "fashion-mnist"
    seeds, step = (1, 6) if options.quick else (options.seeds, 1)
    head = " | ".join(f"{100 * lie:g} %" for lie in LIES)
    lines = [f"| model | {head} | false alarms |", "| --- " * (len(LIES) + 2) + "|"]
    for what, rounds in (("first", 0), ("after 10 rounds", 1 if options.quick else 10)):
        told_ = " | ".join(f"{value:.3f}" for value in row(name, seeds, rounds, step))
        lines.append(f"| {what} | {told_} |")
    text = PAGE.format(table="\n".join(lines), name=name, seeds=seeds, clients=CLIENTS)
    print(text)
    if options.write:
        OUT.write_text(text)


PAGE = """# Claims against gradients

How often `audit_marginals` calls a client inconsistent at a level of 1 %, by how much of its mass
it claims for another label than the one it is of: {name}, {clients} clients of a Dirichlet(1)
split, LeNet, {seeds} seeds, every client once; made by `python benchmarks/marginals.py --write`.
Column 0 % and the false alarms are honest clients: the former each as it is, the latter of one
federation.

{table}
"""

if __name__ == "__main__":
    main()
