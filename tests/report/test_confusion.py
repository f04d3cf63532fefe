"""Confusions of classes: counted, written, read back and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedshift.data import Examples
from fedshift.errors import DataError
from fedshift.evaluation import scores
from fedshift.evaluation.scores import score
from fedshift.model import Model
from fedshift.record.folder import read_run
from fedshift.report.page import page
from support.report_fixtures import Outline, drawings, write_csv, write_run
from support.small_runs import config_of, record_until

HEAD = ["true", "predicted", "examples"]


def outputs_as_inputs() -> Model:
    net = torch.nn.Linear(3, 3)
    with torch.no_grad():
        net.weight.copy_(torch.eye(3))
        net.bias.zero_()
    return Model(net)


def test_counts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    given, truth = torch.tensor([0, 1, 1, 2, 0, 1]), torch.tensor([0, 1, 0, 2, 2, 0])
    model = outputs_as_inputs()
    examples = Examples(torch.eye(3)[given], truth)
    pair = model.init()
    whole = score(model, *pair, examples, 3, confusion=True, batch=4)
    assert whole.confusion is not None
    assert whole.confusion.tolist() == [[1, 2, 0], [0, 1, 0], [1, 0, 1]]
    assert whole.confusion.diagonal().tolist() == whole.correct.tolist()
    assert (whole + whole).confusion is not None
    plain = score(model, *pair, examples, 3)
    assert plain.confusion is None
    assert (whole + plain).confusion is None
    assert (whole + plain).correct.tolist() == [2, 2, 2]
    # With many classes it would take more memory than it is worth.
    monkeypatch.setattr(scores, "MOST_CLASSES", 2)
    assert score(model, *pair, examples, 3, confusion=True).confusion is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_runs_leave_the_counts_of_their_last_model(tmp_path: Path, name: str) -> None:
    """Ditto's clients serve models of their own: the answers are the system's."""
    record_until(tmp_path / "a", config_of(name), None)
    run = read_run(tmp_path / "a")
    K = len(run.summary.classes)
    for k, recall in enumerate(run.summary.final.target_recall):
        row = [run.confusion.get((k, j), 0) for j in range(K)]
        assert (row[k] / sum(row) if sum(row) else None) == recall
    assert sum(run.confusion.values()) > 100


def test_the_page_has_a_map_and_the_mistakes_over_all_seeds(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / f"s{s}", seed=s) for s in range(2)]
    for folder, wrong in zip(folders, (2, 1), strict=True):
        write_csv(
            folder / "confusion.csv", [HEAD, ["cat", "cat", 13], ["cat", "dog", wrong],
                                       ["cat", "owl", 3 - wrong]]
        )  # fmt: skip
    text = page([read_run(folder) for folder in folders])
    titles = [d.get("aria-label") for d in drawings(text)]
    assert titles.count("What each class is taken for (FedPALS)") == 1
    outline = Outline(text)
    assert outline.row("cat", "dog") == ["cat", "dog", "9.4%"]
    assert outline.row("cat", "owl") == ["cat", "owl", "9.4%"]
    # Control: an older folder among them takes the map away, and a sentence says so.
    (folders[1] / "confusion.csv").unlink()
    text = page([read_run(folder) for folder in folders])
    assert "Not in the folders of FedPALS: runs of more" in "".join(Outline(text).text)
    assert all("taken for" not in str(d.get("aria-label")) for d in drawings(text))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["cat", "cat", 13], ["cat", "emu", 3]], r'line 3: "emu" is no class of summary.json'),
        ([["cat", "cat", 12], ["cat", "dog", 4]], 'recall of class "cat" differs'),
        ([["cat", "cat", 13], ["cat", "dog", 3], ["dog", "dog", 1]], 'of class "dog" differs'),
        ([["cat", "cat", "x"]], 'line 2, column "examples": "x" is not a number'),
    ],
)
def test_counts_of_another_run_are_refused(
    tmp_path: Path, rows: list[list[object]], words: str
) -> None:
    folder = write_run(tmp_path / "a")
    write_csv(folder / "confusion.csv", [HEAD, *rows])
    with pytest.raises(DataError, match=words):
        read_run(folder)
