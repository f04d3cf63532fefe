"""`compare` tries every method before it trains any, and its errors name the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedshift as fs
from fedshift.cli.app import app
from fedshift.cli.ending import perform
from fedshift.errors import InputError
from support.custom_files import NET
from support.custom_tasks import Net, hospitals
from support.small_runs import text_of

FAST: dict[str, Any] = {"rounds": 2, "steps": 2, "evaluate_every": 1, "progress": False}
UNUSED = "ditto: the target is served by the global model, which is FedAvg's; the clients' own"


@pytest.mark.slow
def test_personal_models_that_a_target_elsewhere_leaves_unused_are_named(tmp_path: Path) -> None:
    """In the result, its report and the table. Controls: FedAvg, and clients that are tested."""
    result = fs.fit(hospitals(), Net, method="ditto", **FAST)
    assert UNUSED in str(result)
    assert UNUSED in result.report(tmp_path / "page.html").read_text().replace("&#x27;", "'")
    plain = fs.fit(hospitals(), Net, method="fedavg", **FAST)
    assert result.accuracy == plain.accuracy
    assert "global model" not in str(plain)
    for target, methods, expected in (
        ("north", ["fedavg", "ditto"], True),
        ("north", ["fedavg", "fedprox"], False),
        ("clients", ["fedavg", "ditto"], False),
    ):
        table = fs.compare(hospitals(target), Net, methods, seeds=1, jobs=1, **FAST)
        assert any(UNUSED in note for note in table.notes) == expected


@pytest.mark.parametrize(("method", "named"), [("fedala", "fedala"), ("fedavgft", "FedAvg's")])
def test_so_are_those_of_other_methods(method: str, named: str) -> None:
    options = {"tune_rounds": 1} if method == "fedavgft" else {}
    result = fs.fit(hospitals(), Net, method=fs.method(method, **options), **FAST)
    (note,) = (note for note in result.summary.why if "not tested" in note)
    assert named in note


def test_a_method_that_needs_features_is_refused_before_any_is_trained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='^moon: this method looks at "features"'):
        fs.compare(hospitals(), Net, ["fedavg", "moon"], seeds=2, folder=tmp_path, **FAST)
    assert not any(tmp_path.iterdir())


def test_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("f.toml").write_text(text_of("fedavg"))
    Path("net.py").write_text(NET)
    arguments = [
        "compare",
        "f.toml",
        "--methods",
        "fedavg,moon",
        "-c",
        "model.name=net.py:of_shape",
    ]
    assert perform(app, arguments) == 2
    assert 'moon: this method looks at "features"' in capsys.readouterr().err
    assert not Path("runs").exists()


def test_errors_name_the_method_unless_every_method_has_them() -> None:
    task = hospitals()
    with pytest.raises(InputError, match=r"^fedavgft: tune_rounds=100 of .*as tune_rounds=5 \("):
        fs.compare(task, Net, ["fedavg", "fedavgft"], rounds=20, progress=False)
    with pytest.raises(InputError, match="^lr=-1"):
        fs.compare(task, Net, ["fedavg", "fedprox"], lr=-1, **FAST)
