"""What leaks of private label sets: `python benchmarks/label_set_attacks.py [--quick] [--write]`.

Who holds which label, asked by two attackers of `labelset_fedavg` in private mode on
fashion-mnist-mini. One is a client: it has the broadcasts of every round and its own updates. The
other reads all messages, and does not know which label is in which slot. Both have images of their
own. They train federations with label sets that they drew themselves (shadows), from the first
model that was attacked, fit linear models on what they see there, and attack fresh federations.

`--quick` tries it at small size. Worlds that are done are kept in `--folder`, and the same command
goes on from there. `--write` writes results/label_set_attacks.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from label_set_messages import (
    Cell,
    Heard,
    Images,
    K,
    Size,
    Views,
    hear,
    images,
    joined,
    seen_by_clients,
    seen_on_the_way,
)
from label_set_pairs import Compared, auc, ceiling, compared, equal_rows
from page import table
from torch import Tensor

from fedshift.files import write
from fedshift.seeds import key, numpy_generator
from fedshift.shifts.label import draw_label_sets

OUT = Path(__file__).parents[1] / "results" / "label_set_attacks.md"
RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
GOAL = 0.55
CELLS = (Cell(2), Cell(5), Cell(10), Cell(20), Cell(10, 5))
QUICK = Size(examples=60, rounds=4, shadows=80, attacked=40, least=4, worlds=2)


Fit = Callable[[Tensor], Tensor]


def fitted(x: Tensor, y: Tensor, ridge: float) -> Fit:
    """Least squares with a ridge on standardised columns: x [n, d] -> y [n, ...] centred."""
    x, y = x.double(), y.double()
    mean, scale, level = x.mean(0), x.std(0).clamp(min=1e-9), y.mean(0)
    z = (x - mean) / scale
    dual = z @ z.T + ridge * len(z) * z.shape[1] * torch.eye(len(z)).double()
    w = z.T @ torch.linalg.solve(dual, y - level)
    return lambda new: (new.double() - mean) / scale @ w + level


def best_ridge(seen: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Fit:
    """The fit to `seen` whose ridge does best on `other`; both (x, y)."""
    fits = [fitted(*seen, ridge) for ridge in RIDGES]
    return min(fits, key=lambda fit: float((fit(other[0]) - other[1]).square().mean()))


Truths = Sequence[Tensor]
Look = Callable[[Heard, Tensor], Views]


def halves(shadows: Sequence[Heard], truths: Truths) -> list[list[tuple[Heard, Tensor]]]:
    """Shadows with what is true of them: the first half is fitted to, the second corrects it."""
    pairs = [*zip(shadows, truths, strict=True)]
    return [pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]]


def probes_of(shadows: Sequence[Heard], truths: Truths) -> list[Fit]:
    """For each round, from a client's change of the body to its labels [n, K]; from shadows."""

    def of_round(t: int, pairs: list[tuple[Heard, Tensor]]) -> tuple[Tensor, Tensor]:
        updates = [attack_data.up[t][attack_data.drawn[t]] for attack_data, _ in pairs]
        return torch.cat(updates), torch.cat([bits[h.drawn[t]].float() for h, bits in pairs])

    two = halves(shadows, truths)
    return [best_ridge(*(of_round(t, some) for some in two)) for t in range(len(shadows[0].up))]


def probed(probes: Sequence[Fit], views: Views) -> Tensor:
    """[V, T, K]: how far the changes look like those of clients that hold each label."""
    rounds = range(views.changes.shape[1])
    return torch.stack([probes[t](views.changes[:, t]) for t in rounds], 1).float()


def features(probes: Sequence[Fit], norms: Fit, views: Views) -> dict[str, Tensor]:
    """By attack, [V, K, d]; "all" of them together."""
    z, plain = probed(probes, views), dict(views.plain)
    sizes = [norms(views.norms).float()[..., None]]
    sizes += [plain.pop("norms of rows")] if "norms of rows" in plain else []
    plain |= {"update norms": torch.cat(sizes, -1)}
    plain |= {"shadow models": torch.stack([z[:, 0], z.mean(1)], -1)}
    return plain | {"all": torch.cat(list(plain.values()), -1)}


def attack(
    look: Look, probes: Sequence[Fit], shadows: Sequence[Heard], attacked: Sequence[Heard],
    truths: tuple[Truths, Truths],
) -> dict[str, Compared]:  # fmt: skip
    """Each attack's comparison on the attacked federations; truths: of both kinds."""
    first, second = (joined([look(*one) for one in some]) for some in halves(shadows, truths[0]))
    third = joined([*map(look, attacked, truths[1])])
    norms = best_ridge(*((one.norms, one.share) for one in (first, second)))
    old, new = (features(probes, norms, views) for views in (second, third))
    scores = {
        name: fitted(x.flatten(0, 1), second.share.flatten(), 1e-6)(new[name].flatten(0, 1))
        for name, x in old.items()
    } | {"holders known": third.share.double().flatten()}
    each = third.share.numel() // len(attacked)
    fed, share = torch.arange(len(attacked)).repeat_interleave(each), third.share.flatten().double()
    yes, no = share * third.asked, (1 - share) * third.asked
    return {k: compared(fed, score, yes, no) for k, score in scores.items()}


