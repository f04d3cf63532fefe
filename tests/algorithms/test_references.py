"""Methods of one model against implementations in plain loops: losses, examples, server steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.model import Model
from fedshift.recipes import Setting
from support.federations import CLASSES, TARGET
from support.references import (
    BODY,
    LOCAL,
    Loss,
    Played,
    Tree,
    by_size,
    descend,
    entropy,
    features,
    federated,
    less,
    log_shares,
    logits,
    mixed,
    off,
    plus,
    reference_setting,
    surprise,
    uniform,
)

EXACT, OTHER = 1e-12, 1e-5
# (the run, client, the model received, the client's last model) -> its loss.
LossOf = Callable[[Played, int, Tree, Tree], Loss]


def plain(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    return entropy


def proximal(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return entropy(p, x, y) + 0.05 * sum(((p[k] - received[k]) ** 2).sum() for k in p)

    return loss


def restricted(mode: str) -> LossOf:
    """FedRS: logits times a, 0.3 or 1, or 0.7 of the relative frequency and 0.3."""

    def loss_of(played: Played, i: int, received: Tree, last: Tree) -> Loss:
        n = played.counts(i)
        if mode == "indicator":
            a = [1.0 if count else 0.3 for count in n]
        else:
            a = [0.7 * count / max(n) + 0.3 for count in n]
        scale = torch.tensor(a, dtype=torch.float64)
        return lambda p, x, y: surprise(scale * logits(p, x), y)

    return loss_of


def contrasted(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    """MOON: -log of the share of the model received, of e^(cosine / 0.5), times 2."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        total = entropy(p, x, y)
        here, there, then = features(p, x), features(received, x), features(last, x)
        for z, up, down in zip(here, there, then, strict=True):
            unit = z / z.norm()
            near, far = (unit @ (v / v.norm()) / 0.5 for v in (up, down))
            total = total + 2.0 / len(x) * -(near - torch.logaddexp(near, far))
        return total

    return loss


def counted(least: float) -> LossOf:
    """Logits plus log n_c, a label without examples counting as `least`."""

    def loss_of(played: Played, i: int, received: Tree, last: Tree) -> Loss:
        shift = torch.tensor([log(n or least) for n in played.counts(i)], dtype=torch.float64)
        return lambda p, x, y: surprise(logits(p, x) + shift, y)

    return loss_of


