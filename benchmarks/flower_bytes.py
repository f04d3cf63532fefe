"""Bytes per round and client, of every method: `python benchmarks/flower_bytes.py [--write]`.

Each method plays a few rounds on Flower's messages, and the arrays of the messages to and from
every client are counted; NumPy's header of each array (128 bytes) and the report of an update (id
and loss) are counted apart. Where the specification of a method says what it costs, the count is
set beside it.

`--write` puts the table into results/flower_bytes.md. The numbers are counts, the same on
every machine.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.data import client_data, register
from fedshift.engine.run import Federation
from fedshift.flower import AlgorithmStrategy, LocalGrid, Site, client_app, play
from fedshift.flower.client import partition
from fedshift.model import Model, build
from fedshift.models.dense import Mlp, routed_mlp
from fedshift.models.etf import with_etf
from fedshift.recipes import Setting
from fedshift.seeds import Seeds, generator

OUT = Path(__file__).parent.parent / "results" / "flower_bytes.md"
CLIENTS, CLASSES, INPUTS, WIDTH, LABELS = 6, 10, 64, 32, 3
BODY = INPUTS * WIDTH + WIDTH
P = BODY + (WIDTH + 1) * CLASSES
# FedDisk's density: a MADE of one hidden layer.
HIDDEN = 50
P_MADE = INPUTS * HIDDEN + HIDDEN + HIDDEN * INPUTS + INPUTS
SETS = BODY + (WIDTH + 1) * LABELS
# Two rounds of densities, one for weights, one of training; then some methods tune.
ROUNDS, DENSITY_ROUNDS = 5, 2
REPORT = 8 + 4  # a client's id and its loss


@dataclass(frozen=True)
class Floats:
    """What a specification says, in words and in numbers of four bytes to a client and back.

    more: bytes beyond that, (down, up), with the reason
    """

    text: str
    down: int
    up: int
    more: tuple[int, int] = (0, 0)
    why: str = ""


SAME = Floats("P / P", P, P)
# Rows of the head travel with their positions among the client's own labels, 8 bytes each.
OWN = Floats("P_phi + (d + 1) L, both ways", SETS, SETS, (8 * LABELS, 0), "L positions of 8 bytes")
# By method; P_phi: the body, d: the head's inputs, L: labels of a client.
SPECIFIED: Mapping[str, Floats] = {
    **dict.fromkeys(("fedavg", "fedprox", "fedrs", "fedsam", "moon", "fedpals"), SAME),
    "scaffold": Floats("2P / 2P", 2 * P, 2 * P),
    "afl": Floats("P / P + 1", P, P + 1, (0, 4), "the loss in 8 bytes"),
    "labelset_fedavg": OWN,
    "labelset_fedprox": OWN,
    "feddisk, densities": Floats("P_MADE, both ways", P_MADE, P_MADE),
    "feddisk, training": SAME,
}


@dataclass
class Seen:
    """Of one round: bytes of the numbers in the clients' messages, and of those clients."""

    down: int = 0
    up: int = 0
    records: int = 0
    report: int = 0
    clients: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Counted:
    """A method's bytes per client, a mean over those asked.

    report   of `up`, what is no model: id and loss, or more
    records  what Flower sends up, with NumPy's headers
    asked    how many of the clients were
    """

    down: float
    up: float
    report: float
    records: float
    asked: int


def numbers(array: Array) -> int:
    """Bytes of an array's numbers, without its header."""
    return int(array.numpy().nbytes)


def metered(app: ClientApp, seen: dict[int, Seen]) -> ClientApp:
    """The client app, with the arrays of its training messages counted by round."""
    counting = ClientApp()

    @counting.train()
    def train(message: Message, context: Context) -> Message:
        t = int(message.content["run"]["round"])  # type: ignore[arg-type, index]
        sent = list(message.content.array_records.values())
        reply = app(message, context)
        records = list(reply.content.array_records.items())
        now = seen.setdefault(t, Seen())
        now.clients.add(partition(context))
        now.down += sum(map(_bytes, sent))
        now.up += sum(_bytes(record) for _, record in records)
        now.report += sum(_bytes(record) for name, record in records if name == "report")
        now.records += sum(len(a.data) for _, record in records for a in record.values())
        return reply

    @counting.query("register")
    def register_(message: Message, context: Context) -> Message:
        reply = app(message, context)
        now = seen.setdefault(0, Seen())
        now.clients.add(partition(context))
        now.up += sum(map(_bytes, reply.content.array_records.values()))
        return reply

    return counting


def _bytes(record: ArrayRecord) -> int:
    return sum(numbers(array) for array in record.values())


def plain() -> Model:
    """An MLP 64-32-10."""
    return build(lambda: Mlp((INPUTS,), (WIDTH,), CLASSES), seed=0)


def branched() -> Model:
    """The same with LayerNorm and a branch that distinguishes clients."""
    return build(lambda: routed_mlp((INPUTS,), (WIDTH,), CLASSES, CLIENTS), seed=0)


def fixed() -> Model:
    """The MLP with an ETF as classifier."""
    return build(lambda: with_etf(Mlp((INPUTS,), (WIDTH,), CLASSES)), seed=0)


def federation_of(model: Model) -> Federation:
    """Six clients of sixty examples, each of three labels."""
    source, clients = generator(0, "flower bytes"), []
    for i in range(CLIENTS):
        y = (i + torch.arange(60) % LABELS) % CLASSES
        clients.append(client_data(torch.rand(60, INPUTS, generator=source), y, i))
    return Federation(clients, *model.init(), register(clients, CLASSES), Seeds.of(0))


