"""Federated methods in plain loops over float64 tensors, as references for the library's.

Of the library they take what chance decides, cohorts and batches, and the first weights. Networks,
losses, steps, weights and sums are written out here. Clients' changes are added one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.method import Method
from fedshift.client.local import Local, plan_all
from fedshift.engine.run import Federation, Round, run
from fedshift.model import build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from support.federations import CLASSES, FEATURES, TARGET, double, make_clients, make_federation

Tree = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]
Loss = Callable[[Tree, Tensor, Tensor], Tensor]
BODY, HEAD = ("body.1.weight", "body.1.bias"), ("head.weight", "head.bias")
LR, MOMENTUM, DECAY = 0.1, 0.5, 0.01
LOCAL = Local(lr=LR, epochs=2, batch=4, momentum=MOMENTUM, decay=DECAY)
STEPS = replace(LOCAL, epochs=None, steps=5)
SIZES, COHORT, ROUNDS = (9, 14, 8, 11, 6), 3, 3


def reference_setting(**changes: Any) -> Setting:
    """A network of one hidden layer, and local steps with momentum and decay."""
    model = build(lambda: Mlp((FEATURES,), (10,), CLASSES), seed=1)
    return replace(Setting(model, TARGET, LOCAL, rounds=ROUNDS), **changes)


@dataclass(frozen=True, eq=False)
class Played:
    """A run of the library's method with its random choices: cohorts and batches."""

    algorithm: Method
    federation: Federation
    rounds: tuple[Round, ...]

    @staticmethod
    def of(algorithm: Method, rounds: int = ROUNDS, cohort: int = COHORT) -> Played:
        federation = double(make_federation(algorithm.model, make_clients(sizes=SIZES)))
        return Played(
            algorithm, federation, tuple(run(algorithm, federation, rounds, cohort=cohort))
        )

    @property
    def start(self) -> Tree:
        return dict(self.federation.params)

    @property
    def end(self) -> Tree:
        return self.rounds[-1].server["params"]

    @property
    def cohorts(self) -> list[tuple[int, list[int]]]:
        """(round, ids) of all rounds."""
        return [(r.t, r.cohort.tolist()) for r in self.rounds]

    def data(self, i: int) -> Pair:
        return self.federation.clients[i].x, self.federation.clients[i].y

    def n(self, i: int) -> int:
        return len(self.federation.clients[i].y)

    def counts(self, i: int) -> list[int]:
        """How many examples of each label the client has."""
        y = self.federation.clients[i].y.tolist()
        return [y.count(c) for c in range(CLASSES)]

    def rows(self, t: int, i: int, phase: str = "train0") -> list[Tensor]:
        """The rows of the client's data of each step of a phase."""
        phases, data = self.algorithm.at(t).phases(), self.federation.clients[i]
        plan = plan_all(phases, data, t, self.federation.seeds.batch, i)[phase]
        assert plan.sizes is not None
        return [plan.rows[s][:size] for s, size in enumerate(plan.sizes)]

    def batches(self, t: int, i: int, phase: str = "train0") -> list[Pair]:
        """The examples of each step of a phase."""
        x, y = self.data(i)
        return [(x[r], y[r]) for r in self.rows(t, i, phase)]


def features(p: Tree, x: Tensor) -> Tensor:
    """max(0, W x + b)."""
    return (x @ p["body.1.weight"].T + p["body.1.bias"]).clamp(min=0)


def logits(p: Tree, x: Tensor) -> Tensor:
    return features(p, x) @ p["head.weight"].T + p["head.bias"]


def log_shares(z: Tensor) -> Tensor:
    """log softmax of each row."""
    top = z.max(1, keepdim=True).values
    return z - top - (z - top).exp().sum(1, keepdim=True).log()


def surprise(z: Tensor, y: Tensor) -> Tensor:
    """The mean of -log softmax(z)[y] over a batch, example by example."""
    rows = log_shares(z)
    return -sum((rows[b, int(c)] for b, c in enumerate(y)), z.new_zeros(())) / len(y)