def margins(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    """FedLC: logits less 0.5 n_c^(-1/4), over the labels that the client has."""
    n = played.counts(i)
    there = [c for c in range(CLASSES) if n[c]]
    margin = torch.tensor([0.5 * n[c] ** -0.25 for c in there], dtype=torch.float64)

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        places = torch.tensor([there.index(int(c)) for c in y])
        return surprise(logits(p, x)[:, there] - margin, places)

    return loss


def divergence(
    p: Tree, received: Tree, x: Tensor, label_sets: list[list[int]], tau: float
) -> Tensor:
    """The sum over examples of KL(received || p) of the softmax over some labels."""
    total = torch.zeros((), dtype=torch.float64)
    for z, g, labels in zip(logits(p, x), logits(received, x), label_sets, strict=True):
        mine, its = (log_shares(v[None, labels] / tau)[0] for v in (z, g))
        total = total + (its.exp() * (its - mine)).sum()
    return total


def not_true(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    """FedNTD with beta = 0.8 and tau = 2."""

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        label_sets = [[c for c in range(CLASSES) if c != int(label)] for label in y]
        return entropy(p, x, y) + 0.8 / len(x) * divergence(p, received, x, label_sets, 2.0)

    return loss


def vacant(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    """FedVLS with strengths 0.6 and 0.2."""
    n = played.counts(i)
    missing = [c for c in range(CLASSES) if not n[c]]
    shift = torch.tensor([log(count or 1e-6) for count in n], dtype=torch.float64)

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        z = logits(p, x)
        total = surprise(z + shift, y)
        total = total + 0.6 / len(x) * divergence(p, received, x, [missing] * len(x), 1.0)
        for c, count in enumerate(n):
            share = count / sum(n)
            prior = log(CLASSES * (share + 1e-9))
            terms = [(z[b, c] - prior) if int(y[b]) != c else 0 * z[b, c] for b in range(len(x))]
            total = total + 0.2 * share * (torch.stack(terms).exp().sum() / len(x)).log()
        return total

    return loss


def decorrelated(scale: str) -> LossOf:
    """FedDecorr with beta = 0.1, or 0.01 by the code: the correlations one by one."""

    def loss_of(played: Played, i: int, received: Tree, last: Tree) -> Loss:
        def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
            f = features(p, x)
            size, d = f.shape
            columns = [f[:, j] - f[:, j].sum() / size for j in range(d)]
            spread = [((c * c).sum() / size + 1e-8).sqrt() for c in columns]
            total = torch.zeros((), dtype=torch.float64)
            for j in range(d):
                for k in range(j + (scale == "code"), d):
                    r = (columns[j] * columns[k]).sum() / size / spread[j] / spread[k]
                    total = total + (1 if j == k else 2) * r * r
            paper = 0.1 / d**2
            code = 0.01 * (size - 1) ** 2 / size / (d * (d - 1))
            return entropy(p, x, y) + (paper if scale == "paper" else code) * total

        return loss

    return loss_of


def scaled(played: Played, i: int, received: Tree, last: Tree) -> Loss:
    """FedGELA: logits times K S_c."""
    n = played.counts(i)
    a = torch.tensor([CLASSES * count / sum(n) for count in n], dtype=torch.float64)
    return lambda p, x, y: surprise(a * logits(p, x), y)


LOSSES: dict[str, tuple[Callable[[Setting], Any], LossOf]] = {
    "fedavg": (recipes.fedavg, plain),
    "fedprox": (lambda s: recipes.fedprox(s, mu=0.1), proximal),
    "fedrs": (lambda s: recipes.fedrs(s, alpha=0.3), restricted("indicator")),
    "fedrs by frequency": (
        lambda s: recipes.fedrs(s, alpha=0.3, mode="frequency"),
        restricted("frequency"),
    ),
    "moon": (lambda s: recipes.moon(s, mu=2.0), contrasted),
    "balanced_softmax": (recipes.balanced_softmax, counted(1e-30)),
    "fedlc": (lambda s: recipes.fedlc(s, tau=0.5), margins),
    "fedntd": (lambda s: recipes.fedntd(s, beta=0.8, tau=2.0), not_true),
    "fedvls": (lambda s: recipes.fedvls(s, distill=0.6, suppress=0.2), vacant),
    "feddecorr": (lambda s: recipes.feddecorr(s, beta=0.1), decorrelated("paper")),
    "feddecorr by code": (
        lambda s: recipes.feddecorr(s, beta=0.01, scale="code"),
        decorrelated("code"),
    ),
}


def trained(played: Played, loss_of: LossOf, **how: Any) -> Tree:
    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, loss_of(played, i, theta, last), played.batches(t, i), **how)

    return federated(played, client)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", LOSSES)
def test_local_losses(name: str) -> None:
    """Three rounds of three of five clients; the control is the loss of another method."""
    make, loss_of = LOSSES[name]
    # Correlations of few examples have gradients up to 1e4, which make much of rounding.
    local = replace(LOCAL, batch=14) if "decorr" in name else LOCAL
    played = Played.of(make(reference_setting(local=local)))
    assert off(played.end, trained(played, loss_of)) < EXACT
    other = plain if loss_of is not plain else proximal
    assert off(played.end, trained(played, other)) > OTHER


def fixed_head(setting: Setting) -> Setting:
    net: Any = copy.deepcopy(setting.model.net)
    net.head.weight.requires_grad_(False)
    return replace(setting, model=Model(net))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "loss_of"), [(recipes.fedetf, counted(1.0)), (recipes.fedgela, scaled)]
)
def test_fixed_classifiers(make: Any, loss_of: LossOf) -> None:
    played = Played.of(make(fixed_head(reference_setting())))
    names = (*BODY, "head.bias")
    assert off(played.end, trained(played, loss_of, names=names)) < EXACT
    assert off(played.end, trained(played, loss_of)) > OTHER
    assert off(played.end, trained(played, plain, names=names)) > OTHER


