"""The report page shows what is in the files, complete, balanced and escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift.diagnose import diagnose
from fedshift.errors import InputError
from fedshift.report.diagnosis_page import diagnosis_page
from fedshift.report.page import page
from fedshift.report.pools import pools
from support.report_fixtures import HOSTILE, Outline, drawings, made


def test_the_outline_rejects_unbalanced_html() -> None:
    with pytest.raises(AssertionError):
        Outline("<p><b>x</p>")
    with pytest.raises(AssertionError):
        Outline("<p>x")


def test_a_page_has_every_section_and_well_formed_drawings(tmp_path: Path) -> None:
    text = page([made(tmp_path / "a")])
    outline = Outline(text)
    names = [a["id"] for tag, a in outline.tags if tag == "section"]
    assert names == [
        "results", "rounds", "loss", "confusion", "classes", "clients", "weights", "labels", "ess",
        "selection", "time", "provenance",
    ]  # fmt: skip
    svgs = drawings(text)
    assert len(svgs) == 6
    for svg in svgs:
        assert svg.get("role") == "img"
        title = svg.find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        assert title.text == svg.get("aria-label")


def test_only_the_l2_distance_is_called_gap(tmp_path: Path) -> None:
    counts = np.array([[60, 40, 0], [10, 50, 40], [0, 20, 80]])
    diagnosis = diagnosis_page(diagnose(counts, [0.5, 0.25, 0.25]))
    for text in (page([made(tmp_path / "a")]), diagnosis):
        words = " ".join(Outline(text).text)
        assert "L1 distance" in words
        assert not re.search(r"\bgap to|L1 gap", words)


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    text = page([made(tmp_path / "a")])
    for tag, attributes in Outline(text).tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        assert not {"src", "href", "onclick", "onload"} & attributes.keys()
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_the_numbers_shown_are_the_numbers_in_the_files(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    outline = Outline(page([run]))
    assert outline.row("FedPALS", "81.2%") == [
        "FedPALS", "81.2%", "–", "75.0%", "6.2%", "123", "50.0%", "0.1250", "0.3125", "50", "2",
    ]  # fmt: skip
    counts = run.summary.label_counts[1]
    assert outline.row("client 1", f"{counts[0]:.0f}")[1:] == [f"{v:.0f}" for v in counts]
    assert outline.row("target") == ["target", "100.0%", "0.0%", "0.0%"]
    fedavg = f"{run.summary.fedavg_weights[0]:.2%}"
    assert outline.row("client 0", f"{sum(run.summary.label_counts[0]):.0f}")[2:] == [
        fedavg, "70.00%",
    ]  # fmt: skip
    assert outline.row("∞") == ["∞", "100.0%", "0.600000", "0.600000"]
    assert outline.row("1", "1.5") == [
        "1", "1.5", "43.8%", "1.25", "–", "–", "4", "123", "0.5",
    ]  # fmt: skip
    assert outline.row("cat", "100.0%") == ["cat", "100.0%", "81.2%", "75.0%"]
    assert outline.row("owl", "0.0%") == ["owl", "0.0%", "–", "–"]
    assert outline.row("FedPALS", "3")[2:6] == ["70.0%", "60.0%", "client 1", "60.0%"]
    assert outline.row("client 3", "20") == ["client 3", "20", "–"]
    assert outline.row("packages.torch") == ["packages.torch", "8.7.6"]
    assert '[run]\nname = "<trial>"\n' in "".join(outline.text)


def test_macro_f1_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    """Folders of versions that did not measure it are read all the same, as those above."""

    def measured(data: dict[str, Any]) -> None:
        data["final"]["target_macro_f1"] = 0.4375

    run = made(tmp_path / "a", edit=measured)
    assert Outline(page([run])).row("FedPALS", "81.2%")[2] == "0.438"


def test_selectors_stand_side_by_side_and_the_oracle_is_marked(tmp_path: Path) -> None:
    def recorded(data: dict[str, Any]) -> None:
        data["selection"]["picks"] = {"estimate": "50 %", "source": "λ=0", "oracle": "50 %"}

    outline = Outline(page([made(tmp_path / "b", edit=recorded)]))
    assert "Target accuracy (cheating)" in outline.row("ESS")
    assert outline.row("50 % (used)")[-1] == "estimate, oracle (cheating)"
    assert outline.row("λ=0")[-1] == "source"


def test_hostile_names_are_text(tmp_path: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        data["name"] = data["dataset"] = data["why"][0] = HOSTILE[0]
        data["selection"]["candidates"][0]["label"] = HOSTILE[0]

    run = made(tmp_path / "a", classes=HOSTILE[:3], clients=HOSTILE, method=HOSTILE[0], edit=rename)
    text = page([run, run])
    assert "<script" not in text
    outline = Outline(text)
    assert HOSTILE[0] in "".join(outline.text)
    for name in HOSTILE:
        assert any(row and row[0] == name for row in outline.rows), name
    assert len(drawings(text)) == 6


def test_control_characters_do_not_break_the_drawing(tmp_path: Path) -> None:
    text = page([made(tmp_path / "a", classes=("a\x00b", "c\x1bd", "e"))])
    assert len(drawings(text)) == 6
    assert "\x00" not in text


def test_several_runs_share_what_they_have_in_common(tmp_path: Path) -> None:
    def sized(data: dict[str, Any]) -> None:
        data.update(weights=data["fedavg_weights"], selection=None, lam="inf", curve=[])

    runs = [made(tmp_path / "a"), made(tmp_path / "b", method="FedAvg", edit=sized)]
    text = page(runs)
    assert len(drawings(text)) == 6
    assert "FedAvg: equal to n / N." in text
    # A sentence of all runs is shown once, without names; one of a single run under its name.
    assert text.count("FedAvg under-weights &lt;b&gt;owl") == 1
    assert "<h3>FedAvg</h3><ul>" not in text
    apart = made(tmp_path / "d", method="Oracle", edit=lambda d: d["why"].append("It cheats."))
    assert "<h3>Oracle</h3><ul><li>It cheats.</li></ul>" in page([*runs, apart])
    assert page([*runs, apart]).count("FedAvg under-weights &lt;b&gt;owl") == 1
    assert Outline(text).row("FedAvg", "81.2%")[9] == "∞"
    other = made(tmp_path / "c", clients=tuple("abcdef"), method="Oracle")
    assert len(drawings(page([*runs, other]))) == 8


def test_runs_of_different_classes_cannot_be_compared(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", classes=("cat", "dog", "emu"))]
    with pytest.raises(InputError, match=r"cannot compare .*b \(3 classes: cat, dog, emu\)"):
        page(runs)
    with pytest.raises(InputError, match="no runs to report on"):
        page([])


def test_different_targets_are_pointed_out(tmp_path: Path) -> None:
    def move(data: dict[str, Any]) -> None:
        data["target"] = [0.0, 1.0, 0.0]

    runs = [made(tmp_path / "a"), made(tmp_path / "b", edit=move)]
    assert "The runs have different targets" in page(runs)
    assert "different targets" not in page(runs[:1])


def test_labels_of_runs_are_distinct(tmp_path: Path) -> None:
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    labels = [[line.label for line in pools(runs)] for runs in ([a], [a, b], [a, a])]
    assert labels == [
        ["FedPALS"],
        [f"FedPALS ({tmp_path}/a)", f"FedPALS ({tmp_path}/b)"],
        ["FedPALS (trial) #1", "FedPALS (trial) #2"],
    ]


def test_a_run_without_target_labels_still_has_a_page(tmp_path: Path) -> None:
    def blind(data: dict[str, Any]) -> None:
        final = data["final"]
        final.update(target_accuracy=None, target_loss=None, target_recall=[None] * 3)
        final.update(client_accuracy=[None] * 4, estimated_se="inf")
        data.update(lam=None, ess=None, ess_fraction=None, l1_distance=None, curve=[], why=[])
        data.update(selection=None, certified=None)

    text = page([made(tmp_path / "a", edit=blind)])
    outline = Outline(text)
    assert outline.row("FedPALS")[1:5] == ["–", "–", "75.0%", "∞"]
    assert sum("no values recorded" in "".join(d.itertext()) for d in drawings(text)) == 2
    assert all(a.get("id") != "selection" for _, a in outline.tags)


@pytest.mark.slow
def test_many_clients_are_drawn_in_part_and_listed_in_full(tmp_path: Path) -> None:
    names = tuple(f"c{i}" for i in range(130))
    text = page([made(tmp_path / "a", clients=names, classes=tuple(f"k{i}" for i in range(62)))])
    assert "The 100 clients with the largest weights; 30 more are in the table." in text
    outline = Outline(text)
    assert all(any(row and row[0] == name for row in outline.rows) for name in names)


def test_the_page_of_a_diagnosis_shows_its_numbers() -> None:
    counts = np.array([[60, 40, 0], [10, 50, 40], [0, 20, 80]])
    d = diagnose(counts, [0.5, 0.25, 0.25], classes=HOSTILE[:3], clients=HOSTILE[:3], bootstrap=20)
    text = diagnosis_page(d)
    outline = Outline(text)
    assert "<script" not in text
    assert len(drawings(text)) == 3
    for x in d.labels:
        assert outline.row(x.name, f"{x.target:.2%}", f"{x.fedavg:.2%}")[3] == f"{x.pals:.2%}"
    for sentence in d.verdict:
        assert sentence in "".join(outline.text)
    assert any("(chosen)" in row[0] for row in outline.rows if row)
