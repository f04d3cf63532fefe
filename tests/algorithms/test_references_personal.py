"""Methods with a model for each client against implementations in plain loops, as they serve."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.recipes import Setting
from support.federations import CLASSES
from support.references import (
    BODY,
    HEAD,
    LOCAL,
    STEPS,
    Bodied,
    Loss,
    Played,
    Tree,
    bodies,
    by_size,
    descend,
    entropy,
    farthest,
    features,
    gradient,
    head_first,
    less,
    mixed,
    part,
    plus,
    pulled,
    reference_setting,
)

EXACT, OTHER = 1e-12, 1e-5


# ------------------------------------------------------------------ bodies and heads


def whole(played: Played) -> Bodied:
    """FedPer: body and head together."""
    return lambda t, i, p: descend(p, entropy, played.batches(t, i))


SPLIT: dict[str, tuple[Callable[[Setting], Any], Callable[[Played], Bodied]]] = {
    "fedper": (recipes.fedper, whole),
    "fedrep": (lambda s: recipes.fedrep(s, head_epochs=3), head_first),
    "fedrep_drm_repo": (recipes.fedrep_drm_repo, head_first),
    "fedpac_drm_repo": (
        lambda s: recipes.fedpac_drm_repo(s, mu=0.3),
        lambda played: head_first(played, 0.3),
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SPLIT)
def test_shared_bodies(name: str) -> None:
    make, client = SPLIT[name]
    local = STEPS if "repo" in name else LOCAL
    played = Played.of(make(reference_setting(local=local)))
    assert farthest(played, bodies(played, client(played))) < EXACT
    other = head_first(played, 0.2) if "pac" in name else whole(played)
    wrong = bodies(played, other if name != "fedper" else without_head(played))
    assert farthest(played, wrong) > OTHER


def without_head(played: Played) -> Bodied:
    """FedBABU: the body under a head that stays."""
    return lambda t, i, p: descend(p, entropy, played.batches(t, i), BODY)


TUNED: dict[str, tuple[Callable[[Setting], Any], tuple[str, ...]]] = {
    "full": (lambda s: recipes.fedbabu(s, tune_rounds=1), (*BODY, *HEAD)),
    "head": (lambda s: recipes.fedbabu(s, tune_rounds=1, tune_part="head"), HEAD),
    "fedbabu_drm_repo": (lambda s: recipes.fedbabu_drm_repo(s, tune_rounds=1), HEAD),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TUNED)
def test_a_body_and_then_tuning(name: str) -> None:
    """FedBABU; in the last of three rounds the clients tune what they would serve."""
    make, names = TUNED[name]
    played = Played.of(make(reference_setting(local=STEPS if "repo" in name else LOCAL)))

    def end(client: Bodied) -> dict[int, Tree]:
        models = bodies(played, client, until=2)
        (theta,) = {id(m[BODY[0]]): m for m in models.values()}.values()
        t, ids = played.cohorts[2]
        for i in ids:
            start = part(theta, BODY) | part(models.get(i, played.start), HEAD)
            models[i] = descend(start, entropy, played.batches(t, i, "personal0"), names)
        return models

    assert farthest(played, end(without_head(played))) < EXACT
    assert farthest(played, end(whole(played))) > OTHER


# ------------------------------------------------------------------ two models


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ditto", "ditto_drm_repo"])
def test_ditto(name: str) -> None:
    """w by FedAvg, and v_i pulled to the w received with strength 0.7."""
    local = STEPS if "repo" in name else LOCAL
    make: Any = getattr(recipes, name)
    played = Played.of(make(reference_setting(local=local), lam=0.7))

    def end(lam: float) -> dict[int, Tree]:
        w, personal = played.start, {}
        for t, ids in played.cohorts:
            changes = []
            for i in ids:
                changes.append(less(descend(w, entropy, played.batches(t, i)), w))
                v, loss = personal.get(i, played.start), pulled(w, lam)
                personal[i] = descend(v, loss, played.batches(t, i, "personal0"))
            w = plus(w, mixed(by_size(played, ids), changes))
        return personal

    steps = len(played.batches(1, 0)), len(played.batches(1, 0, "personal0"))
    assert steps == ((2, 3) if "repo" in name else (6, 6))
    assert farthest(played, end(0.7)) < EXACT
    assert farthest(played, end(0.6)) > OTHER


def test_alone_and_tuned() -> None:
    """local_only; and FedAvg, whose clients tune alone in the last of three rounds."""
    alone = Played.of(recipes.local_only(reference_setting()))
    tuned = Played.of(recipes.fedavgft(reference_setting(), tune_rounds=1))
    models: dict[int, Tree] = {}
    for t, ids in alone.cohorts:
        for i in ids:
            start = models.get(i, alone.start)
            models[i] = descend(start, entropy, alone.batches(t, i, "personal0"))
    assert farthest(alone, models) < EXACT
    w = tuned.start
    for t, ids in tuned.cohorts[:2]:
        ends = [descend(w, entropy, tuned.batches(t, i)) for i in ids]
        w = plus(w, mixed(by_size(tuned, ids), [less(end, w) for end in ends]))
    check_tuned(tuned, w)


def check_tuned(played: Played, w: Tree) -> None:
    """In the last of three rounds clients tune w by plain steps; others serve it."""
    t, ids = played.cohorts[2]
    models = dict.fromkeys(played.rounds[-1].states, w)
    assert farthest(played, models) > OTHER
    models |= {i: descend(w, entropy, played.batches(t, i, "personal0")) for i in ids}
    assert farthest(played, models) < EXACT


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["fedproxft", "fedsamft"])
def test_other_methods_and_then_tuning(name: str) -> None:
    options: dict[str, Any] = {"mu": 0.4} if name == "fedproxft" else {"rho": 0.2}
    make: Any = getattr(recipes, name)
    played = Played.of(make(reference_setting(), tune_rounds=1, **options))
    w = played.start
    for t, ids in played.cohorts[:2]:
        loss, rho = pulled(w, options.get("mu", 0.0)), options.get("rho", 0.0)
        ends = [descend(w, loss, played.batches(t, i), rho=rho) for i in ids]
        w = plus(w, mixed(by_size(played, ids), [less(end, w) for end in ends]))
    check_tuned(played, w)


# ------------------------------------------------------------------ FedPAC


def by_class(p: Tree, played: Played, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of a client's features: examples n [K], means [K, d], mean squared norms [K] by label."""
    x, y = played.data(i)
    f = features(p, x)
    n = torch.tensor(played.counts(i)).double()
    mean, square = torch.zeros(CLASSES, f.shape[1]).double(), torch.zeros(CLASSES).double()
    for row, label in zip(f, y, strict=True):
        mean[label] += row / n[label]
        square[label] += (row @ row) / n[label]
    return n, mean, square