def test_sharpness_aware_steps() -> None:
    played = Played.of(recipes.fedsam(reference_setting(), rho=0.3))
    assert off(played.end, trained(played, plain, rho=0.3)) < EXACT
    assert off(played.end, trained(played, plain, rho=0.29)) > OTHER


# ------------------------------------------------------------------ AFL


def on_simplex(v: list[float], total: float) -> list[float]:
    """The nearest point of the simplex of this sum, by halving an interval."""
    low, high = min(v) - total, max(v)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(0.0, x - middle) for x in v) > total:
            low = middle
        else:
            high = middle
    return [max(0.0, x - low) for x in v]


def agnostic(played: Played, gamma: float, domains: list[int], whole: bool) -> Tree:
    """AFL: lambda over domains, moved by the losses of the model received."""
    everyone = range(len(domains))
    size = [sum(played.n(i) for i in everyone if domains[i] == d) for d in range(3)]
    shares = [n / sum(size) for n in size]
    theta = played.start
    for t, ids in played.cohorts:
        there = [sum(played.n(i) for i in ids if domains[i] == d) for d in range(3)]
        by = there if whole else size
        raw = [shares[domains[i]] * played.n(i) / by[domains[i]] for i in ids]
        ends = [descend(theta, entropy, played.batches(t, i)) for i in ids]
        losses = [0.0] * 3
        for i in ids:
            d = domains[i]
            losses[d] += float(entropy(theta, *played.data(i))) * played.n(i) / there[d]
        changes = [less(end, theta) for end in ends]
        theta = plus(theta, mixed([r / sum(raw) for r in raw], changes))
        present = [d for d in range(3) if there[d]]
        old = [shares[d] for d in present]
        new = on_simplex([shares[d] + gamma * losses[d] for d in present], sum(old))
        for d, share in zip(present, new, strict=True):
            shares[d] = share
    return theta


@pytest.mark.parametrize("whole", [False, True])
def test_the_worst_mixture_of_domains(whole: bool) -> None:
    domains = [0, 1, 1, 2, 0]
    options: dict[str, Any] = {"gamma": 0.2, "domains": tuple(domains), "whole": whole}
    played = Played.of(recipes.afl(reference_setting(), **options))
    assert off(played.end, agnostic(played, 0.2, domains, whole)) < EXACT
    assert off(played.end, agnostic(played, 0.2, domains, not whole)) > OTHER
    assert off(played.end, agnostic(played, 0.1, domains, whole)) > OTHER


# ------------------------------------------------------------------ weights and server steps


def disco(distance: str, towards: tuple[float, ...]) -> Callable[[Played, list[int]], list[float]]:
    """max(0, n_i / n - 0.7 d_i + 0.1), made to sum to 1."""

    def weigh(played: Played, ids: list[int]) -> list[float]:
        apart = []
        for i in ids:
            shares = [n / played.n(i) for n in played.counts(i)]
            pairs = list(zip(shares, towards, strict=True))
            if distance == "kl":
                apart.append(sum(s * log(s / q) for s, q in pairs if s))
            else:
                apart.append(sum((s - q) ** 2 for s, q in pairs) ** 0.5)
        sizes = by_size(played, ids)
        r = [max(0.0, s - 0.7 * d / sum(apart) + 0.1) for s, d in zip(sizes, apart, strict=True)]
        return [v / sum(r) for v in r]

    return weigh