def makers() -> Mapping[str, Callable[[Setting], Method]]:
    """Every method of a paper, at its defaults."""
    density = {"density_rounds": DENSITY_ROUNDS, "hidden": (HIDDEN,)}
    tuned = {n: {"tune_rounds": 1} for n in ("fedavgft", "fedproxft", "fedsamft", "fedbabu")}
    options: dict[str, dict[str, object]] = {
        "fedpals": {"ess": 0.9}, "feddisk": {**density, "density": "bernoulli"}, "made": density,
        **tuned,
    }  # fmt: skip
    names = [n for n in recipes.__all__ if not n.endswith("_drm_repo")]
    return {n: partial(recipes.recipe(n).make, **options.get(n, {})) for n in names}


def counted(name: str, make: Callable[[Setting], Method]) -> dict[str, Counted]:
    """The method's bytes: of the last round before any tuning, and FedDisk's of both stages."""
    traits = recipes.recipe(name).traits
    model = branched() if traits.router else fixed() if traits.fixed_head else plain()
    federation, local = federation_of(model), Local(lr=0.05, steps=4, batch=16)
    setting = Setting(
        model, (0.1,) * CLASSES, local, rounds=ROUNDS, clients=CLIENTS, shape=(INPUTS,)
    )
    seen = played(make(setting), federation)
    counts = {r: _counted(seen[r]) for r in (1, ROUNDS - 1)}
    if name in ("feddisk", "made"):
        return {f"{name}, densities": counts[1], f"{name}, training": counts[ROUNDS - 1]}
    return {name: counts[ROUNDS - 1]}


def played(algorithm: Method, federation: Federation) -> dict[int, Seen]:
    """What messages carried, by round; 0: the exchange before round 1."""
    first, seen = (federation.params, federation.buffers), dict[int, Seen]()

    def site(i: int) -> Site:
        return Site(algorithm, federation.clients[i], federation.seeds.batch, first=first)

    strategy = AlgorithmStrategy(
        algorithm, clients=len(federation.clients), classes=CLASSES, seeds=federation.seeds,
        first=first,
    )  # fmt: skip
    grid = LocalGrid(metered(client_app(site), seen), len(federation.clients))
    for _ in play(strategy, grid, ROUNDS - 1):
        pass
    return seen


def _counted(seen: Seen) -> Counted:
    n = len(seen.clients)
    return Counted(seen.down / n, seen.up / n, seen.report / n, seen.records / n, n)


def table(names: Sequence[str] | None = None) -> Iterator[str]:
    """The table, row by row."""
    yield "| method | down | up | of it report | down / P | up / P | specified | as counted | |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, make in makers().items():
        if names is not None and name not in names:
            continue
        for row, c in counted(name, make).items():
            yield row_of(row, c)


def row_of(name: str, c: Counted) -> str:
    """The table's row of a method."""
    want, verdict = SPECIFIED.get(name), ""
    if want is not None:
        verdict = "yes" if agrees(c, want) else f"no: {4 * want.down} / {4 * want.up}"
        verdict += f"; {want.why}" if want.why else ""
    notes = ["with a client branch"] if name.startswith("feddrm") else []
    notes += [f"{c.asked} of {CLIENTS} clients asked"] if c.asked < CLIENTS else []
    shares = f"{c.down / 4 / P:.2f} | {(c.up - c.report) / 4 / P:.2f}"
    spec = "" if want is None else want.text
    return (
        f"| {name} | {c.down:.0f} | {c.up:.0f} | {c.report:.0f} | {shares} | {spec} | {verdict} | "
        f"{'; '.join(notes)} |"
    )


def agrees(c: Counted, want: Floats) -> bool:
    """Whether a count is what is specified, and a report of id and loss."""
    down, up = want.more
    return c.down == 4 * want.down + down and c.up == 4 * want.up + up + REPORT


def page() -> Iterator[str]:
    """The whole page, line by line."""
    one = played(recipes.fedavg(_setting()), federation_of(plain()))
    both = played(recipes.fedpals(_setting(), ess=0.5), federation_of(plain()))
    headers = one[1].records - one[1].up
    yield "# Bytes per round and client"
    yield ""
    yield (
        "`python benchmarks/flower_bytes.py --write`: six clients of three labels (L = 3), an MLP "
        f"{INPUTS}-{WIDTH}-{CLASSES} in float32 (P = {P} numbers, {4 * P} bytes; d = {WIDTH}, "
        f"P_phi = {BODY}), at the methods' defaults; a MADE of {HIDDEN} hidden units (P_MADE = "
        f"{P_MADE}). Counted on Flower's messages of round {ROUNDS - 1} (densities: of round 1), "
        "mean over the clients asked. Every update has a report: the client's id (8 bytes) and "
        "its loss (4); up / P is without it. Buffers travel as the model does; this one has none."
    )
    yield ""
    yield from table()
    yield ""
    yield (
        f"Not in the table: {headers // CLIENTS} bytes of NumPy headers for the "
        f"{headers // CLIENTS // 128} arrays of FedAvg's update; and, once before round 1, "
        f"{one[0].up // CLIENTS} bytes of size from each client, or {both[0].up // CLIENTS} where "
        f"weights need label counts ({CLASSES} numbers of 8 bytes more)."
    )


def _setting() -> Setting:
    return Setting(plain(), (0.1,) * CLASSES, Local(lr=0.05, steps=4, batch=16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"into {OUT.name}, not only printed")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    lines = []
    for line in page():
        print(line, flush=True)
        lines.append(line)
    if options.write:
        OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
