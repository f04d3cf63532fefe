"""Label sets and central tuning against implementations in plain loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.algorithms.tuning import CentralTuning
from fedshift.seeds import key
from support.every_method import with_inputs
from support.federations import CLASSES
from support.references import (
    BODY,
    HEAD,
    Loss,
    Played,
    Tree,
    adam,
    by_size,
    descend,
    entropy,
    entropy_over,
    labels_of,
    less,
    log_shares,
    logits,
    off,
    part,
    plus,
    reference_setting,
    row_means,
)

EXACT, OTHER = 1e-12, 1e-5


def restricted_loss(labels: list[int], received: Tree, mu: float) -> Loss:
    """The entropy over a client's labels, with a pull to the body and rows received."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        total = entropy_over(labels)(p, x, y)
        for k in p:
            rows = labels if k in HEAD else slice(None)
            total = total + mu / 2 * ((p[k] - received[k])[rows] ** 2).sum()
        return total

    return loss


def trained(played: Played, mode: str, mu: float = 0.0) -> Tree:
    theta = played.start
    for t, ids in played.cohorts:
        changes = []
        for i in ids:
            labels = labels_of(played, i) if mode == "private" else list(range(CLASSES))
            end = descend(theta, restricted_loss(labels, theta, mu), played.batches(t, i))
            changes.append(less(end, theta))
        theta = plus(
            theta, row_means(played, ids, by_size(played, ids), changes, ids, mode == "public")
        )
    return theta


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["private", "holders", "public"])
def test_modes_of_label_sets(mode: Any) -> None:
    played = Played.of(recipes.labelset_fedprox(reference_setting(), mu=0.2, mode=mode))
    assert off(played.end, trained(played, mode, 0.2)) < EXACT
    assert off(played.end, trained(played, mode)) > OTHER
    other = "holders" if mode != "holders" else "private"
    assert off(played.end, trained(played, other, 0.2)) > OTHER


# ------------------------------------------------------------------ central tuning


def disagreement(kind: str, p: Tensor, q: Tensor, labels: list[int]) -> Tensor:
    """Of one client on one input, p [L] over its labels and q [K]: label by label, or by pairs."""
    if kind == "kl":
        return torch.stack([p[r] * (p[r] / q[y]).log() for r, y in enumerate(labels)]).sum()
    if kind == "mse":
        return torch.stack([(p[r] - q[y]) ** 2 for r, y in enumerate(labels)]).sum()
    pairs = [
        (p[r] * q[z] - p[s] * q[y]) ** 2 for r, y in enumerate(labels) for s, z in enumerate(labels)
    ]
    return torch.stack(pairs).sum()


def tuned(
    played: Played, kind: str, names: tuple[str, ...], union: bool,
    kept: bool = False, rounds: int = 0,
) -> Tree:  # fmt: skip
    """Private label sets; after each round some steps towards the clients' models.

    kept: with Adam's moments of the rounds before; rows of absent labels stay.
    """
    memory: Any = ({}, {}, [])
    algorithm: Any = played.algorithm
    assert isinstance(algorithm, CentralTuning)
    theta = played.start
    for t, ids in played.cohorts:
        ends = [
            descend(theta, restricted_loss(labels_of(played, i), theta, 0.0), played.batches(t, i))
            for i in ids
        ]
        theta = plus(
            theta,
            row_means(
                played, ids, by_size(played, ids), [less(e, theta) for e in ends], ids, False
            ),
        )
        if rounds and t > rounds:
            continue
        a, sets = by_size(played, ids), [labels_of(played, i) for i in ids]
        there = sorted({y for labels in sets for y in labels}) if union else list(range(CLASSES))

        def loss(
            p: Tree, x: Tensor, _: Tensor, a: Any = a, sets: Any = sets, ends: Any = ends,
            there: list[int] = there,
        ) -> Tensor:  # fmt: skip
            q = torch.zeros(len(x), CLASSES).double()
            q[:, there] = log_shares(logits(p, x)[:, there]).exp()
            total = torch.zeros(()).double()
            for w, labels, end in zip(a, sets, ends, strict=True):
                opinion = log_shares(logits(end, x)[:, labels]).exp()
                if kind == "kl":  # no other logit enters: Adam would make steps of its rounding
                    q = torch.zeros(len(x), CLASSES).double()
                    q[:, labels] = log_shares(logits(p, x)[:, labels]).exp()
                each = [disagreement(kind, *pair, labels) for pair in zip(opinion, q, strict=True)]
                total = total + w * torch.stack(each).mean()
            return total

        rows = algorithm._batches(key(played.federation.seeds.batch, "server", t))
        batches = [(algorithm.inputs[r].double(), r) for r in rows]
        before = theta
        theta = adam(theta, loss, batches, names, algorithm.lr, memory if kept else None)
        absent = [y for y in range(CLASSES) if not any(y in labels for labels in sets)]
        for k in HEAD if kept else ():
            theta[k][absent] = before[k][absent]
    return theta


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["mse", "pairwise"])
@pytest.mark.parametrize("union", [False, True])
def test_central_tuning(kind: Any, union: bool) -> None:
    names = (*BODY, *HEAD) if kind == "mse" else HEAD
    setting = with_inputs(reference_setting())
    recipe = recipes.labelset_fedavg(
        setting, tune=kind, tune_steps=4, tune_lr=0.01,
        tune_part="all" if kind == "mse" else "head", tune_over="union" if union else "all",
    )  # fmt: skip
    assert isinstance(recipe, CentralTuning)
    played = Played.of(replace(recipe, batch=12), rounds=2, cohort=2)
    assert any(len(part(r.server["absent"], ["now"])["now"].nonzero()) for r in played.rounds)
    assert off(played.end, tuned(played, kind, names, union)) < EXACT
    assert off(played.end, tuned(played, kind, names, not union)) > OTHER
    assert off(played.end, trained(played, "private")) > OTHER


@pytest.mark.few(1)
@pytest.mark.parametrize(("kept", "rounds"), [(False, 0), (True, 0), (True, 2)])
def test_central_tuning_by_restricted_kl(kept: bool, rounds: int) -> None:
    recipe = recipes.labelset_fedavg(
        with_inputs(reference_setting()), tune="kl", tune_steps=4, tune_lr=0.01,
        tune_rounds=rounds, tune_moments="kept" if kept else "new",
    )  # fmt: skip
    assert isinstance(recipe, CentralTuning)
    played = Played.of(replace(recipe, batch=12), rounds=3, cohort=2)
    assert any(len(part(r.server["absent"], ["now"])["now"].nonzero()) for r in played.rounds)
    assert off(played.end, tuned(played, "kl", HEAD, False, kept, rounds)) < EXACT
    assert off(played.end, tuned(played, "kl", HEAD, False, not kept, rounds)) > OTHER
    assert off(played.end, tuned(played, "kl", HEAD, False, kept, 1)) > OTHER
    assert off(played.end, tuned(played, "mse", HEAD, False, kept, rounds)) > OTHER


def test_the_entropy_over_all_labels_is_the_plain_one() -> None:
    played = Played.of(recipes.labelset_fedavg(reference_setting()), rounds=1)
    x, y = played.data(0)
    same = restricted_loss(list(range(CLASSES)), played.start, 0.0)(played.start, x, y)
    assert torch.equal(same, entropy(played.start, x, y))