def best_mixture(variance: list[float], rows: list[Tensor], i: int) -> list[float]:
    """argmin of alpha' P alpha over the simplex: the best of all faces, each solved exactly."""
    far = torch.stack([rows[i] - row for row in rows])
    trace = sum(variance) + float((far**2).sum())
    spread = torch.tensor([v + 1e-12 * trace for v in variance], dtype=torch.float64)
    P = far @ far.T + spread.diag()
    count, best = len(rows), (float("inf"), [0.0])
    faces = chain.from_iterable(combinations(range(count), k) for k in range(1, count + 1))
    for face in map(list, faces):
        inner = torch.linalg.solve(P[face][:, face], torch.ones(len(face)).double())
        alpha = torch.zeros(count).double()
        alpha[face] = inner / inner.sum()
        if float(alpha.min()) >= 0.0:
            best = min(best, (float(alpha @ P @ alpha), alpha.tolist()))
    return best[1]


def pac(played: Played, lam: float, mix: bool) -> dict[int, Tree]:
    """FedPAC: the heads, bodies and class means of every round."""
    theta, c = part(played.start, BODY), None
    heads = {i: part(played.start, HEAD) for i in range(len(played.federation.clients))}
    for t, ids in played.cohorts:
        ends, variance, rows, sums = {}, [], [], torch.zeros(CLASSES, 11).double()
        for i in ids:
            start = theta | heads[i]
            n, mean, square = by_class(start, played, i)
            p = n / n.sum()
            variance.append(float((p * square - p**2 * (mean**2).sum(1)).sum() / n.sum()))
            rows.append((p[:, None] * mean).flatten())
            goal = None if c is None else torch.where(c[:, :1] > 0, c[:, 1:], mean)

            def loss(at: Tree, x: Tensor, y: Tensor, goal: Tensor | None = goal) -> Tensor:
                plain = entropy(at, x, y)
                if goal is None:
                    return plain
                gaps = [(f - goal[k]) ** 2 for f, k in zip(features(at, x), y, strict=True)]
                return plain + lam * torch.stack(gaps).mean()

            fitted = descend(start, loss, played.batches(t, i), HEAD)
            ends[i] = descend(fitted, loss, played.batches(t, i, "train1"), BODY)
            n, mean, _ = by_class(ends[i], played, i)
            sums += torch.cat([n[:, None], n[:, None] * mean], 1)
        c = torch.cat([sums[:, :1], sums[:, 1:] / sums[:, :1].clamp(min=1)], 1)
        changes = [less(part(ends[i], BODY), theta) for i in ids]
        theta = plus(theta, mixed(by_size(played, ids), changes))
        trained = [part(ends[i], HEAD) for i in ids]
        for row, i in enumerate(ids):
            heads[i] = mixed(best_mixture(variance, rows, row), trained) if mix else trained[row]
    return {i: theta | heads[i] for i in played.rounds[-1].states}


