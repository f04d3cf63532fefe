"""Seconds per round against a plain loop: `python benchmarks/engine.py [--quick] [--only W1,W2]`.

The plain loop is what one writes by hand: one thread, one `nn.Module`, a `torch.optim.SGD` for each
client, a weighted sum of parameters at the end of a round. It has a process of its own, so that
nothing that the library sets for its process (the allocator) is the loop's, too. Every figure is a
ratio to it: all contenders play a round in turn, then the next round, with another cohort where
one is drawn, and the medians of their times are compared. Before that, the first steps of the same
batches must lead the backend loop to the plain loop's parameters, and all others to loop's.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from results import arguments, save
from torch import Tensor
from workloads import TARGET, WORKLOADS, Cnn, Workload, drawn, plain_round

from fedshift import recipes
from fedshift.algorithms.base import Algorithm
from fedshift.client.local import plan_all
from fedshift.engine.allocator import keep_memory
from fedshift.engine.backends import Backend, loop
from fedshift.engine.levers import channels_last
from fedshift.engine.rounds import Federation, draw_cohort, play_round, start
from fedshift.engine.stacked import Stacked
from fedshift.engine.workers import Team, workers
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Params

# Largest share of a round's change that rounding may make of itself.
AMPLIFIED = 1e-3
# Steps of the comparison, at most.
CHECKED = 3
# Unless told how many rounds to play: as many as the plain loop plays in so many seconds, these at
# least and at most. Where they are many, some before them are not counted.
ENOUGH, LEAST, MOST, UNCOUNTED = 90.0, 2, 40, 3

Round = Callable[[int], Params]


@dataclass(frozen=True)
class Result:
    """Medians in seconds by contender, the plain loop first; and how far parameters are apart."""

    workload: Workload
    seconds: dict[str, float]
    apart: dict[str, float]
    weighing: int
    rounds: int

    def ratio(self, contender: str) -> float:
        """How many times as fast as the plain loop."""
        return self.seconds["plain"] / self.seconds[contender]


def cohort_of(workload: Workload, t: int) -> Tensor:
    """The clients of round t."""
    return draw_cohort(workload.clients, workload.cohort or workload.clients, t, 0)


@contextlib.contextmanager
def plain_loop() -> Iterator[Callable[[str, bool, int], float]]:
    """Seconds of round t of a workload by the plain loop, in a process of its own.

    To be entered before anything is set for this process: the other one is forked from it.
    """
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_play_plainly, args=(theirs, ours), daemon=True)
    process.start()
    theirs.close()

    def play(name: str, quick: bool, t: int) -> float:
        ours.send((name, quick, t))
        return float(ours.recv())

    try:
        yield play
    finally:
        ours.close()
        process.join()


def _play_plainly(connection: Connection, other: Connection) -> None:
    other.close()
    torch.set_num_threads(1)
    held: tuple[str, Workload, Federation] | None = None
    with contextlib.suppress(EOFError):
        while True:
            name, quick, t = connection.recv()
            if held is None or held[0] != name:
                workload = next(w for w in WORKLOADS if w.name == name)
                held = name, workload, workload.federation(quick)[0]
                net = workload.net()
            _, workload, federation = held
            cohort = [federation.clients[i] for i in cohort_of(workload, t).tolist()]
            began = time.perf_counter()
            plain_round(net, federation.params, cohort, workload.local)
            connection.send(time.perf_counter() - began)


def measure(
    workload: Workload, quick: bool, repeat: int | None, count: int, plain: Callable[[int], float],
    only: Sequence[str],
) -> Result:  # fmt: skip
    """Check that all contenders do the same, then time them in turn."""
    federation, algorithm = workload.federation(quick)
    local = workload.local
    # Rounding grows from step to step: after an epoch of 188 chance would be compared.
    short = replace(local, epochs=None, steps=min(CHECKED, local.steps or CHECKED))
    briefly = replace(workload, local=short)
    brief = briefly.method(Setting(algorithm.model, TARGET, short))
    check_steps(workload, algorithm, federation)
    with workers(federation.clients, count) as team:
        few = contenders_of(briefly, brief, federation, team, only)
        apart = check(briefly, brief, federation, few)
        contenders = contenders_of(workload, algorithm, federation, team, only)
        times, rounds = timed(contenders, plain, repeat)
    server = start(algorithm, federation).server
    weighing = int((algorithm.weigh(server, cohort_of(workload, 1)) > 0).sum())
    medians = {k: statistics.median(v) for k, v in times.items()}
    return Result(workload, medians, apart, weighing, rounds)


def timed(
    contenders: dict[str, Round], plain: Callable[[int], float], repeat: int | None
) -> tuple[dict[str, list[float]], int]:
    """(seconds of each contender's rounds, the plain loop first, and how many there were)."""
    first = plain(1)
    rounds = repeat or min(MOST, max(LEAST, int(ENOUGH / first)))
    times: dict[str, list[float]] = {name: [] for name in ("plain", *contenders)}
    for t in range(1, rounds + 1 + (UNCOUNTED if rounds == MOST else 0)):
        times["plain"].append(first if t == 1 else plain(t))
        for name, play in contenders.items():
            began = time.perf_counter()
            play(t)
            times[name].append(time.perf_counter() - began)
    return {name: taken[-rounds:] for name, taken in times.items()}, rounds


def contenders_of(
    workload: Workload, algorithm: Algorithm, federation: Federation, team: Team,
    only: Sequence[str] = (),
) -> dict[str, Round]:  # fmt: skip
    """Round t by every backend that may be the fastest; by those of `only` if there are some."""
    first, count = start(algorithm, federation), len(team.members)

    def ours(backend: Backend) -> Round:
        return lambda t: play_round(
            algorithm, federation, first.server, {}, cohort_of(workload, t), t, backend
        ).server["params"]  # fmt: skip

    found = {"loop": ours(loop), f"{count} workers": ours(team)}
    if isinstance(workload.net(), Cnn):
        found["channels-last"] = ours(channels_last(loop))
        found[f"channels-last, {count} workers"] = ours(channels_last(team))
    if isinstance(workload.net(), Mlp):
        found["stacked"] = ours(Stacked())
        found["dense"] = ours(Stacked(dense=True))
        found[f"dense, {count} workers"] = ours(team.blocks(Stacked(dense=True)))
    return {k: v for k, v in found.items() if k == "loop" or not only or k in only}


def check(
    workload: Workload, algorithm: Algorithm, federation: Federation, contenders: dict[str, Round]
) -> dict[str, float]:
    """Largest differences over the size of the round's change: others to loop, loop to plain.

    FedPALS weighs otherwise than the plain loop: only the backends are compared there.
    """
    found = {name: play(1) for name, play in contenders.items()}
    loops = found.pop("loop")
    # Workers: bit for bit. Others: rounding, which a deep network amplifies from step to step.
    limits = {name: 0.0 if name[0].isdigit() else AMPLIFIED for name in found}
    apart = {name: _gap(other, loops, federation.params) for name, other in found.items()}
    if workload.method is recipes.fedavg:
        cohort = [federation.clients[i] for i in cohort_of(workload, 1).tolist()]
        batches = []
        for client in cohort:
            (plan,) = plan_all(algorithm.phases(), client, 1, 0, int(client.id)).values()
            batches.append([plan.rows[s, : plan.sizes[s]] for s in range(plan.steps)])
        plain = plain_round(workload.net(), federation.params, cohort, workload.local, batches)
        apart["plain"], limits["plain"] = _gap(loops, plain, federation.params), AMPLIFIED
    for name, gap in apart.items():
        if not gap <= limits[name]:  # also where it is no number
            raise SystemExit(f"{workload.name}: {name} and loop differ by {gap:.1e} of the change")
    return apart


def _gap(one: Params, other: Params, first: Params) -> float:
    change = max(float((other[k] - first[k]).abs().max()) for k in other)
    return max(float((one[k] - other[k]).abs().max()) for k in other) / change


def check_steps(workload: Workload, algorithm: Algorithm, federation: Federation) -> None:
    """The timed rounds take as many steps of as many examples as the plain loop's."""
    for i in cohort_of(workload, 1).tolist():
        client = federation.clients[i]
        (plan,) = plan_all(algorithm.phases(), client, 1, 0, i).values()
        plain = [len(rows) for rows in drawn(len(client.y), workload.local)]
        if list(plan.sizes or ()) != plain:
            raise SystemExit(f"{workload.name}: client {i} takes batches of {plan.sizes}, {plain}")


def table(results: Sequence[Result]) -> Iterator[str]:
    """Markdown: seconds of the plain loop, and everybody's speed relative to it."""
    names = list(dict.fromkeys(name for r in results for name in r.seconds))[1:]
    yield f"| | workload | plain loop, s | {' | '.join(names)} | apart | clients with weight |"
    yield "|---|---|---|" + "---|" * (len(names) + 2)
    for r in results:
        ratios = " | ".join(f"{r.ratio(n):.2f}x" if n in r.seconds else "–" for n in names)
        apart = f"{max(r.apart.values()):.0e}"
        yield (
            f"| {r.workload.name} | {r.workload.what} | {r.seconds['plain']:.3f} | {ratios} | "
            f"{apart} | {r.weighing} |"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="as in W1,W3")
    parser.add_argument("--contenders", default="", help='as in "2 workers;dense"; loop is always')
    parser.add_argument("--repeat", type=int, help="rounds of each contender")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [w for w in WORKLOADS if not given.only or w.name in given.only.split(",")]
    only = given.contenders.split(";") if given.contenders else ()
    results = []
    with plain_loop() as plain:
        keep_memory()
        for w in chosen:
            seconds = lambda t, w=w: plain(w.name, given.quick, t)  # noqa: E731
            results.append(measure(w, given.quick, given.repeat, given.workers, seconds, only))
            print(f"{w.name}: {results[-1].seconds}", flush=True)
    print("\n".join(("", *table(results))))
    rows = [
        {"workload": r.workload.name, "what": r.workload.what,
         "apart": r.apart,
         "weighing": r.weighing, "rounds": r.rounds, "seconds": r.seconds}
        for r in results
    ]  # fmt: skip
    save(given.out, {"workers": given.workers, "rows": rows}, quick=given.quick)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
