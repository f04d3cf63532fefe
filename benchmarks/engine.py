"""Seconds per round against a plain loop: `python benchmarks/engine.py [--quick] [--only W1,W2]`.

The plain loop is what one writes by hand: one thread, one `nn.Module`, a `torch.optim.SGD` for each
client, a weighted sum of parameters at the end of a round. It and every backend have a process of
their own, so that none has the other's memory, nor the plain loop what the library sets (the
allocator). Every figure is a ratio to it: all play some rounds in turn, then the next ones, each
with another cohort where one is drawn, and the medians of their times are compared. Before that,
the first steps of the same batches must lead the backend loop to the plain loop's parameters, and
all others to loop's.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before torch is imported, or it does nothing

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from results import arguments, save
from torch import Tensor
from workloads import TARGET, WORKLOADS, Workload, drawn, plain_round

from fedshift import recipes
from fedshift.algorithms.method import Method
from fedshift.client.local import plan_all
from fedshift.engine.backends import Backend, loop
from fedshift.engine.one_by_one import channels_last
from fedshift.engine.processes.pool import Team, workers
from fedshift.engine.run import Federation, draw_cohort, play_round, start
from fedshift.engine.stacking.stacked import Stacked
from fedshift.errors import UnfitError
from fedshift.kernels.allocator import keep_memory
from fedshift.models.dense import Mlp
from fedshift.recipes import Setting
from fedshift.tree import Params

# Largest share of a round's change that rounding may make of itself: in dense networks, and in
# deep ones, or with pools, which amplify it from step to step.
CLOSE, AMPLIFIED = 1e-4, 1e-2
# Steps of the comparison, at most.
CHECKED = 3
# Unless told how many rounds to play: as many as the plain loop plays in so many seconds, these at
# least and at most. Where they are many, a turn is several rounds, and some before them that are
# not counted: in a run, no other program's data are in the processor's cache. Processes that
# have waited for others take some rounds to be as fast again as they were.
ENOUGH, LEAST, MOST, TURN, UNCOUNTED = 120.0, 2, 60, 20, 8

Round = Callable[[int], Params]
# The seconds of each of these rounds, played one after the other.
Seconds = Callable[[Sequence[int]], list[float]]


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
def players(
    workload: Workload, names: Sequence[str], quick: bool, count: int
) -> Iterator[dict[str, Seconds]]:
    """By contender: the seconds that rounds take it, in a process of its own.

    A new one, as a user's is: a copy of this one would begin with what the comparison before left
    in its memory.
    """
    context, lines, processes = get_context("spawn"), list[Connection](), []

    def answer(line: Connection) -> list[float]:
        try:
            return list(line.recv())
        except EOFError:
            raise SystemExit(f"{workload.name}: {names[lines.index(line)]} has ended") from None

    def asker(line: Connection) -> Seconds:
        def ask(rounds: Sequence[int]) -> list[float]:
            line.send(rounds)
            return answer(line)

        return ask

    for name in names:
        ours, theirs = context.Pipe()
        lines.append(ours)
        inputs = (theirs, workload.name, name, quick, count)
        processes.append(context.Process(target=_play, args=inputs))
        processes[-1].start()
        theirs.close()
    try:
        for line in lines:
            answer(line)  # it is ready, and no longer busy
        yield {name: asker(line) for name, line in zip(names, lines, strict=True)}
    except BaseException:  # the others may be at work for minutes
        for process in processes:
            process.terminate()
        raise
    finally:
        for line in lines:
            line.close()
        for process in processes:
            process.join()


def _play(line: Connection, work: str, name: str, quick: bool, count: int) -> None:
    """Send the seconds of each round that is asked for, until the pipe is closed.

    They follow one another, as in a run: a process that must be woken for each of them would find
    nothing of the last one in the processor's cache.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the asking process ends
    torch.set_num_threads(1)
    (workload,) = (w for w in WORKLOADS if w.name == work)
    federation, algorithm = workload.federation(quick)
    net = workload.net()

    def plain(t: int) -> None:
        cohort = [federation.clients[i] for i in cohort_of(workload, t).tolist()]
        plain_round(net, federation.params, cohort, workload.local)

    with contextlib.ExitStack() as stack, contextlib.suppress(EOFError, OSError):
        play: Callable[[int], object] = plain
        if name != "plain":
            keep_memory()  # as `engine.run.run` does
            team = stack.enter_context(
                workers(federation.clients, count if "workers" in name else 1)
            )
            play = contenders_of(workload, algorithm, federation, team)[name]
        line.send([])
        while True:
            line.send([_seconds(play, t) for t in line.recv()])


