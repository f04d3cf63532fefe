"""`benchmarks/label_set_attacks.py`: attacks with controls, and pages with its numbers."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedshift import recipes
from fedshift.model import Model
from fedshift.recipes import Setting

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "label_set_attacks.md"
COHORTS = "A client that knows who takes part"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def tables(text: str) -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """(section, clients, attack) -> AUC and its interval."""
    numbers = {}
    for section in text.split("\n## ")[1:]:
        lines = [line.strip("|\n ").split(" | ") for line in section.splitlines() if "|" in line]
        for cells in lines[2:]:
            for attack, cell in zip(lines[0][1:], cells[1:], strict=True):
                low, mid, high = sorted(map(float, re.findall(r"[\d.]+", cell)))
                numbers[section.splitlines()[0], cells[0], attack] = (mid, low, high)
    return numbers


def check_controls(numbers: dict[tuple[str, str, str], tuple[float, float, float]]) -> None:
    """The controls guess; whole heads reveal two clients; attacks are better than guesses."""
    for (section, clients, attack), (value, low, high) in numbers.items():
        if attack == "control: sets that no client has":
            wide = (high - low) / 2
            assert abs(value - 0.5) < 2 * wide, (section, clients)
            assert wide < 0.1
    assert numbers["Another client", "2", "control: whole heads, absent rows"][0] == 1.0
    assert 0.6 < numbers["Another client", "2", "absent rows"][0] < 0.9
    reader = [v for k, v in numbers.items() if k[0] == "Who reads the messages"]
    assert reader
    assert all(v[1] > 0.55 for k, v in numbers.items() if k[2] == "shadow models")
    assert {v[0] for k, v in numbers.items() if k[2] == "which rows are of one label"} == {1.0}


def test_results_have_their_controls(load: Any) -> None:
    """And the client's best attack reaches the closed form for known numbers of holders alone."""
    numbers, pairs = tables(RESULTS.read_text(encoding="utf-8")), load("label_set_pairs")
    check_controls(numbers)
    size = load("label_set_messages").Size()
    for clients in (2, 5, 10, 20):
        row = [
            numbers["Another client", str(clients), k]
            for k in ("all of them", "the number of holders")
        ]
        assert row[0][0] == pytest.approx(row[1][0], abs=0.01)
        ceiling = pairs.ceiling(clients, size)
        assert row[1][1] - 0.01 <= ceiling <= row[1][2] + 0.01
    assert numbers[COHORTS, "10, 5 drawn", "who holds this label"][1] > 0.55
    enough = next(n for n in range(2, 1000) if pairs.ceiling(n, size) <= 0.55)
    assert f"at {enough} clients" in " ".join(RESULTS.read_text(encoding="utf-8").split())


def test_pages_have_the_results_numbers(load: Any) -> None:
    numbers = tables(RESULTS.read_text(encoding="utf-8"))
    values = {
        n: f"{numbers['Another client', n, 'all of them'][0]:.2f}" for n in ("2", "5", "10", "20")
    }
    reader = f"{numbers['Who reads the messages', '10', 'all of them'][0]:.2f}"
    cohort = f"{numbers[COHORTS, '10, 5 drawn', 'who holds this label'][0]:.2f}"
    page = (ROOT / "docs" / "methods" / "labelsets.md").read_text(encoding="utf-8")
    for n, value in values.items():
        assert f"| another client | {n} | {value} |" in page
    assert f"who knows which 5 of 10 take part | 10 | {cohort} |" in page
    assert f"who reads all messages | 10 | {reader} |" in page
    threats = " ".join((ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8").split())
    assert f"an AUC of {values['10']} among 10 clients and {values['20']} among 20" in threats
    assert f"by subtraction: {values['2']}." in threats
    assert f"names the clients of a label: {cohort}," in threats
    assert f"can name all labels of a client: {reader}." in threats
    setting = Setting(Model(nn.Linear(4, 2)), (0.5, 0.5))
    revealed = recipes.labelset_fedavg(setting).reveals()["delta"]
    assert f"name the labels (AUC {reader})" in revealed
    assert f"how many clients hold each label (among ten an AUC of {values['10']} for" in revealed
    # The same score for all other clients: among those of one label it is a guess.
    assert "among the clients of one label its AUC is 0.5." in " ".join(RESULTS.read_text().split())
    assert revealed.endswith(f"which of them (0.50), unless it knows who takes part ({cohort})")
    public = recipes.labelset_fedavg(setting, mode="public").reveals()["delta"]
    assert "AUC" not in public


def test_pairs_are_counted_by_hand(load: Any) -> None:
    """Two federations by hand, with ties as halves, weights, and groups alone."""
    pairs = load("label_set_pairs")
    fed = torch.tensor([0, 0, 1, 1])
    score = torch.tensor([0.9, 0.1, 0.9, 0.5]).double()
    yes, no = torch.tensor([2.0, 0, 1, 0]).double(), torch.tensor([0.0, 1, 1, 3]).double()
    one = pairs.compared(fed, score, yes, no)
    assert one.pairs.tolist() == [[2, 8], [1, 4]]
    assert one.right.tolist() == [[2, 7], [1, 3.5]]
    assert pairs.auc([one])[0] == pytest.approx(13.5 / 15)
    within = pairs.compared(fed, score, yes, no, torch.tensor([0, 0, 1, 2]))
    assert within.pairs.tolist() == [[2, 0], [0, 1]]
    assert within.right.tolist() == [[2, 0], [0, 0.5]]


@pytest.mark.slow
def test_the_closed_form_is_that_of_drawn_sets(load: Any) -> None:
    """Numbers of holders as scores, on sets drawn as in the benchmark; not that of one more."""
    pairs, size = load("label_set_pairs"), load("label_set_messages").Size()
    draw = importlib.import_module("fedshift.shifts.label").draw_label_sets
    source, n, feds = np.random.Generator(np.random.PCG64(0)), 6, 400
    drawn = [draw(size.labels, np.ones(10, bool), n, source)[1:].sum(0) for _ in range(feds)]
    holders = torch.tensor(np.concatenate(drawn)).double()
    fed = torch.arange(feds).repeat_interleave(10)
    value, low, high = pairs.auc([pairs.compared(fed, holders, holders, n - 1 - holders)])
    assert low < value < high
    assert abs(value - pairs.ceiling(n, size)) < 0.01
    assert abs(value - pairs.ceiling(n + 1, size)) > 0.015


@pytest.mark.slow
def test_a_small_run(load: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Attacks and controls at tiny size; the second command trains nothing."""
    bench = load("label_set_attacks")
    monkeypatch.setattr("sys.argv", ["x", "--quick", "--folder", str(tmp_path)])
    pages = []
    for _ in range(2):
        bench.main()
        pages.append(capsys.readouterr().out.partition("# What leaks"))
    assert "first model 1" in pages[0][0]
    assert "first model" not in pages[1][0]
    assert pages[0][2] == pages[1][2]
    numbers = tables(pages[0][2])
    check_controls(numbers)
    assert {k[1] for k in numbers} == {"2", "5", "10, 5 drawn"}
    assert numbers["Another client", "2", "all of them"][1] > 0.95
    assert numbers["Who reads the messages", "5", "all of them"][1] > 0.95
    assert numbers[COHORTS, "10, 5 drawn", "who holds this label"][1] > 0.55
