"""FedDRM, CCVR and FedDisk against implementations in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedshift import recipes
from fedshift.seeds import generator, key
from support.federations import CLASSES, FEATURES
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


def test_feddrm() -> None:
    setting = reference_setting(model=routed_model(len(SIZES)), clients=len(SIZES))
    played = Played.of(recipes.feddrm(setting, lam=0.7))

    def end(lam: float, everyone: bool = False) -> dict[int, Tree]:
        names = tuple(played.start)
        shared = [k for k in names if k not in HEAD]
        theta, heads = part(played.start, shared), {}
        for t, ids in played.cohorts:
            changes = []
            for i in ids:
                start = theta | heads.get(i, part(played.start, HEAD))
                loss = two_entropies(i, list(range(len(SIZES))) if everyone else ids, lam)
                done = descend(start, loss, played.batches(t, i), names)
                heads[i] = part(done, HEAD)
                changes.append(less(part(done, shared), theta))
            theta = plus(theta, mixed(by_size(played, ids), changes))
        return {i: theta | head for i, head in heads.items()}

    assert farthest(played, end(0.7)) < EXACT
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


def softmax_regression(drawn: dict[int, Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """(W, b) by Newton's method on the whole Hessian, labels counting alike."""
    x = torch.cat([torch.cat([f, torch.ones(len(f), 1).double()], 1) for f in drawn.values()])
    y = torch.cat([torch.full((len(f),), c) for c, f in drawn.items()])
    w = torch.cat([torch.ones(len(f)).double() / len(f) / len(drawn) for f in drawn.values()])
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


def test_ccvr() -> None:
    """The body as FedAvg's; the head is an iterative fit, which stops at a gradient of 1e-10."""
    played = Played.of(recipes.ccvr(reference_setting(), virtual=20, ridge=0.1))
    before = replace(played, rounds=played.rounds[:2])

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    theta = federated(before, client)
    assert off(part(played.end, BODY), part(theta, BODY)) < EXACT
    t, ids = played.cohorts[2]
    fits = [softmax_regression(virtual_features(played, theta, t, ids, n), 0.1) for n in (20, 19)]
    gaps = [
        max(float((played.end[k] - v).abs().max()) for k, v in zip(HEAD, fit, strict=True))
        for fit in fits
    ]
    assert gaps[0] < 1e-8
    assert gaps[1] > 1e-3


# ------------------------------------------------------------------ FedDisk

LOW, HIGH = -8.0, 8.0


def density(degrees: Any) -> Loss:
    """-log q of a batch by MADE: inputs in [0, 1], one hidden layer, one logit for each input."""
    first, hidden = (d.tolist() for d in degrees)
    read = torch.tensor([[float(h >= d) for d in first] for h in hidden]).double()
    give = torch.tensor([[float(d > h) for h in hidden] for d in first]).double()

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        u = ((x - LOW) / (HIGH - LOW)).clamp(0, 1)
        names = ("body.0.linear", "body.2.linear")
        (a, b), (c, d) = ((p[f"{n}.weight"], p[f"{n}.bias"]) for n in names)
        z = (u @ (a * read).T + b).clamp(min=0) @ (c * give).T + d
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


def test_feddisk() -> None:
    """A round of densities, one in which examples are weighed, two of training."""
    options: dict[str, Any] = {"density_rounds": 2, "hidden": (6,), "low": LOW, "high": HIGH}
    setting = reference_setting(shape=(FEATURES,), rounds=5)
    recipe = recipes.feddisk(setting, estimator="direct", temper=60.0 / 64, most=1.1, **options)
    played = Played.of(replace(recipe, local=replace(recipe.local, lr=0.3)), rounds=5, cohort=5)
    net: Any = recipe.density
    log_q = density(net.net.degrees)
    first = {k: v.double() for k, v in net.init()[0].items()}
    ids = list(range(len(SIZES)))
    shares = by_size(played, ids)

    def end(most: float) -> Tree:
        p, q = first, dict.fromkeys(ids, first)
        for t in (1, 2):
            batches = {i: played.batches(t, i, "density0") for i in ids}
            ends = [adam(p, log_q, batches[i], tuple(first), 0.3) for i in ids]
            q = {i: adam(q[i], log_q, batches[i], tuple(first), 0.3) for i in ids}
            p = plus(p, mixed(shares, [less(e, p) for e in ends]))
        a = {}
        for i in ids:
            x, y = played.data(i)
            rows = zip(x.split(1), y.split(1), strict=True)
            gaps = [60 / 64 * float(log_q(q[i], *row) - log_q(p, *row)) for row in rows]
            a[i] = torch.tensor(bounded(gaps, shares[i], most), dtype=torch.float64)
        theta = played.start
        for t in (4, 5):
            changes = []
            for i in ids:
                x, y = played.data(i)
                where = {tuple(row.tolist()): k for k, row in enumerate(x)}

                def loss(at: Tree, x: Tensor, y: Tensor, i: int = i, w: Any = where) -> Tensor:
                    rows = log_shares(logits(at, x))
                    each = [
                        a[i][w[tuple(x[b].tolist())]] * -rows[b, int(c)] for b, c in enumerate(y)
                    ]
                    return torch.stack(each).sum() / len(y)

                changes.append(less(descend(theta, loss, played.batches(t, i)), theta))
            theta = plus(theta, mixed(shares, changes))
        return theta

    assert off(played.end, end(1.1)) < EXACT
    assert off(played.end, end(1.2)) > OTHER
