"""What bad replies do, here and to Flower's strategies: `python benchmarks/faults.py [--write]`.

Every attack of `fedshift.testing.attacks` by one client of six, against FedAvg behind this
library's gate and against Flower's FedAvg, FedMedian, FedTrimmedAvg and Krum: does the round raise,
is the model non-finite or of another form, is it what it would have been without that client? Then
fuzzed replies, a million of them, through the gate alone.

`--replies N` says how many; they are fuzzed in pieces of 10,000, each a function of its number.
What is done is in `--folder`, and the same command goes on from there; `--most N` ends after N
pieces. A million take about half an hour of one core. `--write` writes results/faults.md.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import argparse
import json
import logging
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
from torch import Tensor, nn

from fedshift import recipes
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.backends import Reply
from fedshift.engine.checks.gate import Gate
from fedshift.engine.run import Federation
from fedshift.flower.quiet import quiet
from fedshift.model import build
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator
from fedshift.testing.attacks import ATTACKS, spoil
from support.fuzz import Arena, Tally, arena, different, fuzz

OUT = Path(__file__).parents[1] / "results" / "faults.md"
CLIENTS, CLASSES, FEATURES, BAD, PIECE = 6, 5, 8, 3, 10_000
GATE = Gate(on_bad="drop", max_norm=1e3, max_bytes=1 << 24)
FLOWER = ("FedAvg", "FedMedian", "FedTrimmedAvg", "Krum")
SAME, DIFFERS, RAISES, WRONG, HARMLESS = "as without", "differs", "raises", "non-finite", "unseen"


class Normed(nn.Module):
    """A small network with BatchNorm, whose updates have every part there is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def made() -> Arena:
    """One round of FedAvg over six clients of 40 examples."""
    source = generator(0, "faults benchmark")
    clients = [
        client_data(
            torch.randn(40, FEATURES, generator=source),
            torch.randint(CLASSES, (40,), generator=source),
            i,
        )
        for i in range(CLIENTS)
    ]
    model = build(Normed, seed=1)
    federation = Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))
    method = recipes.fedavg(Setting(model, (1 / CLASSES,) * CLASSES, Local(lr=0.1, batch=40)))
    return arena(method, federation, GATE)


def ours(place: Arena, name: str) -> str:
    """What the gate and FedAvg make of an attack."""
    rest = [reply for reply in place.honest if reply.client != BAD]
    try:
        played = place.settled([*rest, *spoil(name, place.honest[BAD])])
    except Exception as e:
        return f"{RAISES} {type(e).__name__}"
    return SAME if not different(played.server, place.settled(rest).server) else DIFFERS


