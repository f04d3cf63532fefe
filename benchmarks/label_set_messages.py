"""Federations of private label sets, all their messages, and what attackers see in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.algorithms.labelsets import LabelSets
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.datasets import load
from fedshift.engine.backends import Job, Reply, loop
from fedshift.engine.run import Federation, run
from fedshift.model import Model, build
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting, labelset_fedavg
from fedshift.seeds import Seeds, numpy_generator
from fedshift.shifts.label import draw_label_sets
from fedshift.tree import Params, Parts

K, HIDDEN, HEAD = 10, 50, ("head.weight", "head.bias")
PROBES, SHOWN = 24, 30  # directions of the inputs; images of each label that a model is shown


@dataclass(frozen=True)
class Size:
    """How much is played.

    shadows, attacked: clients of these federations in all, of at least `least` federations; worlds:
    first models, each with shadows of its own.
    """

    labels: int = 3
    examples: int = 300
    rounds: int = 10
    shadows: int = 400
    attacked: int = 160
    least: int = 20
    worlds: int = 3


@dataclass(frozen=True)
class Cell:
    """Federations of so many clients, of which `cohort` take part in a round (None: all)."""

    clients: int
    cohort: int | None = None

    @property
    def name(self) -> str:
        """For files and the page."""
        return f"{self.clients}" if self.cohort is None else f"{self.clients}, {self.cohort} drawn"


class Images(NamedTuple):
    """Images [n, 784] and labels [n] of one side, with the attacker's directions [784, PROBES]."""

    x: Tensor
    y: Tensor
    probes: Tensor


class Heard(NamedTuple):
    """The messages of one federation: T rounds, N clients, L slots, K labels.

    sets      [N, K] bool, which is to be guessed
    drawn     [T, N] bool
    down      [T, D] the body as sent, along the probes
    up        [T, N, D] its change, 0 for clients that were not drawn
    rows_down, rows_up  [T, N, L, H + 1] rows of the head in slots
    labels    [N, L] the label in each slot, -1 in empty ones: a client knows its own alone
    shown     [N, L, K] mean logit of each slot on the attacker's images of each label, at the end
    whole     [T, K, H + 1] the head that the server has before each round
    """

    sets: Tensor
    drawn: Tensor
    down: Tensor
    up: Tensor
    rows_down: Tensor
    rows_up: Tensor
    labels: Tensor
    shown: Tensor
    whole: Tensor


def images() -> tuple[Images, Images]:
    """(the attacked clients', the attacker's): halves of the training part, label by label."""
    data = load("fashion-mnist-mini").train
    x, y = data.x.flatten(1).float() / 255, data.y.long()
    rank = torch.stack([(y[: i + 1] == y[i]).sum() for i in range(len(y))])
    theirs = rank % 2 == 0
    mine = x[~theirs]
    means = torch.stack([mine[y[~theirs] == c].mean(0) for c in range(K)])
    axes = torch.linalg.svd(mine - mine.mean(0), full_matrices=False)[2][: PROBES - K]
    # Orthonormal, so that one ridge suits all directions.
    probes = torch.linalg.qr(torch.cat([means, axes]).T)[0]
    return Images(x[theirs], y[theirs], probes), Images(mine, y[~theirs], probes)


def messages_of(
    method: LabelSets, federation: Federation, rounds: int, cohort: int | None
) -> tuple[dict[tuple[int, int], tuple[Parts, Parts]], list[Params]]:
    """((round, client) -> what it was sent and what it sent, the server's model of each round)."""
    messages: dict[tuple[int, int], tuple[Parts, Parts]] = {}

    def tapped(update: Callable[..., Any], jobs: Iterable[Job]) -> Iterator[Reply]:
        for job in jobs:
            (reply,) = loop(update, [job])
            messages[job.t, job.client] = (job.message, reply.update)
            yield reply

    played = run(method, federation, rounds, cohort=cohort, backend=tapped)
    return messages, [federation.params, *(one.server["params"] for one in played)]


def federation_of(
    cell: Cell, size: Size, world: int, who: str, one: int, pool: Images
) -> tuple[Federation, LabelSets]:
    """Federation `one` of the attacker's ("shadow") or of others ("attacked")."""
    source = numpy_generator("label-set-attacks", world, cell.name, who, one)
    sets = draw_label_sets(size.labels, np.ones(K, bool), cell.clients, source)
    by_label = [np.flatnonzero(pool.y.numpy() == y) for y in range(K)]
    clients = []
    for i, row in enumerate(sets):
        each = size.examples // size.labels
        taken = [source.choice(by_label[y], each, replace=False) for y in np.flatnonzero(row)]
        rows = torch.from_numpy(np.concatenate(taken))
        clients.append(client_data(pool.x[rows], pool.y[rows], i))
    model = build(lambda: Mlp((784,), (HIDDEN,), K), seed=world)
    seed = int(source.integers(2**31))
    setting = Setting(model, (1 / K,) * K, Local(lr=0.1, epochs=1, batch=32), seed=seed)
    federation = Federation(clients, *model.init(), register(clients, K), Seeds.of(seed))
    return federation, labelset_fedavg(setting)