def test_fedpac() -> None:
    played = Played.of(recipes.fedpac(reference_setting(), lam=0.6))
    assert farthest(played, pac(played, 0.6, mix=True)) < EXACT
    assert farthest(played, pac(played, 0.5, mix=True)) > OTHER
    assert farthest(played, pac(played, 0.6, mix=False)) > OTHER


# ------------------------------------------------------------------ FedALA


def learned_mixing(
    w: Tree, old: Tree, new: Tree, batches: list[Any], epochs: int, lr: float
) -> Tree:
    """W by steps on the entropy at the mixture, clipped, until its last losses settle."""
    losses: list[float] = []
    for _ in range(epochs):
        for x, y in batches:
            here = new | {k: old[k] + (new[k] - old[k]) * w[k] for k in w}
            last = float(entropy(here, x, y))
            grad = gradient(entropy, here, x, y, w)
            w = {k: (w[k] - lr * grad[k] * (new[k] - old[k])).clamp(0, 1) for k in w}
        losses.append(last)
        if len(losses) > 10 and np.std(losses[-10:]) < 0.1:
            break
    return w


def ala(played: Played, lr: float) -> dict[int, Tree]:
    """FedALA with the classifier's weights mixed, learned on 80 % of the examples."""
    theta, models, mixing = played.start, {}, {}
    for t, ids in played.cohorts:
        ends = {}
        for i in ids:
            start, old = theta, models.get(i, played.start)
            if any(bool((old[k] != theta[k]).any()) for k in theta):
                left, batches = int(0.8 * played.n(i)), []
                for x, y in played.batches(t, i, "mix"):
                    batches += [(x[:left], y[:left])] if left > 0 else []
                    left -= len(x)
                first = {k: torch.ones_like(theta[k]) for k in HEAD}
                w, epochs = mixing.get(i, first), 1 if i in mixing else 50
                mixing[i] = w = learned_mixing(w, old, theta, batches, epochs, lr)
                start = theta | {k: old[k] + (theta[k] - old[k]) * w[k] for k in HEAD}
            ends[i] = descend(start, entropy, played.batches(t, i))
        models |= ends
        changes = [less(ends[i], theta) for i in ids]
        theta = plus(theta, mixed(by_size(played, ids), changes))
    return models


