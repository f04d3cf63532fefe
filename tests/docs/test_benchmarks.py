"""The benchmarks' own promises: the same workloads everywhere, and pages without typed figures."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fedshift.client.local import Local
from fedshift.engine.processes.pool import workers
from fedshift.errors import UnfitError
from fedshift.model import build
from support.benchmark_files import load_benchmark

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A benchmark's file as a module, beside the files that it imports."""

    def loaded(path: str) -> ModuleType:
        return load_benchmark(path, monkeypatch)

    return loaded


def test_peers_play_the_same_workloads(load) -> None:  # type: ignore[no-untyped-def]
    ours = {w.name: w for w in load("workloads.py").WORKLOADS}
    plain = load("peers/plain.py")
    assert list(plain.WORKLOADS) == ["W1", "W2", "W3", "W4"]
    for name, theirs in plain.WORKLOADS.items():
        workload = ours[name]
        same = (
            workload.clients,
            workload.examples,
            workload.cohort,
            workload.local.batch,
            workload.local.steps,
        )
        assert same == (theirs.clients, theirs.examples, theirs.cohort, theirs.batch, theirs.steps)
        assert workload.local.lr == plain.RATE
        sizes = sorted(p.shape for p in workload.net().parameters())
        assert sizes == sorted(p.shape for p in theirs.net().parameters())
        assert workload.shape == theirs.shape == plain.data(theirs.tiny())[0][0].shape[1:]


@pytest.mark.slow
def test_the_peers_resnet_is_ours(load) -> None:  # type: ignore[no-untyped-def]
    (work,) = (w for w in load("workloads.py").WORKLOADS if w.name == "W4")
    ours, theirs = work.net(), load("peers/plain.py").resnet()
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.copy_(p)
    x = torch.randn(2, *work.shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs(x), ours(x)["logits"])


@pytest.mark.slow
def test_a_plain_round_takes_the_steps(load) -> None:  # type: ignore[no-untyped-def]
    plain = load("peers/plain.py")
    assert [w.local_steps for w in plain.WORKLOADS.values()] == [188, 10, 3, 10]
    work = plain.WORKLOADS["W3"].tiny()
    net, clients = work.net(), plain.data(work)
    params = {k: v.detach().clone() for k, v in net.named_parameters()}
    mixed = plain.plain_round(net, params, clients[:2], work)
    assert all(not torch.equal(v, params[k]) for k, v in mixed.items())


