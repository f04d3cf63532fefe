"""FedDRM, CCVR and FedDisk against implementations in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.seeds import generator, key
from support.federations import CLASSES, FEATURES, TARGET
from support.references import (
    BODY,
    HEAD,
    SIZES,
    Loss,
    Played,
    Tree,
    adam,
    by_size,
    descend,
    entropy,
    farthest,
    features,
    federated,
    less,
    log_shares,
    logits,
    mixed,
    off,
    part,
    plus,
    reference_setting,
    surprise,
)
from support.routing import routed_model

EXACT, OTHER = 1e-12, 1e-5

# ------------------------------------------------------------------ FedDRM


def normed(z: Tensor, p: Tree, name: str) -> Tensor:
    """max(0, LayerNorm(W z + b)), row by row."""
    rows = []
    for row in z @ p[f"{name}.0.weight"].T + p[f"{name}.0.bias"]:
        centred = row - row.sum() / len(row)
        unit = centred / ((centred**2).sum() / len(row) + 1e-5).sqrt()
        rows.append(unit * p[f"{name}.1.weight"] + p[f"{name}.1.bias"])
    return torch.stack(rows).clamp(min=0)


def two_entropies(i: int, ids: list[int], lam: float) -> Loss:
    """lam of the class entropy, the rest of the client entropy over the clients that take part."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        z = (x @ p["body.0.0.weight"].T + p["body.0.0.bias"]).clamp(min=0)
        classes = normed(z, p, "body.1") @ p["head.weight"].T + p["head.bias"]
        origin = normed(z, p, "router.branch.0") @ p["router.head.weight"].T + p["router.head.bias"]
        place = torch.full((len(x),), ids.index(i))
        return lam * surprise(classes, y) + (1 - lam) * surprise(origin[:, ids], place)

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feddrm", "feddrm_shared_head"])
def test_feddrm(name: str) -> None:
    setting = reference_setting(model=routed_model(len(SIZES)), clients=len(SIZES))
    make: Any = getattr(recipes, name)
    played = Played.of(make(setting, lam=0.7))
    names = tuple(played.start)
    private = () if "shared" in name else HEAD

    def end(lam: float, everyone: bool = False) -> dict[int, Tree]:
        shared = [k for k in names if k not in private]
        theta, heads = part(played.start, shared), {}
        for t, ids in played.cohorts:
            changes = []
            for i in ids:
                start = theta | heads.get(i, part(played.start, private))
                loss = two_entropies(i, list(range(len(SIZES))) if everyone else ids, lam)
                done = descend(start, loss, played.batches(t, i), names)
                heads[i] = part(done, private)
                changes.append(less(part(done, shared), theta))
            theta = plus(theta, mixed(by_size(played, ids), changes))
        return {i: theta | head for i, head in heads.items()}

    models = end(0.7)
    if not private:
        assert off(played.end, next(iter(models.values()))) < EXACT
        assert off(played.end, next(iter(end(0.8).values()))) > OTHER
        return
    assert farthest(played, models) < EXACT
    assert farthest(played, end(0.8)) > OTHER
    assert farthest(played, end(0.7, everyone=True)) > OTHER


# ------------------------------------------------------------------ CCVR


def virtual_features(played: Played, theta: Tree, t: int, ids: list[int], draws: int) -> Any:
    """Of each label in the cohort: draws of the Gaussian of its features."""
    rows: dict[int, list[Tensor]] = {c: [] for c in range(CLASSES)}
    for i in ids:
        x, y = played.data(i)
        for f, label in zip(features(theta, x), y.tolist(), strict=True):
            rows[label].append(f)
    seed, drawn = key(played.federation.seeds.batch, "server", t), {}
    for c in range(CLASSES):
        noise = torch.randn(
            draws, 10, dtype=torch.float64, generator=generator(seed, "virtual features", c)
        )
        if not rows[c]:
            continue
        f = torch.stack(rows[c])
        mean = f.sum(0) / len(f)
        covariance = (f - mean).T @ (f - mean) / len(f)
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T
        drawn[c] = mean + noise @ root
    return drawn