def by_cohorts(
    probes: Sequence[Fit], attacked: Sequence[Heard], truths: Truths
) -> dict[str, Compared]:
    """Of a client that knows who took part: do the others' changes look so when k did?"""
    out: list[tuple[Tensor, ...]] = []
    for f, (attack_data, sets) in enumerate(zip(attacked, truths, strict=True)):
        z = probed(probes, seen_by_clients(attack_data, sets))
        there = attack_data.drawn[:-1].float()
        score = torch.einsum("jty,tk->jky", z - z.mean(1, keepdim=True), there - there.mean(0))
        clients = len(sets)
        j, k, y = (
            v.flatten() for v in torch.meshgrid(*map(torch.arange, score.shape), indexing="ij")
        )
        keep = j != k
        group = (f * clients + j) * K + y
        rows_ = (torch.full_like(j, f), score.flatten().double(), sets[k, y].double(), group)
        out.append(tuple(v[keep] for v in rows_))
    fed, score, bit, group = map(torch.cat, zip(*out, strict=True))
    return {
        "cohorts known": compared(fed, score, bit, 1 - bit),
        "cohorts known, of one label": compared(fed, score, bit, 1 - bit, group),
    }


def ghosts(cell: Cell, size: Size, world: int, who: str, count: int) -> Truths:
    """Label sets that no client has, drawn as theirs: no message says a thing of them."""
    source = numpy_generator("label-set-attacks", "ghosts", world, cell.name, who)
    drawn = [
        draw_label_sets(size.labels, np.ones(K, bool), cell.clients, source) for _ in range(count)
    ]
    return [torch.from_numpy(sets > 0) for sets in drawn]