def hear(cell: Cell, size: Size, world: int, who: str, one: int, pools: Sequence[Images]) -> Heard:
    """Play a federation and listen; pools: those of `images`."""
    theirs, mine = pools
    federation, method = federation_of(
        cell, size, world, who, one, mine if who == "shadow" else theirs
    )
    messages, whole = messages_of(method, federation, size.rounds, cell.cohort)
    sets, slots = federation.table["labels"] > 0, size.labels
    shape, clients = (size.rounds, cell.clients), cell.clients
    wide, deep = HIDDEN + 1, HIDDEN * (PROBES + 1)
    got = Heard(
        sets, torch.zeros(shape).bool(), torch.zeros(size.rounds, deep),
        torch.zeros(*shape, deep), torch.zeros(*shape, slots, wide),
        torch.zeros(*shape, slots, wide), torch.full((clients, slots), -1),
        torch.zeros(clients, slots, K), torch.stack([rows(params) for params in whole[:-1]]),
    )  # fmt: skip
    shown = torch.cat([mine.x[mine.y == y][:SHOWN] for y in range(K)])
    for (t, i), (down, up) in messages.items():
        at, local = (t - 1, i), down["slots"]["local"]
        got.drawn[at] = True
        got.down[t - 1], got.up[at] = body(down["params"], mine), body(up["delta"], mine)
        got.rows_down[at], got.rows_up[at] = rows(down["params"]), rows(up["delta"])
        mapped = sets[i].nonzero().flatten()[local.clamp(min=0)]
        got.labels[i] = torch.where(local < 0, local, mapped)
        got.shown[i] = logits(method.model, down, shown).reshape(K, SHOWN, -1).mean(1).T
    return got


def body(params: Params, mine: Images) -> Tensor:
    """The first layer along the probes, and its bias: [D]."""
    weight, bias = params["body.1.weight"] @ mine.probes, params["body.1.bias"]
    return torch.cat([weight, bias[:, None]], 1).flatten()


def rows(params: Params) -> Tensor:
    """The head's rows with their biases."""
    return torch.cat([params[HEAD[0]], params[HEAD[1]][:, None]], 1)


def logits(model: Model, message: Parts, x: Tensor) -> Tensor:
    """Of the model in a message, as it came: a column for each slot."""
    with torch.no_grad():
        return model(message["params"], message["buffers"], x)["logits"]


class Views(NamedTuple):
    """What an attacker makes of federations: V views, each a guess about K labels.

    changes  [V, T, D] of bodies; norms [V, M]; plain: name -> features [V, K, d] of labels
    share    [V, K] of the clients asked about that hold the label; asked: how many they are
    """

    changes: Tensor
    norms: Tensor
    plain: dict[str, Tensor]
    share: Tensor
    asked: int


def norms_of(changes: Tensor) -> Tensor:
    """[V, T, D] -> [V, 2 T], logarithms of the norms of the layer's weight and bias."""
    apart = changes.unflatten(-1, (HIDDEN, PROBES + 1))
    weight, bias = apart[..., :-1].flatten(-2).norm(dim=-1), apart[..., -1].norm(dim=-1)
    return torch.cat([weight, bias], 1).clamp(min=1e-8).log()


def seen_by_clients(views: Heard, sets: Tensor, *, whole: bool = False) -> Views:
    """Of each client in turn: the others' change of the body, and which rows move without it.

    It knows how many take part, and that all are of one size. whole: it is sent whole heads.
    """
    clients, taking = len(views.sets), views.drawn.sum(1)
    moved = (views.down[1:] - views.down[:-1])[:, None]
    others = (moved - views.up[:-1] / taking[:-1, None, None]).transpose(0, 1)
    # The others' sum, as a mean over them: what the shadow's single updates look like.
    others = others * (taking / (taking - views.drawn.T.long()).clamp(min=1))[:, :-1, None]
    rows_ = torch.stack([row_moves(views, j, whole) for j in range(clients)])
    left = (sets.sum(0) - sets.long()).float() / (clients - 1)
    plain = {"absent rows": rows_[..., :2], "norms of rows": rows_[..., 2:]}
    return Views(others, norms_of(others), plain, left, clients - 1)


def row_moves(views: Heard, client: int, whole: bool) -> Tensor:
    """[K, 4] of a client: 1 if it sees the row; if no other moves it; size of others' moves."""
    out = torch.zeros(K, 4)
    for slot, y in enumerate(views.labels[client].tolist()):
        if y >= 0:
            before, sent = views.rows_down[:-1, client, slot], views.rows_up[:-1, client, slot]
            out[y] = _moves(before, sent, views.rows_down[1:, client, slot])
    if whole:
        for y in (~views.sets[client]).nonzero().flatten().tolist():
            row = views.whole[:, y]
            out[y] = _moves(row[:-1], torch.zeros_like(row[:-1]), row[1:])
    return out


def _moves(before: Tensor, sent: Tensor, after: Tensor) -> Tensor:
    """Bit for bit: a row that one client alone holds comes back as it sent it."""
    alone = torch.equal(before + sent, after)
    ratio = (after - before - sent).norm() / (sent.norm() + 1e-2)
    return torch.tensor([1.0, float(alone), float(ratio), float(ratio.clamp(min=1e-4).log())])


def seen_on_the_way(views: Heard, sets: Tensor) -> Views:
    """Of each client's own messages: its changes, and its rows without the labels' names."""
    changes, used = views.up.transpose(0, 1), (views.rows_up != 0).flatten(3).any(3).any(0)
    sizes = views.rows_up.norm(dim=-1).transpose(0, 1).sort(-1).values.flatten(1)
    fits = (views.shown - views.shown.mean(2, keepdim=True)).masked_fill(~used[..., None], -99)
    named = fits.max(1).values
    plain = {"rows on images": torch.stack([named, named.argsort(1).argsort(1).float()], -1)}
    norms = torch.cat([norms_of(changes), sizes.clamp(min=1e-8).log()], 1)
    return Views(changes, norms, plain, sets.float(), 1)


def joined(views: Sequence[Views]) -> Views:
    """Those of several federations, one after the other."""
    changes, norms, plain, share, asked = zip(*views, strict=True)
    every = {k: torch.cat([one[k] for one in plain]) for k in plain[0]}
    return Views(torch.cat(changes), torch.cat(norms), every, torch.cat(share), asked[0])