def test_the_page_has_the_files_figures(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    results, page = load("results.py"), load("page.py")
    rows = {
        "plain": {"seconds": 8.0, "processor": 7.5, "models": 4.25},
        "ours": {"seconds": 2.0, "processor": 1.25, "models": 1.75},
    }
    figures = {"clients": 7, "parameters": 1234567, "rows": rows}
    results.save(tmp_path / "a" / "aggregation.json", figures, quick=True)
    left = json.loads((tmp_path / "a" / "aggregation.json").read_text())
    drawn = page.drawn({"aggregation": left})
    assert "| ours | 2.00 | 0.25x | 1.25 | 1.8 |" in drawn
    assert "7 clients, 1,234,567 parameters" in drawn
    assert f"torch {torch.__version__}" in drawn
    assert "A trial, not a result." in drawn
    seconds = {"plain": 3.0, "loop": 2.0, "stacked": 4.0}
    one = {"workload": "W1", "what": "a CNN", "apart": {"plain": 1e-4}, "weighing": 3, "rounds": 7}
    engine = {"workers": 2, "rows": [one | {"seconds": seconds}]}
    assert "| W1 | 3.000 | 1.50x | 0.75x | 7 |" in page.drawn(
        {"engine": left | {"figures": engine}}
    )


def test_figures_to_reach(load) -> None:  # type: ignore[no-untyped-def]
    """On either side of what is asked, W5 by the share of clients that have weight."""
    goals = load("goals.py")

    def reached(**figures: Any) -> dict[str, bool]:
        left = {name: {"figures": some} for name, some in figures.items()}
        return {goal.what: goal.reached for goal in goals.goals(left)}

    def engine(name: str, loop: float, best: float, weighing: int = 100) -> dict[str, Any]:
        seconds = {"plain": 1.0, "loop": 1 / loop, "dense": 1 / best}
        row = {"workload": name, "clients": 100, "weighing": weighing, "seconds": seconds}
        row["rounds"] = 9
        return {"engine": {"rows": [row]}}

    assert reached(**engine("W2", 1.01, 3.6)) == {"W2, loop": True, "W2, dense, 9 rounds": True}
    assert reached(**engine("W2", 0.99, 3.4)) == {"W2, loop": False, "W2, dense, 9 rounds": False}
    assert reached(**engine("W5", 5.0, 17.6, weighing=20)) == {"W5, dense, 9 rounds": True}
    assert reached(**engine("W5", 5.0, 17.6, weighing=10)) == {"W5, dense, 9 rounds": False}
    assert reached(**engine("W5c", 5.0, 28.1, weighing=10)) == {"W5c, dense, 9 rounds": True}
    peer = {"peer": "pfl", "workload": "W2", "ratio": 3.65}
    rows = {"rows": [peer, peer | {"ratio": 0.5, "peer": "slow"}, {"peer": "x", "missing": "y"}]}
    assert not reached(**engine("W2", 1.0, 3.6), peers=rows)["W2, dense, beside pfl"]
    assert reached(**engine("W2", 1.0, 3.7), peers=rows)["W2, dense, beside pfl"]
    starts = {"import torch": {"wall": 1.0}, "fedshift --help": {"wall": 0.6}}
    starts |= {"import fedshift": {"wall": 1.4}, "import fedshift, all public names": {"wall": 1.6}}
    assert list(reached(startup=starts).values()) == [True, False, False]


def test_every_part_of_the_page_is_run(load) -> None:  # type: ignore[no-untyped-def]
    runs, page = load("all.py"), load("page.py")
    assert {*runs.PARTS, *runs.OTHERS} == set(page.ABOUT) == set(page.PARTS)
    assert all((BENCHMARKS / command[0]).exists() for command in runs.PARTS.values())
    named = runs.PARTS["deep"][-1].split(";")
    load("engine.py").check_names(["W4"], named, 1, runs.CORES)
    assert len(named) == 2


def test_peers_on_the_page(load, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    results, page = load("results.py"), load("page.py")
    row = {"peer": "pfl", "version": "0.6.0", "workload": "W3", "ratio": 0.853, "rounds": 3}
    few = row | {"workload": "W4", "clients": 2, "of": 8}
    missing = {"peer": "fluke", "missing": "no torch"}
    rows = [row, row | {"workload": "W1", "ratio": 1.2}, few, missing]
    results.save(tmp_path / "peers.json", {"rows": rows}, quick=False)
    drawn = page.drawn({"peers": json.loads((tmp_path / "peers.json").read_text())})
    assert "| pfl 0.6.0 | 1.20x | 0.85x | 0.85x |" in drawn
    assert "W4 with 2 of its 8 clients." in drawn
    assert "medians of 3 round(s)." in drawn
    assert "W3 with" not in drawn
    assert "fluke: no torch." in drawn


def test_precisions_on_a_small_network(load) -> None:  # type: ignore[no-untyped-def]
    """Every way takes its steps, and the page has the figures."""
    precision, page = load("precision.py"), load("page.py")
    workloads = precision.workloads
    assert set(precision.WORKLOADS) <= {w.name for w in workloads.WORKLOADS}
    model, local = build(workloads.Cnn, seed=0), Local(lr=0.05, batch=2)
    data = precision.data_of((1, 28, 28), 2)
    seconds = precision.seconds_of(precision.steps_of(model, data, local, 1), 1)
    errors = precision.errors_of(model, data, local)
    assert errors["float32"] < 1e-5 < 1e-3 < errors["bfloat16"] < 0.5
    row = {"workload": "W1", "batch": 2, "seconds": seconds, "errors": errors}
    (line,) = (
        x for x in page.precision({"extensions": [], "rows": [row]}) if x.startswith("| W1, ")
    )
    assert line.count("x |") == 3
    assert f"{errors['bfloat16']:.1e} |" in line


def test_the_published_page_is_drawn_from_the_published_files(load) -> None:  # type: ignore[no-untyped-def]
    runs, page = load("all.py"), load("page.py")
    figures = runs.figures(runs.FILES)
    assert set(figures) == set(page.ABOUT)
    assert runs.PAGE.read_text() == page.drawn(figures)
    figures["engine"]["figures"]["rows"][0]["seconds"]["plain"] += 1
    assert runs.PAGE.read_text() != page.drawn(figures)


def test_rounds_are_played_in_turn(load) -> None:  # type: ignore[no-untyped-def]
    """As often as asked; else as the plain loop's first round says, turns of several if many."""
    engine, calls = load("engine.py"), list[tuple[str, list[int]]]()

    def player(name: str, seconds: float):  # type: ignore[no-untyped-def]
        def play(rounds: list[int]) -> list[float]:
            calls.append((name, rounds))
            left = max(0, len(rounds) - engine.TURN)  # those that do not count take longer
            return [seconds + 1] * left + [seconds] * (len(rounds) - left)

        return play

    slow = {"plain": player("plain", 20.0), "ours": player("ours", 10.0)}
    assert engine.timed(slow, 1) == ({"plain": [20.0], "ours": [10.0]}, 1)
    assert calls == [("plain", [1]), ("ours", [1])] * 2  # those that do not count, and the first
    calls.clear()
    times, rounds = engine.timed(slow, None)
    assert rounds == len(times["ours"]) == int(engine.ENOUGH / 20)
    assert calls[:4] == [("plain", [1]), ("ours", [1])] * 2
    calls.clear()
    times, rounds = engine.timed({"plain": player("plain", 0.1), "ours": player("ours", 0.1)}, None)
    assert rounds == engine.MOST
    assert times == {"plain": [0.1] * rounds, "ours": [0.1] * rounds}  # none that does not count
    turns = [ts for name, ts in calls[2:] if name == "ours"]
    before = [*range(1, engine.UNCOUNTED + 1)]
    starts = range(1, engine.MOST, engine.TURN)
    assert turns == [[*before, *range(i, i + engine.TURN)] for i in starts]
    assert [name for name, _ in calls[2:]] == ["plain", "ours"] * len(turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    "odd",
    [(["W3", "W9"], [], None), ([], ["dense", "nonsense"], None), ([], [], 0),
     (["W3"], ["channels-last"], None), (["W1", "W4"], ["dense"], None),
     (["W3"], ["4 workers"], 1)],
)  # fmt: skip
def test_names_that_are_not_there_are_refused(load, odd) -> None:  # type: ignore[no-untyped-def]
    engine = load("engine.py")
    engine.check_names(["W3"], ["dense, 2 workers", "2 workers"], 1, 2)
    engine.check_names(["W1", "W3"], ["dense", "channels-last, 4 workers"], 1, 4)
    message = (
        r"W9|nonsense|--repeat 0|channels-last; for W3 there are 2|dense; for W1, W4|4 workers;"
    )
    with pytest.raises(SystemExit, match=message):
        engine.check_names(*odd, 2)
    with pytest.raises(SystemExit, match="--workers 0: give 1 or more"):
        engine.check_names([], [], 1, 0)


@pytest.mark.slow
def test_contenders_are_those_that_are_offered(load) -> None:  # type: ignore[no-untyped-def]
    engine = load("engine.py")
    for work in (w for w in engine.WORKLOADS if w.name in {"W1", "W3"}):
        federation, algorithm = work.federation(True)
        with workers(federation.clients, 2) as team:
            contenders = engine.contenders_of(work, algorithm, federation, team)
        assert set(contenders) == engine.offered(work, 2)


def importable(load) -> tuple[ModuleType, Any]:  # type: ignore[no-untyped-def]
    """(engine.py by a name that new processes find, its W3)."""
    load("engine.py")
    engine = importlib.import_module("engine")
    return engine, next(w for w in engine.WORKLOADS if w.name == "W3")


@pytest.mark.slow
def test_contenders_play_in_processes_of_their_own(load) -> None:  # type: ignore[no-untyped-def]
    engine, work = importable(load)
    with engine.players(work, ("plain", "dense, 2 workers"), True, 2) as contenders:
        assert list(contenders) == ["plain", "dense, 2 workers"]
        assert all(min(seconds([1, 2])) > 0 for seconds in contenders.values())
        times, rounds = engine.timed(contenders, 2)
    assert rounds == 2
    assert {len(each) for each in times.values()} == {2}


@pytest.mark.slow
def test_a_contender_that_fails_is_named(load, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    engine, work = importable(load)
    with (
        pytest.raises(SystemExit, match="W3: channels-last has ended"),
        engine.players(work, ("plain", "channels-last"), True, 1),
    ):
        pass
    assert "KeyError: 'channels-last'" in capfd.readouterr().err


def test_first_rounds_do_not_count(load, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """By a clock that only rounds move: the first ones 10 s, the peer's 2 s, ours 1 s."""
    plain, now = load("peers/plain.py"), [0.0]
    monkeypatch.setattr(plain, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    turns = plain.Turns(lambda t: now.__setitem__(0, now[0] + (1 if t else 10)))
    for t in range(4):
        now[0] += 2 if t else 10
        turns.tick()
    assert turns.theirs == [2.0] * 3
    assert turns.plain == [1.0] * 3


def test_peers_play_the_deep_network_with_few_clients(
    load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    run, calls = load("peers/run.py"), []
    row = {"peer": "pfl", "version": "1", "seconds": 1.0, "plain": 1.0, "ratio": 1.0, "tiny": True}

    def played(name: str, python: Path, workload: str, options: list[str]) -> dict[str, object]:
        calls.append((workload, options))
        return row | {"workload": workload}

    monkeypatch.setattr(run, "environment", lambda name, place: place / name)
    monkeypatch.setattr(run, "played", played)
    monkeypatch.setattr(run, "OUT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "pfl", "--rounds", "1"])
    run.main()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--workloads", "W4"])
    run.main()
    assert calls == [
        *((w, ["--rounds", "1"]) for w in ("W1", "W2", "W3")),
        ("W4", ["--rounds", "1", "--clients", "2"]),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"peers.json", "peers-deep.json"}
    for odd, message in (
        ("W9", "W9; there are peers blazefl,.* W4"),
        ("W1,W4", "ask for it alone"),
    ):
        monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], odd])
        with pytest.raises(SystemExit, match=message):
            run.main()


def test_peers_that_cannot_train_a_network_are_left_out(
    load, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    engine = load("engine.py")
    (work,) = (w for w in engine.WORKLOADS if w.name == "W5")
    federation, algorithm = work.federation(True)
    moved = {k: v + 1.0 for k, v in federation.params.items()}

    def refused(t: int) -> object:
        raise UnfitError("not for chains. Use another")

    contenders = {"loop": lambda t: moved, "odd": refused, "dense": lambda t: moved}
    assert engine.check(work, algorithm, federation, contenders) == {"dense": 0.0}
    assert capsys.readouterr().out == "W5: odd is out: not for chains\n"


@pytest.mark.slow
def test_the_default_backend_is_compared_in_equal_bits(load) -> None:  # type: ignore[no-untyped-def]
    """On a tiny task; the ratio by processor time counts workers as side by side."""
    benchmark = load("default_backend.py")
    work = benchmark.Workload("tiny", lambda: None, "mlp", {"hidden": [4], "rounds": 2})
    (figure,) = benchmark.played(benchmark.task(300, 4), work, turns=1)
    assert all(seconds >= 0 for name in ("loop", "default") for seconds in figure[name])
    cores = benchmark.os.cpu_count()
    given = {"loop": (6.0, 4.0, 0.0), "default": (3.0, 1.0, 2.0 * cores)}
    assert benchmark.ratios(given) == (2.0, 4.0 / 3.0)


def test_what_weights_add_is_paired_and_leaves_out_targets_of_one_label(load) -> None:  # type: ignore[no-untyped-def]
    """Control: with the target of one label, whose gain is large, the sentence would be another."""
    benchmark = load("natural_targets.py")
    base = {"a": 0.5, "b": 0.7, "c": 0.6, "d": 0.4, "one": 0.0}
    apart = {"a": 0.02, "b": 0.03, "c": 0.04, "d": 0.03, "one": 0.9}

    def of(accuracy: dict[str, float]) -> dict[str, dict[str, float]]:
        losses = {t: 1.0 - v for t, v in accuracy.items()}
        same = {"target_accuracy": accuracy, "target_loss": losses}
        return same | {f"{k}_corrected": v for k, v in same.items()}

    values = {name: of({t: base[t] + apart[t] for t in base}) for name in benchmark.METHODS}
    values["FedAvg"] = of(base)
    values["Oracle"] = {"target_accuracy": {"a": 0.6}, "target_loss": {"a": 0.2}}
    one = benchmark.Measured("t", values, frozenset("abcd"))
    assert "- `t`, 4 targets: FedPALS +3.0 (+1.7 to +4.3), a gain;" in benchmark.sentence(one)
    every = benchmark.Measured("t", values, frozenset(base))
    assert "+20.4" in benchmark.sentence(every)
    lines = {(row[0], row[1]): row[2:] for row in benchmark.gains(one)}
    assert lines["t", "IW-ERM, both corrected"][0] == "5"
    assert lines["t, two labels or more", "IW-ERM, both corrected"][:2] == [
        "4", "+3.0 (+1.7 to +4.3)",
    ]  # fmt: skip
    assert lines["t", "oracle, FedAvg corrected"] == ["1", "+10.0", "-0.300"]
    page = benchmark.page([one])
    assert "![t](natural_targets/t.svg)" in page
    assert "{" not in page
    assert benchmark.drawing(one).startswith("<svg")