def world_of(cell: Cell, size: Size, world: int, pools: Sequence[Images]) -> dict[str, Compared]:
    """All attacks on one cell from one first model."""
    counts = {"shadow": size.shadows, "attacked": size.attacked}
    counts = {who: max(size.least, n // cell.clients) for who, n in counts.items()}
    shadows, attacked = (
        [hear(cell, size, world, who, i, pools) for i in range(n)] for who, n in counts.items()
    )
    looks = {
        "client": seen_by_clients,
        "whole": partial(seen_by_clients, whole=True),
        "reader": seen_on_the_way,
    }
    true = tuple([h.sets for h in some] for some in (shadows, attacked))
    nowhere = tuple(ghosts(cell, size, world, *one) for one in counts.items())
    out: dict[str, Compared] = {}
    for truths, note in ((true, ""), (nowhere, ", control")):
        probes = probes_of(shadows, truths[0])
        if cell.cohort is None:
            for who, look in looks.items():
                got = attack(look, probes, shadows, attacked, truths)
                out |= {f"{who}: {k}{note}": v for k, v in got.items()}
        else:
            got = by_cohorts(probes, attacked, truths[1])
            out |= {k + note: v for k, v in got.items()}
    return out | ({} if cell.cohort else {"reader: equal rows": equal_rows(attacked)})


def kept(
    folder: Path, cell: Cell, size: Size, world: int, pools: Sequence[Images]
) -> dict[str, Compared]:
    """`world_of`, or what an earlier command left of it."""
    place = folder / f"{key(repr(size), repr(cell), world)}.npz"
    if not place.exists():
        began = time.process_time()
        measured = world_of(cell, size, world, pools)
        print(
            f"{cell.name} clients, first model {world}: {time.process_time() - began:.0f} s",
            flush=True,
        )
        arrays = {
            f"{k}/{name}": v.numpy()
            for k, one in measured.items()
            for name, v in one._asdict().items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(".part.npz")
        np.savez(draft, **arrays)
        draft.replace(place)
    with np.load(place) as stored:
        names = dict.fromkeys(k.rpartition("/")[0] for k in stored.files)
        return {
            k: Compared(*(torch.from_numpy(stored[f"{k}/{f}"]) for f in Compared._fields))
            for k in names
        }


CONTROL = "control: sets that no client has"
CLIENT = {
    "absent rows": "client: absent rows",
    "update norms": "client: update norms",
    "shadow models": "client: shadow models",
    "all of them": "client: all",
    "the number of holders": "client: holders known",
    CONTROL: "client: all, control",
    "control: whole heads, absent rows": "whole: absent rows",
}
READER = {
    "rows on images": "reader: rows on images",
    "update norms": "reader: update norms",
    "shadow models": "reader: shadow models",
    "all of them": "reader: all",
    CONTROL: "reader: all, control",
    "which rows are of one label": "reader: equal rows",
}
COHORTS = {
    "who holds what": "cohorts known",
    "who holds this label": "cohorts known, of one label",
    CONTROL: "cohorts known, of one label, control",
}


def lines(columns: Mapping[str, str], measured: Mapping[str, Sequence[dict[str, Compared]]]) -> str:
    """A table: a row for each size of federation that was attacked so."""

    def cell(values: tuple[float, float, float]) -> str:
        return "{:.3f} [{:.3f}, {:.3f}]".format(*values)

    rows_ = [
        [name, *(cell(auc([world[k] for world in worlds])) for k in columns.values())]
        for name, worlds in measured.items() if set(columns.values()) <= worlds[0].keys()
    ]  # fmt: skip
    return "\n".join(table(["clients", *columns], rows_))


def missed(measured: Mapping[str, Sequence[dict[str, Compared]]]) -> tuple[int, int]:
    """Controls on sets that no client has whose interval does not have 0.5, and all of them."""
    controls = [CLIENT[CONTROL], READER[CONTROL], COHORTS[CONTROL]]
    values = [
        auc([w[k] for w in worlds])
        for worlds in measured.values()
        for k in controls
        if k in worlds[0]
    ]
    return sum(not low <= 0.5 <= high for _, low, high in values), len(values)


def main() -> None:
    """The tables, to results unless it is a try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("label-set-attacks"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size, pools = QUICK if options.quick else Size(), images()
    measured = {
        cell.name: [kept(options.folder, cell, size, w, pools) for w in range(size.worlds)]
        for cell in (CELLS[:2] + CELLS[-1:] if options.quick else CELLS)
    }
    enough = next(n for n in range(2, 10_000) if ceiling(n, size) <= GOAL)
    text = PAGE.format(
        client=lines(CLIENT, measured), cohorts=lines(COHORTS, measured),
        reader=lines(READER, measured),
        enough=enough, goal=GOAL, missed="{} of {}".format(*missed(measured)), **asdict(size),
    )  # fmt: skip
    print(text)
    if options.write and not options.quick:
        write(OUT, text)


PAGE = """# What leaks of private label sets

Who holds which label, told by two attackers of `labelset_fedavg` with `mode = "private"`: AUC, and
in brackets its 2.5 and 97.5 % points when the attacked federations are drawn anew (bootstrap by
federation, within each first model). Made by `python benchmarks/label_set_attacks.py --write`.

fashion-mnist-mini, a network of one hidden layer of 50; each client holds {labels} of 10 labels,
drawn for each on its own, and {examples} examples; {rounds} rounds of one local epoch; {worlds}
first models. Attackers have images of their own, which no client has. They train federations with
sets that they drew (shadows), from the first model that is attacked, and know how many clients
there are and that all are of one size. What is attacked are the messages as the engine sends them;
on Flower they are the same bits.

## Another client

It has the broadcasts of every round and its own updates. A yes is a pair of another client and a
label that it holds.

{client}

The goal was {goal}. The attacker's score is the same for all other clients, since nothing in a
broadcast depends on who sent what: among the clients of one label its AUC is 0.5. What it does
learn is how many of them hold each label. The body's change is a sum over clients, and single
updates tell their labels. "The number of holders" is the AUC of who is told these numbers and no
more. With labels drawn as here it falls to {goal} at {enough} clients. Of two clients each sees the
other's update by subtraction. Sizes that differ, and that the attacker knows, could tell it more:
not tried.

"Absent rows" asks whether a row comes back as it was sent, bit for bit: no other has its label.
"Update norms" are those of the others' change of the body, of its bias and of the row. "Shadow
models" are linear probes of the body's change. Controls: the same attack on label sets that no
client has must have 0.5; and whole heads, as in scoring on clients (refused in private mode), must
give two clients away by absent rows alone. Of the former, below as well, {missed} intervals miss
0.5: over so few federations they are a little narrow.

## A client that knows who takes part

It knows in which round each client trained, as one that has the experiment's `seeds.cohort` does,
and sees every round's broadcast. The score of a client is how far the others' change looks more
like the label when it takes part.

{cohorts}

## Who reads the messages

All messages both ways, by client, without knowing which label is in which slot.

{reader}

"Rows on images" shows each client's last model to the attacker's images: a row that answers to a
label has its name. "Which rows are of one label" compares rows of two clients that were sent in the
last round: those of one label are equal, bit for bit.
"""

if __name__ == "__main__":
    main()