class Quiet:
    """Flower's own strategies over the same replies, as models in an ArrayRecord each."""

    def __init__(self, place: Arena) -> None:
        from flwr.clientapp import ClientApp

        from fedshift.flower import LocalGrid

        LocalGrid(ClientApp(), 1)  # messages can be made only in a process with a task of Flower's
        self.place = place
        sent = place.opened.message(0)
        self.sent = sent["params"] | sent["buffers"]

    def strategy(self, name: str) -> Any:
        """A new strategy of this name, told of one bad client where it can be."""
        from flwr.serverapp import strategy as all_

        options = {"num_malicious_nodes": 1} if name == "Krum" else {}
        return getattr(all_, name)(fraction_evaluate=0.0, **options)

    def message(self, reply: Reply) -> Any:
        """A client's answer: its model's arrays, and 40 examples unless it claims another size."""
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

        u = reply.update
        delta, buffers = u.get("delta", {}), {**u.get("buffers", {}), **u.get("counters", {})}
        moved = {k: _moved(v, self.sent.get(k)) for k, v in delta.items()}
        arrays = {
            k: Array(np.ascontiguousarray(v.detach().numpy())) for k, v in (moved | buffers).items()
        }
        size = int(float(u.get("report", {}).get("n", torch.tensor(40.0))))
        content = RecordDict(
            {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": size})}
        )
        question = Message(content, dst_node_id=1 + reply.client, message_type="train")
        return Message(content, reply_to=question)

    def mean(self, name: str, replies: Sequence[Reply]) -> dict[str, Any]:
        """The arrays that the strategy makes of the replies."""
        strategy = self.strategy(name)
        arrays, _ = strategy.aggregate_train(1, [self.message(r) for r in replies])
        if arrays is None:
            raise ValueError("it gives no model")
        return {k: v.numpy() for k, v in arrays.items()}


def _moved(v: Tensor, base: Tensor | None) -> Tensor:
    """The model that a change leads to; where that has no meaning, the change."""
    if base is None or base.shape != v.shape or v.dtype.is_complex:
        return v.float() if v.dtype == torch.bfloat16 else v
    moved = base + v.to(torch.float64 if v.dtype == torch.float64 else torch.float32)
    return moved.to(v.dtype if v.dtype != torch.bfloat16 else torch.float32)


def theirs(flower: Quiet, strategy: str, name: str) -> str:
    """What one of Flower's strategies makes of an attack."""
    place = flower.place
    if name == "terabytes":
        return "not tried"
    rest = [reply for reply in place.honest if reply.client != BAD]
    alone, full = flower.mean(strategy, rest), flower.mean(strategy, place.honest)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bad = spoil(name, place.honest[BAD])
            combined = flower.mean(strategy, [*rest[:BAD], *bad, *rest[BAD:]])
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return f"{RAISES} {type(e).__name__}"
    if combined.keys() != alone.keys() or any(combined[k].shape != alone[k].shape for k in alone):
        return "another form"
    if not all(np.isfinite(v).all() for v in combined.values()):
        return WRONG
    if all(np.array_equal(combined[k], alone[k]) for k in alone):
        return SAME
    return HARMLESS if all(np.array_equal(combined[k], full[k]) for k in alone) else DIFFERS


def table(place: Arena) -> list[str]:
    """Markdown: attacks in rows, strategies in columns, and how often each came out how."""
    flower, lines = Quiet(place), []
    columns: dict[str, Callable[[str], str]] = {"fedshift": lambda name: ours(place, name)}
    for one in FLOWER:
        columns[f"Flower {one}"] = lambda name, one=one: theirs(flower, one, name)  # type: ignore
    tally: dict[str, Counter[str]] = {column: Counter() for column in columns}
    for name in ATTACKS:
        texts = [say(name) for say in columns.values()]
        for column, one in zip(columns, texts, strict=True):
            tally[column][one.split(" ")[0] if one.startswith(RAISES) else one] += 1
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    head = ["| attack | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    sums = " | ".join(", ".join(f"{v} {k}" for k, v in t.most_common()) for t in tally.values())
    return [*head, *lines, f"| all {len(ATTACKS)} | {sums} |"]


def pieces(place: Arena, replies: int, log: Path, most: int) -> Iterator[Tally]:
    """Fuzzed replies in pieces, those of earlier calls first; at most `most` new ones."""
    lines = log.read_text().splitlines() if log.exists() else []
    done = 0
    for one in (Tally(**json.loads(line)) for line in lines):
        if done < replies:
            done += one.replies
            yield one
    began = time.perf_counter()
    for _ in range(most):
        if done >= replies:
            break
        tally = fuzz(place, min(PIECE, replies - done), seed=done)
        done += tally.replies
        with log.open("a") as f:
            f.write(json.dumps(asdict(tally)) + "\n")
        spent = time.perf_counter() - began
        print(f"{done} replies, {len(tally.broken)} broken, {spent:.0f} s", flush=True)
        yield tally


def main() -> int:
    """Fuzzed replies, then attacks; exit code 1 if a reply broke something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replies", type=int, default=1_000_000)
    parser.add_argument("--most", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    options.folder.mkdir(parents=True, exist_ok=True)
    place = made()
    tallies = list(pieces(place, options.replies, options.folder / "pieces.jsonl", options.most))
    done, broken = sum(one.replies for one in tallies), [b for one in tallies for b in one.broken]
    if done < options.replies:
        print(f"{done} of {options.replies} replies; the same command goes on")
        return int(bool(broken))
    with quiet():
        lines = table(place)
    text = PAGE.format(
        table="\n".join(lines), replies=done, used=sum(one.used for one in tallies),
        broken=len(broken), first="; ".join(broken[:5]) or "none", clients=CLIENTS,
        norm=GATE.max_norm, torch=torch.__version__, machine=platform.machine(),
    )  # fmt: skip
    print(text)
    if options.write:
        OUT.write_text(text)
    return int(bool(broken))


PAGE = """# Bad replies

One client of {clients} attacks in one round of FedAvg over a small network with BatchNorm, by each
attack of `fedshift.testing.attacks`; made by `python benchmarks/faults.py --write` (torch {torch},
{machine}, flwr 1.41). Same replies everywhere: changes of the model here, the models themselves for
Flower's strategies, "num-examples" being 40 unless the attack claims a size.

- `as without`: bit for bit the model of the round without that client
- `differs`: another model; `non-finite`: NaN or infinity in it; `another form`: other names or
  shapes
- `unseen`: what is attacked is not part of Flower's messages (rounds, ids), or changes nothing; the
  model is that of the honest reply. Flower itself matches answers to messages before a strategy
  sees them
- `raises`: the strategy raises, which ends the run

fedshift's gate drops what it refuses, with max_norm = {norm:g}; without it, finite numbers of any
size are a client's good right. Flower's median, trimmed mean and Krum bound a finite attack by
design, so that `differs` is no failure there.

{table}

## Fuzzed replies

{replies} replies changed at random (numbers, bits, shapes, types, names, parts, rounds, copies), of
one or two of the six clients at a time; {used} of them were let through, being of the right form,
finite and small. Rounds that raised, were skipped, lost an honest client, left numbers that are not
finite or a server of another form, or differed from the round without the dropped clients: {broken}
(first: {first}).
"""

if __name__ == "__main__":
    sys.exit(main())
