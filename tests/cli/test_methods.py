"""`fedshift methods`: what every method does, whatever the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedshift import recipes
from fedshift.cli.methods import axes_used, example, method_row
from support.command_line import code_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`fedshift methods ARGS` in this process: (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        code = code_of(monkeypatch, "methods", *args)
        return code, *capsys.readouterr()

    return run


@pytest.mark.few(34)
@pytest.mark.parametrize("name", recipes.__all__)
def test_an_entry_says_nothing_of_a_hidden_setting(name: str) -> None:
    """It contains neither rounds nor steps of the stand-in, and no rule by its class name alone."""
    row = method_row(recipes.recipe(name))
    text = json.dumps({k: row[k] for k in ("axes", "reveals")})
    assert not re.search(r"\b10 steps|\b\d{3,} (only|rounds)|rounds 1 to [89]\d\d", text)
    assert all(re.search(r"[ (:]", axis) for axis in row["axes"]), row["axes"]
    page = ROOT / row["page"]
    assert page.is_file()
    assert name == "oracle" or name.removeprefix("labelset_").partition("_")[0] in (
        page.read_text().lower().replace("-", "")
    )


def test_axes_say_what_differs_from_fedavg() -> None:
    def axes(name: str) -> list[str]:
        return axes_used(example(recipes.recipe(name)))

    assert axes("fedavg") == ["none: the plain method"]
    assert axes("fedavgm") == ["server: Sgd(momentum=0.9)"]
    assert axes("fedrep") == [
        "local: 10 epochs on the head, then as long as [training] says on all but the head",
        "share: the head stays on the client",
    ]
    assert axes("fedas_drm_repo")[1:] == [
        "align: 1/5 of the steps", "match: examples", "fisher: False", "local: 4/5 of the steps",
        "share: the head stays on the client",
    ]  # fmt: skip
    assert axes("ditto") == [
        "Ditto: v_i <- v_i - eta (grad F_i(v_i) + lam (v_i - w_t)), beside any method that trains "
        "w.",
        "inner: FedAvg",
    ]
    tuned = axes("fedbabu_drm_repo")
    assert tuned[0].startswith("FineTune: inner in rounds 1, ..., after; in later ones v_i <- ")
    assert tuned[-1] == "tune: as long as [training] says on the head"
    revealed = method_row(recipes.recipe("fedavgft"))["reveals"]["delta"]
    assert revealed == "the change of the shared parameters, until tuning begins"


def test_one_method_alone(call: Any) -> None:
    code, out, _ = call("fedproxft")
    assert code == 0
    assert out.startswith("fedproxft: FedProx, then every client tunes")
    assert "options    mu = 0.01, tune_rounds = 100\n" in out
    assert out.endswith("    page       docs/methods/finetune.md\n")
    row = json.loads(call("fedrep", "--format", "json")[1])
    assert (row["name"], row["options"]) == ("fedrep", {"head_epochs": 10})
    assert row["page"] == "docs/methods/fedrep.md"


def test_an_unknown_method_names_the_nearest(call: Any) -> None:
    code, out, err = call("fedrap")
    assert (code, out) == (2, "")
    assert err.startswith('error: unknown method "fedrap"; allowed: afl, ')
    assert err.endswith('Did you mean "fedrep"?\n')