def softmax_regression(
    drawn: dict[int, Tensor], shares: tuple[float, ...], ridge: float
) -> tuple[Tensor, Tensor]:
    """(W, b) by Newton's method on the whole Hessian, labels counting by their shares."""
    total = sum(shares[c] for c in drawn)
    x = torch.cat([torch.cat([f, torch.ones(len(f), 1).double()], 1) for f in drawn.values()])
    y = torch.cat([torch.full((len(f),), c) for c, f in drawn.items()])
    w = torch.cat(
        [torch.ones(len(f)).double() / len(f) * shares[c] / total for c, f in drawn.items()]
    )
    size = x.shape[1]
    b = torch.zeros(CLASSES * size).double()
    for _ in range(30):
        p = log_shares(x @ b.reshape(CLASSES, size).T).exp()
        slope = ((p - F.one_hot(y, CLASSES)) * w[:, None]).T @ x
        curve = torch.zeros(CLASSES, size, CLASSES, size).double()
        for c in range(CLASSES):
            for d in range(CLASSES):
                weight = w * p[:, c] * (float(c == d) - p[:, d])
                curve[c, :, d] = (x * weight[:, None]).T @ x
        whole = curve.reshape(CLASSES * size, -1) + ridge * torch.eye(CLASSES * size).double()
        b = b - torch.linalg.solve(whole, slope.flatten() + ridge * b)
    b = b.reshape(CLASSES, size)
    return b[:, :-1], b[:, -1]


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "shares"), [("ccvr", (0.2,) * CLASSES), ("ccvr_target", TARGET)])
def test_ccvr(name: str, shares: tuple[float, ...]) -> None:
    """The body as FedAvg's; the head is an iterative fit, which stops at a gradient of 1e-10."""
    make: Any = getattr(recipes, name)
    played = Played.of(make(reference_setting(), virtual=20, ridge=0.1))
    before = replace(played, rounds=played.rounds[:2])

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    theta = federated(before, client)
    assert off(part(played.end, BODY), part(theta, BODY)) < EXACT
    t, ids = played.cohorts[2]

    def gap(draws: int, shares: tuple[float, ...]) -> float:
        fit = softmax_regression(virtual_features(played, theta, t, ids, draws), shares, 0.1)
        return max(float((played.end[k] - v).abs().max()) for k, v in zip(HEAD, fit, strict=True))

    assert gap(20, shares) < 1e-8
    assert gap(19, shares) > 1e-3
    assert gap(20, (0.3, 0.3, 0.2, 0.1, 0.1)) > 1e-3


# ------------------------------------------------------------------ FedDisk

LOW, HIGH = -8.0, 8.0


def unit(x: Tensor) -> Tensor:
    return ((x - LOW) / (HIGH - LOW)).clamp(0, 1)


def conditional(degrees: Any, p: Tree, x: Tensor) -> Tensor:
    """MADE's logit for each input by those before it: one hidden layer, masked."""
    first, hidden = (d.tolist() for d in degrees)
    read = torch.tensor([[float(h >= d) for d in first] for h in hidden]).double()
    give = torch.tensor([[float(d > h) for h in hidden] for d in first]).double()
    names = ("body.0.linear", "body.2.linear")
    (a, b), (c, d) = ((p[f"{n}.weight"], p[f"{n}.bias"]) for n in names)
    return (unit(x) @ (a * read).T + b).clamp(min=0) @ (c * give).T + d


def density(degrees: Any) -> Loss:
    """-log q of a batch of inputs in [0, 1]."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        u, z = unit(x), conditional(degrees, p, x)
        each = u * z - torch.logaddexp(z, torch.zeros(()).double())
        return -each.sum() / len(x)

    return loss


def bounded(log_ratio: list[float], least: float, most: float) -> list[float]:
    """Ratios times the factor that makes the mean of what is cut at both bounds 1."""
    low, high = -1e3, 1e3
    for _ in range(300):
        middle = (low + high) / 2
        a = [min(max(r + middle, math.log(least)), math.log(most)) for r in log_ratio]
        if sum(math.exp(v) for v in a) <= len(a):
            low = middle
        else:
            high = middle
    return [math.exp(min(max(r + low, math.log(least)), math.log(most))) for r in log_ratio]


def weighed(played: Played, i: int, a: list[float]) -> Loss:
    """The entropy of a client's examples, each counting by its weight."""
    where = {tuple(row.tolist()): k for k, row in enumerate(played.data(i)[0])}

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        rows = log_shares(logits(p, x))
        each = [a[where[tuple(x[b].tolist())]] * -rows[b, int(c)] for b, c in enumerate(y)]
        return torch.stack(each).sum() / len(y)

    return loss