def test_fedala() -> None:
    played = Played.of(recipes.fedala(reference_setting(), mix_lr=5.0))
    assert farthest(played, ala(played, 5.0)) < EXACT
    assert farthest(played, ala(played, 4.0)) > OTHER


def test_fedala_as_the_other_code_runs_it() -> None:
    """FedAvg by half of the steps, whose clients serve what they sent."""
    played = Played.of(recipes.fedala_drm_repo(reference_setting(local=STEPS)))
    theta, models = played.start, {}
    for t, ids in played.cohorts:
        ends = {i: descend(theta, entropy, played.batches(t, i)) for i in ids}
        models |= ends
        theta = plus(theta, mixed(by_size(played, ids), [less(ends[i], theta) for i in ids]))
    assert len(played.batches(1, 0)) == 3
    assert farthest(played, models) < EXACT
    assert farthest(played, dict.fromkeys(models, theta)) > OTHER


# ------------------------------------------------------------------ FedAS


def to_class_means(means: Tensor, n: Tensor) -> Loss:
    """The sum over the classes of the batch of mean squared distances of their features."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        f, total = features(p, x), torch.zeros(()).double()
        for k in range(CLASSES):
            rows = [b for b, label in enumerate(y) if int(label) == k]
            if rows and n[k]:
                total = total + ((f[rows] - means[k]) ** 2).mean()
        return total

    return loss


def to_last(last: Tree) -> Loss:
    """The mean squared distance of the features to those of the client's last model."""
    return lambda p, x, y: ((features(p, x) - features(last, x)) ** 2).mean()


def trace(played: Played, t: int, i: int, p: Tree) -> float:
    grads = [gradient(entropy, p, x, y, p) for x, y in played.batches(t, i, "pass")]
    return sum(float((g**2).sum()) for grad in grads for g in grad.values())


def aligned(played: Played, first: bool, repo: bool) -> dict[int, Tree]:
    """FedAS by its authors' losses and traces, or as the FedDRM authors' code runs it."""
    last: dict[int, Tree] = {}
    how = {} if repo else {"lr": 0.05, "momentum": 0.0, "decay": 0.0}
    traces: dict[int, list[float]] = {t: [] for t, _ in played.cohorts}

    def client(t: int, i: int, p: Tree) -> Tree:
        if i in last or first:
            old = last.get(i, played.start)
            n, means, _ = by_class(old, played, i)
            loss = to_last(old) if repo else to_class_means(means, n)
            p = descend(p, loss, played.batches(t, i, "align"), BODY, **how)
        last[i] = descend(p, entropy, played.batches(t, i))
        traces[t].append(trace(played, t, i, last[i]))
        return last[i]

    def by_trace(t: int, weights: list[float], changes: list[Tree]) -> Tree:
        return mixed([v / sum(traces[t]) for v in traces[t]], changes)

    return bodies(played, client, combine=None if repo else by_trace)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [False, True])
def test_fedas(first: bool) -> None:
    options: dict[str, Any] = {"align_lr": 0.05, "align_batch": 5, "align_first": first}
    played = Played.of(recipes.fedas(reference_setting(), **options))
    assert farthest(played, aligned(played, first, repo=False)) < EXACT
    assert farthest(played, aligned(played, not first, repo=False)) > OTHER


def test_fedas_as_the_other_code_runs_it() -> None:
    """Of 5 steps the first matches features, with the momentum and decay of training."""
    played = Played.of(recipes.fedas_drm_repo(reference_setting(local=STEPS)))
    assert farthest(played, aligned(played, True, repo=True)) < EXACT
    assert farthest(played, aligned(played, False, repo=True)) > OTHER
