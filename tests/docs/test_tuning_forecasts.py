"""`benchmarks/tuning_forecasts.py`: records by hand, and pages with what the results say."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.experiments.measures.label_sets import sentences
from fedshift.record.summary import LabelSets, Optima, SetRound
from fedshift.sweeps.records import RECORDS, write_records

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "methods" / "central_tuning.md"
OUT = ROOT / "results" / "tuning_forecasts.md"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("tuning_forecasts")


def test_the_results_are_those_of_the_records(bench: Any) -> None:
    forecasts = bench.forecasts(ROOT / "results")
    assert bench.drawn(forecasts) == OUT.read_text(encoding="utf-8")
    other = [replace(f, gained=-f.gained) if f.loss == "kl" else f for f in forecasts]
    assert bench.drawn(other) != bench.drawn(forecasts)


def misses(bench: Any, forecasts: list[Any]) -> list[str]:
    """The sentences on forecasts on the page that `forecasts` does not give."""
    t = {
        (mode, loss): bench.scored(forecasts, mode, loss)
        for mode in bench.MODES
        for loss in bench.LOSSES
    }
    others = [t["private", loss] for loss in ("mse", "pairwise")]
    required = {
        "KL's had the right sign in at least four runs of five, in both modes": all(
            t[mode, "kl"].agreement >= 0.8 for mode in bench.MODES
        ),
        "Those of the other two had it in at least three of four in public mode": all(
            t["public", loss].agreement >= 0.75 for loss in ("mse", "pairwise")
        ),
        "and in fewer than seven of ten in private mode": all(o.agreement < 0.7 for o in others),
        "of the runs for which they foretold a gain, a third or more lost": all(
            o.broken * 3 >= o.promised > 0 for o in others
        ),
        "For both the mean forecast was a gain, and the mean change a loss": all(
            o.foretold > 0 > o.gained for o in others
        ),
    }
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [words for words in required if words not in text] == []
    return [words for words, true in required.items() if not true]


def test_the_page_says_what_the_results_do(bench: Any) -> None:
    """The control: each name with the forecasts of another loss."""
    forecasts = bench.forecasts(ROOT / "results")
    assert misses(bench, forecasts) == []
    turned = {"kl": "mse", "mse": "kl", "pairwise": "pairwise"}
    assert len(misses(bench, [replace(f, loss=turned[f.loss]) for f in forecasts])) == 4
    assert len(misses(bench, [replace(f, gained=-f.gained) for f in forecasts])) >= 3
    assert "(../../results/tuning_forecasts.md)" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_doubt_of_a_runs_sentence_is_the_results(bench: Any) -> None:
    """For each mode and loss whose forecasts were uninformative, and for no other."""
    forecasts = bench.forecasts(ROOT / "results")
    optima = Optima(0.5, 0.6, 0.55, 0.45)
    for mode in bench.MODES:
        rounds = (SetRound(1, 0, optima=optima),)
        sets = LabelSets(mode=mode, tune="kl", holders=(1,), absent_rounds=(0,), rounds=rounds)
        (sentence,) = sentences(sets, ("cat",))
        doubted = [k for k in bench.LOSSES if bench.scored(forecasts, mode, k).agreement < 0.7]
        assert ("the optima of mse and pairwise did not tell" in sentence) == bool(doubted)
        assert doubted in ([], ["mse", "pairwise"])


def record(
    seed: int, tune: str, target: float, *, mode: str = "private", rounds: int = 2,
    validation: float = 0.5, tune_rounds: int = 0, **optima: float,
) -> tuple[str, dict[str, str]]:  # fmt: skip
    """A run's name and small files; in further rounds it has other numbers."""
    config = (
        f'[data]\nname = "d"\n[shift]\nlabels_per_client = 3\n[training]\nepochs = 1\n'
        f'[method]\nmode = "{mode}"\ntune = "{tune}"\ntune_rounds = {tune_rounds}\n'
        f"[seeds]\nrun = {seed}\n"
    )
    csv = "round,target_accuracy,validation_accuracy\n" + "".join(
        f"{t},{target if t == 1 else 0.9},{validation}\n" for t in range(1, rounds + 1)
    )
    first: dict[str, Any] = {"round": 1} | ({"optima": optima} if optima else {})
    summary = {"label_sets": {"rounds": [first, {"round": 2, "optima": {"kl": 0.0}}]}}
    files = {"config.resolved.toml": config, "metrics.csv": csv}
    name = f"{mode}-{tune}-{tune_rounds}-{rounds}-{seed}"
    return name, files | {"summary.json": json.dumps(summary)}


Write = Callable[..., None]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    def write(table: str, *runs: tuple[str, dict[str, str]]) -> None:
        write_records(tmp_path / table / "tuning" / RECORDS, dict(runs))

    return write


def test_pairs_by_hand(bench: Any, written: Write, tmp_path: Path) -> None:
    """Three seeds of KL, of which one lost; seeds without a partner and limited rounds left out."""
    written(
        "labelsets",
        record(0, "none", 0.40), record(0, "kl", 0.50, aggregate=0.5, kl=0.7),
        record(1, "none", 0.40), record(1, "kl", 0.30, aggregate=0.5, kl=0.6),
        record(2, "none", 0.40), record(2, "kl", 0.35, aggregate=0.5, kl=0.45),
        record(3, "kl", 0.99, aggregate=0.5, kl=0.1),
        record(4, "none", 0.40), record(4, "kl", 0.9, tune_rounds=3, aggregate=0.5, kl=0.1),
        record(5, "none", 0.40, mode="public"), record(5, "kl", 0.9, aggregate=0.5, kl=0.1),
    )  # fmt: skip
    written("labelsets-round3", record(0, "kl", 0.50, rounds=3, aggregate=0.5, kl=0.7))
    written("other", record(4, "kl", 0.9, aggregate=0.5, kl=0.1))
    t = bench.scored(bench.forecasts(tmp_path), "private", "kl")
    assert (t.runs, t.agreed, t.promised, t.broken) == (3, 2, 2, 1)
    assert t.foretold == pytest.approx((20 + 10 - 5) / 3)
    assert t.gained == pytest.approx((10 - 10 - 5) / 3)
    with pytest.raises(SystemExit, match="no pair of runs with and without mse in mode private"):
        bench.scored(bench.forecasts(tmp_path), "private", "mse")


def test_runs_that_are_not_of_one_model_are_no_pair(
    bench: Any, written: Write, tmp_path: Path
) -> None:
    tuned = record(0, "kl", 0.5, aggregate=0.5, kl=0.7)
    written("labelsets", record(0, "none", 0.4, validation=0.52), tuned)
    with pytest.raises(SystemExit, match="the aggregate is not the untuned model"):
        bench.forecasts(tmp_path)
    written("labelsets", record(0, "none", 0.4, validation=0.502), tuned)
    (one,) = bench.forecasts(tmp_path)
    assert one.apart == pytest.approx(0.002)