def entropy(p: Tree, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of a batch."""
    return surprise(logits(p, x), y)


def gradient(loss: Loss, p: Tree, x: Tensor, y: Tensor, names: Iterable[str]) -> Tree:
    leaves = {k: v.detach().clone().requires_grad_() for k, v in p.items()}
    wanted = {k: leaves[k] for k in names}
    got = torch.autograd.grad(loss(leaves, x, y), list(wanted.values()), allow_unused=True)
    return {
        k: torch.zeros_like(v) if g is None else g
        for (k, v), g in zip(wanted.items(), got, strict=True)
    }


def descend(
    p: Tree,
    loss: Loss,
    batches: Sequence[Pair],
    names: Iterable[str] = (*BODY, *HEAD),
    *,
    lr: float = LR,
    momentum: float = MOMENTUM,
    decay: float = DECAY,
    rho: float = 0.0,
) -> Tree:
    """Heavy-ball steps of some parameters, the gradient taken rho up the slope where rho > 0."""
    p, names = dict(p), tuple(names)
    velocity = {k: torch.zeros_like(p[k]) for k in names}
    for x, y in batches:
        grad = gradient(loss, p, x, y, names)
        if rho:
            length = sum(float((g * g).sum()) for g in grad.values()) ** 0.5
            above = {k: p[k] + rho / (length + 1e-12) * grad[k] for k in names}
            grad = gradient(loss, p | above, x, y, names)
        for k in names:
            velocity[k] = momentum * velocity[k] + grad[k] + decay * p[k]
            p[k] = p[k] - lr * velocity[k]
    return p


def adam(
    p: Tree, loss: Loss, batches: Sequence[Pair], names: Iterable[str], lr: float,
    memory: tuple[Tree, Tree, list[Pair]] | None = None,
) -> Tree:  # fmt: skip
    """Steps by Adam, with its usual constants; memory: moments and batches of earlier steps."""
    m, v, before = memory or ({}, {}, [])
    p = dict(p)
    for k, (x, y) in enumerate(batches, start=1 + len(before)):
        for name, g in gradient(loss, p, x, y, tuple(names)).items():
            m[name] = 0.9 * m.get(name, torch.zeros_like(g)) + 0.1 * g
            v[name] = 0.999 * v.get(name, torch.zeros_like(g)) + 0.001 * g * g
            up, down = m[name] / (1 - 0.9**k), (v[name] / (1 - 0.999**k)).sqrt() + 1e-8
            p[name] = p[name] - lr * up / down
    before.extend(batches)
    return p


def by_size(played: Played, ids: list[int]) -> list[float]:
    total = sum(played.n(i) for i in ids)
    return [played.n(i) / total for i in ids]


def uniform(played: Played, ids: list[int]) -> list[float]:
    return [1 / len(ids)] * len(ids)


def mixed(weights: Sequence[float], trees: Sequence[Tree]) -> Tree:
    """sum_i w_i v_i."""
    out = {k: torch.zeros_like(v) for k, v in trees[0].items()}
    for w, tree in zip(weights, trees, strict=True):
        out = {k: v + w * tree[k] for k, v in out.items()}
    return out


def less(a: Tree, b: Tree) -> Tree:
    return {k: v - b[k] for k, v in a.items()}


def plus(a: Tree, b: Tree) -> Tree:
    return {k: v + b[k] if k in b else v for k, v in a.items()}


# (round, client, theta, the client's memory, which starts as theta) -> the model after training.
Client = Callable[[int, int, Tree, Tree], Tree]


def federated(
    played: Played,
    client: Client,
    weigh: Callable[[Played, list[int]], list[float]] = by_size,
    step: Callable[[Tree, Tree], Tree] = plus,
    combine: Callable[[Sequence[float], Sequence[Tree]], Tree] = mixed,
) -> Tree:
    """theta <- step(theta, combined changes theta_i - theta); a client remembers its last model."""
    theta = played.start
    memory = dict.fromkeys(range(len(played.federation.clients)), theta)
    for t, ids in played.cohorts:
        ends = {i: client(t, i, theta, memory[i]) for i in ids}
        memory |= ends
        changes = [less(ends[i], theta) for i in ids]
        theta = step(theta, combine(weigh(played, ids), changes))
    return theta


def off(a: Tree, b: Tree) -> float:
    """The largest difference of an entry; both have the same names."""
    assert a.keys() == b.keys()
    return max(float((v - b[k]).abs().max()) for k, v in a.items())


def served(played: Played) -> dict[int, Tree]:
    """The model that each client serves that took part in some round."""
    last, method = played.rounds[-1], played.algorithm.at(len(played.rounds))
    return {i: method.model_for(last.server, state)[0] for i, state in last.states.items()}


def part(p: Tree, names: Iterable[str]) -> Tree:
    return {k: p[k] for k in names}


def farthest(played: Played, models: dict[int, Tree]) -> float:
    """The largest difference of an entry of a served model from the reference's."""
    library = served(played)
    assert library.keys() == models.keys()
    return max(off(library[i], models[i]) for i in models)


# (round, client, body received and the client's head) -> the model after training.
Bodied = Callable[[int, int, Tree], Tree]


def bodies(
    played: Played,
    client: Bodied,
    weigh: Callable[[Played, list[int]], list[float]] = by_size,
    combine: Callable[[int, list[float], list[Tree]], Tree] | None = None,
    until: int = ROUNDS,
) -> dict[int, Tree]:
    """A body for all by the rounds up to `until`, and a head for each client: what is served."""
    theta, first = part(played.start, BODY), part(played.start, HEAD)
    heads: dict[int, Tree] = {}
    for t, ids in played.cohorts[:until]:
        ends = {i: client(t, i, theta | heads.get(i, first)) for i in ids}
        heads |= {i: part(ends[i], HEAD) for i in ids}
        changes = [less(part(ends[i], BODY), theta) for i in ids]
        weights = weigh(played, ids)
        theta = plus(theta, combine(t, weights, changes) if combine else mixed(weights, changes))
    return {i: theta | head for i, head in heads.items()}


def pulled(to: Tree, strength: float) -> Loss:
    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return entropy(p, x, y) + strength / 2 * sum(((p[k] - v) ** 2).sum() for k, v in to.items())

    return loss


def head_first(played: Played, pull: float = 0.0) -> Bodied:
    """FedRep: the head, then the body, pulled to the body received."""

    def client(t: int, i: int, p: Tree) -> Tree:
        fitted = descend(p, entropy, played.batches(t, i), HEAD)
        return descend(fitted, pulled(part(p, BODY), pull), played.batches(t, i, "train1"), BODY)

    return client


def labels_of(played: Played, i: int) -> list[int]:
    """The labels that a client holds."""
    return [c for c in range(CLASSES) if played.counts(i)[c]]


def entropy_over(labels: list[int]) -> Loss:
    """The cross-entropy over some labels alone."""
    place = {label: rank for rank, label in enumerate(labels)}

    def loss(p: Tree, x: Tensor, y: Tensor) -> Tensor:
        return surprise(logits(p, x)[:, labels], torch.tensor([place[int(c)] for c in y]))

    return loss


def row_means(
    played: Played,
    ids: list[int],
    weights: Sequence[float],
    trees: Sequence[Tree],
    clients: Sequence[int],
    public: bool,
) -> Tree:
    """Weighted sums, but rows of the head: means over those that hold the label.

    The weights of a row are divided by the sum of the holders' among some clients, whose weights
    are those given or, where there are more of them, all alike.
    """
    alike = dict.fromkeys(clients, weights[0]) if len(clients) > len(ids) else {}
    by = alike or dict(zip(ids, weights, strict=True))
    out = mixed(weights, trees)
    if public:
        return out
    for k in HEAD:
        out[k] = torch.zeros_like(out[k])
        for y in range(CLASSES):
            holders = sum(by[i] for i in clients if y in labels_of(played, i))
            for i, w, tree in zip(ids, weights, trees, strict=True):
                if y in labels_of(played, i):
                    out[k][y] += w / holders * tree[k][y]
    return out