def disk(played: Played, most: float, ratio: Any, uniform: bool) -> Tree:
    """Two rounds of densities, one in which examples are weighed by a ratio, two of training."""
    recipe: Any = played.algorithm
    first = {k: v.double() for k, v in recipe.density.init()[0].items()}
    log_q, ids = density(recipe.density.net.degrees), list(range(len(SIZES)))
    shares = by_size(played, ids)
    p, q = first, dict.fromkeys(ids, first)
    for t in (1, 2):
        batches = {i: played.batches(t, i, "density0") for i in ids}
        ends = [adam(p, log_q, batches[i], tuple(first), 0.3) for i in ids]
        q = {i: adam(q[i], log_q, batches[i], tuple(first), 0.3) for i in ids}
        p = plus(p, mixed(shares, [less(e, p) for e in ends]))
    a = {i: bounded(ratio(played, i, p, q[i]), shares[i], most) for i in ids}
    theta = played.start
    for t in (4, 5):
        ends = [descend(theta, weighed(played, i, a[i]), played.batches(t, i)) for i in ids]
        by = [1 / len(ids)] * len(ids) if uniform else shares
        theta = plus(theta, mixed(by, [less(e, theta) for e in ends]))
    return theta


def direct(played: Played, i: int, p: Tree, q: Tree) -> list[float]:
    """0.9 (log p - log q)."""
    recipe: Any = played.algorithm
    log_q, (x, y) = density(recipe.density.net.degrees), played.data(i)
    rows = zip(x.split(1), y.split(1), strict=True)
    return [0.9 * float(log_q(q, *row) - log_q(p, *row)) for row in rows]


DISK: dict[str, Any] = {"density_rounds": 2, "hidden": (6,), "low": LOW, "high": HIGH}


def played_disk(recipe: Any) -> Played:
    return Played.of(replace(recipe, local=replace(recipe.local, lr=0.3)), rounds=5, cohort=5)


def test_feddisk() -> None:
    setting = reference_setting(shape=(FEATURES,), rounds=5)
    recipe = recipes.feddisk(setting, density="bernoulli", temper=0.9, most=1.1, **DISK)
    played = played_disk(recipe)
    assert off(played.end, disk(played, 1.1, direct, uniform=False)) < EXACT
    assert off(played.end, disk(played, 1.2, direct, uniform=False)) > OTHER


def odds_of_origin(played: Played, i: int, p: Tree, q: Tree) -> list[float]:
    """Log odds of two classifiers of the densities' answers, each for rows that it has not seen."""
    recipe: Any = played.algorithm
    answers = [
        torch.sigmoid(conditional(recipe.density.net.degrees, at, played.data(i)[0]))
        for at in (p, q)
    ]
    net = {k: v.double() for k, v in recipe.ratio.net.init()[0].items()}

    def odds(h: Tree, s: Tensor) -> Tensor:
        z = (s @ h["body.weight"].T + h["body.bias"]).clamp(min=0)
        return (z @ h["head.weight"].T + h["head.bias"])[:, 0]

    def trained(parity: int) -> Tree:
        def loss(h: Tree, rows: Tensor, _: Tensor) -> Tensor:
            zero = torch.zeros(()).double()
            ups, downs = (odds(h, s[rows]) for s in answers)
            each = (torch.logaddexp(zero, -ups) + torch.logaddexp(zero, downs)) / 2
            seen = [2.0 * each[b] for b, row in enumerate(rows.tolist()) if row % 2 == parity]
            return sum(seen, zero * each.sum()) / len(rows)

        steps = [(rows, rows) for rows in played.rows(3, i, "ratio0")]
        return adam(net, loss, steps, tuple(net), recipe.ratio.local.lr)

    even, odd = (odds(h, answers[1]) for h in (trained(1), trained(0)))
    return [float((even if row % 2 == 0 else odd)[row]) for row in range(played.n(i))]


@pytest.mark.slow
def test_made() -> None:
    """The classifiers' ratio, and uniform means of the models."""
    setting = reference_setting(shape=(FEATURES,), rounds=5)
    recipe: Any = recipes.made(setting, **DISK)
    quick = replace(recipe.ratio, local=replace(recipe.ratio.local, lr=0.05))
    played = played_disk(replace(recipe, ratio=quick))
    assert off(played.end, disk(played, 10.0, odds_of_origin, uniform=True)) < EXACT
    assert off(played.end, disk(played, 10.0, odds_of_origin, uniform=False)) > OTHER
    assert off(played.end, disk(played, 10.0, direct, uniform=True)) > OTHER