def _seconds(play: Callable[[int], object], t: int) -> float:
    began = time.perf_counter()
    play(t)
    return time.perf_counter() - began


def measure(
    workload: Workload, quick: bool, repeat: int | None, count: int, only: Sequence[str]
) -> Result:
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
    server = start(algorithm, federation).server
    weighing = int((algorithm.weigh(server, cohort_of(workload, 1)) > 0).sum())
    names = ("plain", *(name for name in few if name == "loop" or name in apart))
    del federation, algorithm, server, few
    with players(workload, names, quick, count) as contenders:
        times, rounds = timed(contenders, repeat)
    medians = {k: statistics.median(v) for k, v in times.items()}
    return Result(workload, medians, apart, weighing, rounds)


def timed(
    contenders: Mapping[str, Seconds], repeat: int | None
) -> tuple[dict[str, list[float]], int]:
    """(seconds of each contender's rounds, and how many there were).

    All have played one before, which does not count: in it, processes are given their memory.
    """
    first = {name: seconds([1])[0] for name, seconds in contenders.items()}
    rounds = repeat or min(MOST, max(LEAST, int(ENOUGH / first["plain"])))
    turn, before = (TURN, UNCOUNTED) if rounds == MOST else (1, 0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for begin in range(1, rounds + 1, turn):
        for name, seconds in contenders.items():
            played = [*range(1, before + 1), *range(begin, begin + turn)]
            times[name] += seconds(played)[before:]
    return times, rounds


def contenders_of(
    workload: Workload, algorithm: Method, federation: Federation, team: Team,
    only: Sequence[str] = (),
) -> dict[str, Round]:  # fmt: skip
    """Round t by every backend that may be the fastest; by those of `only` if there are some."""
    first, count = start(algorithm, federation), team.count

    def ours(backend: Backend) -> Round:
        return lambda t: play_round(
            algorithm, federation, first.server, {}, cohort_of(workload, t), t, backend
        ).server["params"]  # fmt: skip

    contenders = {"loop": ours(loop), f"{count} workers": ours(team)}
    if not isinstance(workload.net(), Mlp):
        contenders["channels-last"] = ours(channels_last(loop))
        contenders[f"channels-last, {count} workers"] = ours(channels_last(team))
    if isinstance(workload.net(), Mlp):
        contenders["stacked"] = ours(Stacked())
        contenders["dense"] = ours(Stacked(dense=True))
        contenders[f"dense, {count} workers"] = ours(team.blocks(Stacked(dense=True)))
    return {k: v for k, v in contenders.items() if k == "loop" or not only or k in only}


def check(
    workload: Workload, algorithm: Method, federation: Federation, contenders: dict[str, Round]
) -> dict[str, float]:
    """Largest differences over the size of the round's change: others to loop, loop to plain.

    FedPALS weighs otherwise than the plain loop: only the backends are compared there. Left out is
    who says that the network is not for it.
    """
    results: dict[str, Params] = {}
    for name, play in contenders.items():
        try:
            results[name] = play(1)
        except UnfitError as e:
            print(f"{workload.name}: {name} is out: {str(e).partition('. ')[0]}", flush=True)
    loops = results.pop("loop")
    most = CLOSE if isinstance(workload.net(), Mlp) else AMPLIFIED
    # Workers: bit for bit.
    limits = {name: 0.0 if name[0].isdigit() else most for name in results}
    apart = {name: _gap(other, loops, federation.params) for name, other in results.items()}
    if workload.method is recipes.fedavg:
        cohort = [federation.clients[i] for i in cohort_of(workload, 1).tolist()]
        batches = []
        for client in cohort:
            (plan,) = plan_all(algorithm.phases(), client, 1, 0, int(client.id)).values()
            batches.append([plan.rows[s, : plan.sizes[s]] for s in range(plan.steps)])
        plain = plain_round(workload.net(), federation.params, cohort, workload.local, batches)
        apart["plain"], limits["plain"] = _gap(loops, plain, federation.params), most
    for name, gap in apart.items():
        if not gap <= limits[name]:  # also where it is no number
            raise SystemExit(f"{workload.name}: {name} and loop differ by {gap:.1e} of the change")
    return apart


def _gap(one: Params, other: Params, first: Params) -> float:
    change = max(float((other[k] - first[k]).abs().max()) for k in other)
    return max(float((one[k] - other[k]).abs().max()) for k in other) / change


def check_steps(workload: Workload, algorithm: Method, federation: Federation) -> None:
    """The timed rounds take as many steps of as many examples as the plain loop's."""
    for i in cohort_of(workload, 1).tolist():
        client = federation.clients[i]
        (plan,) = plan_all(algorithm.phases(), client, 1, 0, i).values()
        plain = [len(rows) for rows in drawn(len(client.y), workload.local)]
        if list(plan.sizes or ()) != plain:
            raise SystemExit(f"{workload.name}: client {i} takes batches of {plan.sizes}, {plain}")


def table(results: Sequence[Result]) -> Iterator[str]:
    """Markdown: seconds of the plain loop, and the other backends' speed relative to it."""
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


def offered(workload: Workload, count: int) -> set[str]:
    """The names in `contenders_of`."""
    linear = isinstance(workload.net(), Mlp)
    spread = ("dense",) if linear else ("channels-last",)
    alone = {"loop", *spread, *(("stacked",) if linear else ())}
    return alone | {f"{count} workers", *(f"{name}, {count} workers" for name in spread)}


def check_names(
    workloads: Sequence[str], only: Sequence[str], repeat: int | None, count: int
) -> None:
    """SystemExit for what is not there, and for contenders that no chosen workload has."""
    by_name = {w.name: w for w in WORKLOADS}
    if odd := sorted(set(workloads) - set(by_name)):
        raise SystemExit(f"unknown: {', '.join(odd)}; there are {', '.join(by_name)}")
    chosen = workloads or list(by_name)
    there = set[str]().union(*(offered(by_name[name], count) for name in chosen))
    if odd := [name for name in only if name not in there]:
        some = f"for {', '.join(chosen)} there are {'; '.join(sorted(there))}"
        raise SystemExit(f"unknown: {'; '.join(odd)}; {some}")
    if repeat is not None and repeat < 1:
        raise SystemExit(f"--repeat {repeat}: give 1 or more")
    if count < 1:
        raise SystemExit(f"--workers {count}: give 1 or more")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="as in W1,W3")
    parser.add_argument("--contenders", default="", help='as in "2 workers;dense"; loop is always')
    parser.add_argument("--repeat", type=int, help="rounds of each contender")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [w for w in WORKLOADS if not options.only or w.name in options.only.split(",")]
    only = options.contenders.split(";") if options.contenders else ()
    check_names(
        options.only.split(",") if options.only else (), only, options.repeat, options.workers
    )
    results = []
    for w in chosen:
        results.append(measure(w, options.quick, options.repeat, options.workers, only))
        print(f"{w.name}: {results[-1].seconds}", flush=True)
    print("\n".join(("", *table(results))))
    rows = [
        {"workload": r.workload.name, "what": r.workload.what,
         "apart": r.apart,
         "clients": r.workload.cohort or r.workload.clients, "weighing": r.weighing,
         "rounds": r.rounds, "seconds": r.seconds}
        for r in results
    ]  # fmt: skip
    save(options.out, {"workers": options.workers, "rows": rows}, quick=options.quick)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
