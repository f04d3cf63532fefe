"""Lines of several seeds; which folders are meant; runs without a summary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift as fs
from fedshift.errors import DataError, InputError
from fedshift.record.choosing import choose
from fedshift.record.folder import Begun, RunResult, read_any, read_run
from fedshift.report.by_round import loss_chart
from fedshift.report.means import mean_cell, moments_of, with_intervals
from fedshift.report.page import page
from fedshift.report.pools import pools
from fedshift.report.repeating import command
from support.report_fixtures import Outline, drawings, made, write_begun, write_run


def scored(accuracy: float) -> Any:
    def edit(data: dict[str, Any]) -> None:
        data["final"]["target_accuracy"] = accuracy
        data["final"]["target_recall"][0] = accuracy

    return edit


def test_seeds_are_one_line_with_mean_deviation_and_number(tmp_path: Path) -> None:
    values = (0.5, 0.6, 0.7)
    runs = [made(tmp_path / f"s{s}", seed=s, edit=scored(v)) for s, v in enumerate(values)]
    other = made(tmp_path / "avg", seed=0, method="FedAvg")
    (line, alone) = pools([*runs, other])
    assert (line.label, line.seeds, alone.label) == ("FedPALS", ("0", "1", "2"), "FedAvg")
    outline = Outline(page([*runs, other]))
    assert outline.row("FedPALS", "3")[:4] == ["FedPALS", "3", "60.0% ± 10.0%", "–"]
    assert outline.row("FedAvg", "1")[2] == "81.2%"
    # Each run's own numbers are there as well.
    for seed, value in enumerate(values):
        assert outline.row(f"FedPALS, seed {seed}")[1] == f"{value:.1%}"


def test_what_differs_in_more_than_the_seed_is_a_line_of_its_own(tmp_path: Path) -> None:
    """Control: the same folders with the same learning rate are one line."""
    a, b = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1)
    assert [line.label for line in pools([read_run(a), read_run(b)])] == ["FedPALS"]
    file = b / "config.resolved.toml"
    file.write_text(file.read_text().replace("lr = 0.1", "lr = 0.2"))
    labels = [line.label for line in pools([read_run(a), read_run(b)])]
    assert labels == ["FedPALS (lr = 0.1)", "FedPALS (lr = 0.2)"]


@pytest.mark.parametrize("of", ["data_sha256", "files"])
def test_other_data_or_code_are_no_other_seed(tmp_path: Path, of: str) -> None:
    folders = [write_run(tmp_path / f"s{s}", seed=s) for s in range(2)]
    for k, folder in enumerate(folders):
        (folder / "lock.json").write_text(json.dumps({"format": 1, of: f"{k}"}))
    assert len(pools([read_run(folder) for folder in folders])) == 2


def test_a_round_in_which_a_seed_has_no_number_is_a_gap(tmp_path: Path) -> None:
    """Nothing, or one that is too large to square; control: a number."""
    runs = [made(tmp_path / f"s{s}", seed=s) for s in range(3)]
    for loss, drawn in ((0.5, True), (None, False), (1e200, False)):
        rounds = [replace(r, values={**r.values, "train_loss": loss}) for r in runs[2].rounds[:1]]
        changed = replace(runs[2], rounds=(*rounds, *runs[2].rounds[1:]))
        (series, *_) = loss_chart(pools([*runs[:2], changed])).series
        assert (series.y[0] is not None) is drawn
        assert series.y[1] is not None


def test_one_seed_twice_is_no_pool(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, seed=0) for name in "ab"]
    labels = [line.label for line in pools(runs)]
    assert labels == [f"FedPALS ({tmp_path}/a)", f"FedPALS ({tmp_path}/b)"]


def test_means_by_hand() -> None:
    over = moments_of([1.0, 2.0, 3.0, None], "train_loss")
    assert over is not None
    assert (over.mean, over.sd, over.n) == (2.0, 1.0, 3)
    assert moments_of([None, float("nan")], "train_loss") is None
    assert mean_cell([0.5, 0.7], ".1%") == "60.0% ± 14.1%"
    assert mean_cell([0.5, None], ".1%") == "50.0% (1 of 2)"
    assert mean_cell([None, None], ".1%") is None


def test_intervals_are_of_three_seeds_or_more_and_of_shares_within_bounds() -> None:
    assert with_intervals([moments_of([0.5, 0.7], "target_accuracy"), None]) == (
        (0.6, None), (None, None), (None, None),
    )  # fmt: skip
    values = [0.9, 1.0, 1.0, 1.0]
    (low,), (high,) = with_intervals([moments_of(values, "target_accuracy")])[1:]
    assert high == 1.0
    assert low is not None
    assert low > 0.8
    # Control: a loss may be larger than 1; shares that are none are no reason to stop.
    assert (with_intervals([moments_of(values, "train_loss")])[2][0] or 0) > 1
    assert (with_intervals([moments_of([1.5, 1.0, 1.0], "target_accuracy")])[2][0] or 0) > 1


# --------------------------------------------------------------------------- which folders


def test_a_page_of_an_earlier_call_is_no_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"s{s}", seed=s) for s in range(2)]
    before = choose(sorted(tmp_path.iterdir()))
    (tmp_path / "report.html").write_text("<!doctype html>")
    assert before == choose(sorted(tmp_path.iterdir()))
    assert (before.folders, before.place, before.left_out) == (tuple(runs), tmp_path, ())
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "logs").mkdir()
    given = choose(sorted(tmp_path.iterdir()))
    assert given.folders == tuple(runs)
    assert given.left_out == (str(tmp_path / "logs"), str(tmp_path / "notes.txt"))


def test_the_folder_of_a_comparison_gives_its_runs_title_and_order(tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / "runs" / name)
    table = {"title": "hospitals", "runs": [{"run": "b"}, {"run": "a"}]}
    (tmp_path / "results.json").write_text(json.dumps(table))
    chosen = choose([tmp_path])
    assert [f.name for f in chosen.folders] == ["b", "a"]
    assert (chosen.title, chosen.place) == ("hospitals", tmp_path)
    whole = choose(sorted(tmp_path.iterdir()))
    assert (whole.folders, whole.title, whole.place) == (chosen.folders, "hospitals", tmp_path)


def test_nothing_that_is_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give at least one run folder"):
        choose([])
    with pytest.raises(DataError, match=r"no run folder .*gone; `fedshift run FILE.toml` makes"):
        choose([tmp_path / "gone"])
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "meta.yaml").write_text("")
    with pytest.raises(DataError, match=r"mlruns: no run folder; give one that `fedshift run`"):
        choose([tmp_path / "mlruns"])


# --------------------------------------------------------------------------- not complete


def test_a_run_without_a_summary_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    run = read_any(write_begun(tmp_path / "a", 4))
    assert isinstance(run, Begun)
    assert [r.round for r in run.rounds] == [1, 2, 3, 4]
    text = page([run])
    state = "not complete, round 4 of 9: it is still going on, or was killed."
    assert state in "".join(Outline(text).text)
    assert f"fedshift run --resume {tmp_path}/a" in "".join(Outline(text).text)
    # Beside complete ones it has a line of its own: it does not go into their means.
    complete = [made(tmp_path / f"s{s}", seed=s) for s in (1, 2)]
    lines = pools([*complete, run])
    assert [line.label for line in lines] == ["FedPALS", "FedPALS, not complete"]
    outline = Outline(page([*complete, run]))
    assert outline.row("FedPALS", "2")[2] == "81.2%"


def test_rounds_between_evaluations_are_no_gaps(tmp_path: Path) -> None:
    text = page([read_any(write_begun(tmp_path / "a", 8))])
    chart = next(d for d in drawings(text) if d.get("aria-label") == "Accuracy per round")
    lines = [e.get("points") for e in chart.iter() if e.tag.endswith("polyline")]
    assert [len(str(points).split()) for points in lines] == [2, 4]  # of the legend, and the line


def test_the_reason_why_a_run_stopped_is_shown(tmp_path: Path) -> None:
    end = json.dumps({"time": 1.0, "event": "failed", "error": "interrupted"}) + "\n"
    run = read_any(write_begun(tmp_path / "a", 3, end=end))
    assert isinstance(run, Begun)
    assert run.state == "stopped after round 3 of 9: interrupted"
    # A run that went on after that is not stopped; a last line that is cut is none.
    again = json.dumps({"time": 1.0, "event": "start", "run": "trial", "rounds": 9}) + "\n"
    run = read_any(write_begun(tmp_path / "b", 3, end=end + again + '{"time": 1'))
    assert isinstance(run, Begun)
    assert run.state.startswith("not complete, round 3")


def test_diverged_training_is_reported(tmp_path: Path) -> None:
    """As in a comparison, where such a run has no summary."""
    folder = write_begun(tmp_path / "a", 3)
    (folder / "diverged.json").write_text(json.dumps({"error": "the loss is not finite"}))
    run = read_any(folder)
    assert isinstance(run, Begun)
    assert run.state == "stopped after round 3 of 9: training diverged: the loss is not finite"


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "x", '{"event": "round", "run": "t"}', '{"event": 3']
)
def test_damaged_events_are_named_where_they_are_needed(tmp_path: Path, line: str) -> None:
    folder = write_begun(tmp_path / "a", 1, end=line + "\n")
    with pytest.raises(DataError, match=r"events.jsonl, line 3: no event of a run"):
        read_any(folder)
    # Of a complete run they have the times alone.
    complete = write_run(tmp_path / "b")
    (complete / "events.jsonl").write_text(line + "\n")
    assert not read_run(complete).seconds
    assert "No times: no round was completed, or events.jsonl is missing or damaged." in page(
        [read_run(complete)]
    )


def cut(folder: Path, seed: int, kind: str, shift: float = 0.0) -> RunResult:
    """A run on user rows, whose seed cuts validation and test rows anew."""
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(1)) + shift
    y = x[:, 0] if kind == "regression" else (x[:, 0] > shift).long()
    client = ["a", "b", "c"] * 30
    task = fs.Task.from_arrays(
        x, y, client=client, target="c", kind=kind, seed=seed, name="mine"
    )  # fmt: skip
    fs.fit(task, "linear", method="fedavg", rounds=1, seed=seed, folder=folder)
    return read_run(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_seeds_that_cut_the_data_anew_are_one_line(tmp_path: Path, kind: str) -> None:
    """Control: other rows under the same names, cut alike, are a line of their own."""
    runs = [cut(tmp_path / f"s{s}", s, kind) for s in range(3)]
    assert len({run.lock["data_sha256"] for run in runs}) == 3
    (line,) = pools(runs)
    assert line.seeds == ("0", "1", "2")
    name = "Target RMSE" if kind == "regression" else "Target accuracy"
    text = page(runs)
    assert Outline(text).row("Run")[:3] == ["Run", "Seeds", name]
    assert "different targets" not in text
    other = cut(tmp_path / "other", 1, kind, shift=5.0)
    other = replace(other, config=other.config.replace("run = 1", "run = 7"))
    assert [len(of.runs) for of in pools([*runs, other])] == [3, 1]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("loop", ""),
        ("dense in 2 workers", " --backend dense --workers 2"),
        ("loop, then dense in 2 workers", " --backend dense --workers 2"),
        ("dense in 2 workers, then stacked", " --backend stacked"),
    ],
)
def test_the_command_has_the_backend_that_the_run_ended_on(
    tmp_path: Path, backend: str, options: str
) -> None:
    run = replace(made(tmp_path / "a", seed=0), lock={"backend": backend})
    assert command(run) == f"fedshift run {tmp_path}/a/config.resolved.toml{options}"


def test_files_that_lie_elsewhere_make_no_other_line(tmp_path: Path) -> None:
    """Control: another file of the same name does."""

    def run(place: str, seed: int, digest: str) -> RunResult:
        one = made(tmp_path / place, seed=seed)
        config = f'model.name = "{place}/net.py:Net"\n{one.config}'
        return replace(one, config=config, lock={"files": {f"{place}/net.py": digest}})

    runs = [run("a", 0, "x"), run("b", 1, "x"), run("c", 2, "y")]
    assert [line.seeds for line in pools(runs)] == [("0", "1"), ("2",)]


@pytest.mark.slow
def test_long_tables_of_runs_that_are_not_complete_say_where_all_rows_are(tmp_path: Path) -> None:
    """Control: a short table says nothing."""
    text = page([read_any(write_begun(tmp_path / "a", 12_000, of=20_000))])
    assert "are in metrics.csv or, of runs that are not complete, events.jsonl)" in text
    assert "events.jsonl)" not in page([read_any(write_begun(tmp_path / "b", 12))])


def test_sentences_are_of_the_first_seed_and_those_of_others_are_folded(tmp_path: Path) -> None:
    """Control: what all seeds say is there once, and of a single run nothing is folded."""

    def says(*texts: str) -> Any:
        return lambda data: data.update(why=list(texts))

    runs = [
        made(tmp_path / f"s{s}", seed=s, edit=says("All say this.", f"It gets {s} %."))
        for s in range(3)
    ]
    box = page(runs).partition('id="why"')[2].partition("</div>")[0]
    main, _, folded = box.partition("2 more of other seeds")
    assert main.count("<li>") == 2
    assert "It gets 0 %." in main
    assert "FedPALS, seed 2: It gets 2 %." in folded
    assert "All say this." not in folded
    assert "of other seeds" not in page(runs[:1])
    begun = [read_any(write_begun(tmp_path / f"b{s}", 3 + s, seed=s)) for s in range(2)]
    assert "<li>seed 1: not complete, round 4 of 9" in page(begun)