EVEN = (1 / CLASSES,) * CLASSES
WEIGHTS: dict[str, tuple[Callable[[Setting], Any], Any]] = {
    "fedavg_uniform": (recipes.fedavg_uniform, uniform),
    "feddisco": (lambda s: recipes.feddisco(s, a=0.7), disco("kl", EVEN)),
    "feddisco_target": (lambda s: recipes.feddisco_target(s, a=0.7), disco("l2", TARGET)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_clients(name: str) -> None:
    make, weigh = WEIGHTS[name]
    played = Played.of(make(reference_setting()))

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    assert off(played.end, federated(played, client, weigh)) < EXACT
    assert off(played.end, federated(played, client)) > OTHER


def example_weights(played: Played, ids: list[int], rule: str) -> dict[int, list[float]]:
    """w_iy of each client, by the label counts of the round's clients."""
    n = {i: played.counts(i) for i in ids}
    pooled = [sum(n[i][c] for i in ids) for c in range(CLASSES)]
    target = [share if count else 0.0 for share, count in zip(TARGET, pooled, strict=True)]
    target = [share / sum(target) for share in target]
    weights = joint(played, ids) if rule == "joint" else by_size(played, ids)
    table = {}
    for i, a in zip(ids, weights, strict=True):
        w = []
        for c in range(CLASSES):
            if not n[i][c] or not a:
                w.append(0.0)
            elif rule == "node":
                w.append(TARGET[c] * played.n(i) / n[i][c])
            else:
                w.append(target[c] * played.n(i) / (a * pooled[c]))
        table[i] = [min(v, 3.0) for v in w]
    return table


def joint(played: Played, ids: list[int]) -> list[float]:
    """a_i = sum_y T_y n_iy / n_y over the labels of the round's clients."""
    n = [played.counts(i) for i in ids]
    pooled = [sum(row[c] for row in n) for c in range(CLASSES)]
    there = [c for c in range(CLASSES) if pooled[c]]
    a = [sum(TARGET[c] * row[c] / pooled[c] for c in there) for row in n]
    return [v / sum(a) for v in a]


RULES: dict[str, Callable[[Setting], Any]] = {
    "pooled": lambda s: recipes.iwerm(s, clip=3.0),
    "node": lambda s: recipes.iwerm(s, clip=3.0, ratio="node"),
    "joint": lambda s: recipes.fedpals_joint(s, clip=3.0),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("rule", RULES)
def test_weights_of_examples(rule: str) -> None:
    played = Played.of(RULES[rule](reference_setting()))

    def end(by: str) -> Tree:
        tables = {t: example_weights(played, ids, by) for t, ids in played.cohorts}

        def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
            def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
                rows = log_shares(logits(p, x))
                terms = [tables[t][i][int(c)] * -rows[b, int(c)] for b, c in enumerate(y)]
                return torch.stack(terms).sum() / len(y)

            return descend(theta, loss, played.batches(t, i))

        return federated(played, client, joint if by == "joint" else by_size)

    assert off(played.end, end(rule)) < EXACT
    assert off(played.end, end("pooled" if rule == "node" else "node")) > OTHER


def server_steps(kind: str) -> Callable[[Tree, Tree], Tree]:
    """theta + m, or theta + 0.05 m / (sqrt(v) + 0.01), with moments that stay."""
    m: dict[str, Any] = {}
    v: dict[str, Any] = {}

    def step(theta: Tree, delta: Tree) -> Tree:
        out = {}
        for k, d in delta.items():
            if kind == "momentum":
                m[k] = 0.7 * m.get(k, 0.0) + d
                out[k] = theta[k] + m[k]
                continue
            m[k] = 0.8 * m.get(k, 0.0) + 0.2 * d
            old = v.get(k, torch.full_like(d, 0.01**2))
            if kind == "adam":
                v[k] = 0.95 * old + 0.05 * d**2
            else:
                v[k] = old - 0.05 * d**2 * (old - d**2).sign()
            out[k] = theta[k] + 0.05 * m[k] / (v[k].sqrt() + 0.01)
        return out

    return step


MOMENTS: dict[str, Any] = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}
STEPS: dict[str, tuple[Callable[[Setting], Any], str]] = {
    "momentum": (lambda s: recipes.fedavgm(s, momentum=0.7), "adam"),
    "adam": (lambda s: recipes.fedadam(s, **MOMENTS), "yogi"),
    "yogi": (lambda s: recipes.fedyogi(s, **MOMENTS), "adam"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STEPS)
def test_server_steps(name: str) -> None:
    make, other = STEPS[name]
    played = Played.of(make(reference_setting()))

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    assert off(played.end, federated(played, client, step=server_steps(name))) < EXACT
    assert off(played.end, federated(played, client, step=server_steps(other))) > OTHER
