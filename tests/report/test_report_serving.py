"""Reports on runs whose clients serve models of their own, with drawings of their routers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import DataError
from fedshift.experiments.measures.served import serving_metrics
from fedshift.record.folder import RunResult, read_run
from fedshift.record.rounds import ServedMetrics
from fedshift.report.figures import save_figures
from fedshift.report.page import page
from fedshift.report.pools import pools
from fedshift.report.routing import shown_curve
from fedshift.report.serving import verdict
from fedshift.report.ways import WAYS, over_rounds
from support.report_fixtures import HOSTILE, Outline, drawings, made, write_csv, write_run

SVG = "{http://www.w3.org/2000/svg}"
LOOKS = ["brightness 0.5", "invert", "gamma 2", "unchanged"]
# Values that occur nowhere else on the page.
MEANS = {
    "system_accuracy": 0.7125, "average_accuracy": 0.9125, "worst_accuracy": 0.6125,
    "vote_accuracy": 0.4125, "routed_posterior": 0.7125, "routed_density": 0.7225,
    "mixture_accuracy": 0.7325, "oracle_routed": 0.9225, "router_accuracy": 0.8125,
}  # fmt: skip
REFITTED = {
    "refitted_accuracy": 0.7525, "refitted_router_accuracy": 0.8525,
    "moment_accuracy": 0.7625, "moment_router_accuracy": 0.8625, "drift_class": 3.5,
}  # fmt: skip
OWN = [[0.875, 0.0, None], [None, 1.0, 0.5], [0.75, None, None], [0.25, 0.625, 1.0]]
SENT_SHARES = [[0.9, 0.1, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.3, 0.0, 0.7, 0.0], [0.25] * 4]
AUC = [[None if i == j else 0.9 for j in range(4)] for i in range(4)]

Edit = Callable[[dict[str, Any]], None]


def serves(data: dict[str, Any]) -> None:
    """A FedDRM run's keys."""
    last = {"round": 2, "rounds": 2, "global_accuracy": None, "global_accuracy_sd": None}
    last |= MEANS | {f"{k}_sd": 0.0125 for k in MEANS} | REFITTED
    router = {
        "sent": SENT_SHARES, "auc": AUC, "coverage": [0.01, 0.5, 1.0], "risk": [1.0, 0.125, 0.2875],
        "aurc": 0.1875, "ece": 0.0625, "brier": 0.3125,
    }  # fmt: skip
    data["last"] = last
    parts = {
        "looks": LOOKS, "client_accuracy": [0.5, 0.75, 0.75, 0.6125], "class_accuracy": OWN,
        "router": router,
    }  # fmt: skip
    data["serving"] = copy.deepcopy(parts)
    data["weights"] = data["fedavg_weights"]
    data["why"] = ["Imperfect routing costs 21.0 points."]
    data["selection"] = None


def one_model(data: dict[str, Any]) -> None:
    """A FedAvg run's keys: no router."""
    serves(data)
    for key in ("routed_posterior", "routed_density", "mixture_accuracy", "router_accuracy"):
        data["last"][key] = data["last"][f"{key}_sd"] = None
    data["last"] |= {"global_accuracy": 0.6425, "global_accuracy_sd": 0.0}
    data["last"] = {k: v for k, v in data["last"].items() if k not in REFITTED}
    data["serving"]["router"] = None


def serving_folder(folder: Path, *edits: Edit, method: str = "FedDRM", **options: Any) -> Path:
    def edit(data: dict[str, Any]) -> None:
        for change in edits or (serves,):
            change(data)

    write_run(folder, method=method, edit=edit, **options)
    head = ["round", *MEANS, "global_accuracy"]
    shared = 0.6425 if one_model in edits else ""
    values = ["" if shared and k.startswith("rout") else v for k, v in MEANS.items()]
    write_csv(folder / "served.csv", [head, [1, *[0.0625] * 9, shared], [2, *values, shared]])
    return folder


def serving_run(folder: Path, *edits: Edit, **options: Any) -> RunResult:
    return read_run(serving_folder(folder, *edits, **options))


# --------------------------------------------------------------------------- the page


def test_a_serving_run_has_sections_of_its_own(tmp_path: Path) -> None:
    text = page([serving_run(tmp_path / "a")])
    outline = Outline(text)
    assert [a["id"] for tag, a in outline.tags if tag == "section"] == [
        "answers", "served", "loss", "confusion", "system", "own-clients", "labels", "own",
        "routing", "time", "provenance",
    ]  # fmt: skip
    # Rounds, loss, classes, labels, own models, risk, sent.
    assert len(drawings(text)) == 7
    assert "Imperfect routing costs 21.0 points." in "".join(outline.text)
    for word in ("ESS", "Hull distance", "Estimated", "Target accuracy"):
        assert word not in "".join(outline.text), word


def test_every_way_to_answer_is_shown_as_the_summary_has_it(tmp_path: Path) -> None:
    outline = Outline(page([serving_run(tmp_path / "a")]))
    for way in WAYS:
        if way.key in MEANS:
            assert outline.row(way.label) == [way.label, f"{MEANS[way.key]:.1%} ± 1.2%"]
        elif way.key in REFITTED:
            assert outline.row(way.label) == [way.label, f"{REFITTED[way.key]:.1%}"]
    assert all(row[:1] != ["one global model"] for row in outline.rows)
    assert "mean of the last 2 rounds" in "".join(outline.text)
    assert {way.key for way in WAYS} <= serving_metrics()

    def other(data: dict[str, Any]) -> None:
        data["last"]["vote_accuracy"] = 0.4325

    outline = Outline(page([serving_run(tmp_path / "b", serves, other)]))
    assert outline.row("vote of all models")[1] == "43.2% ± 1.2%"


def test_models_at_their_sites_are_no_system(tmp_path: Path) -> None:
    """A class's accuracy is then that of the clients' models; there were no routes and no votes."""

    def at_sites(data: dict[str, Any]) -> None:
        data["last"] |= {"system_accuracy": None, "system_accuracy_sd": None}

    runs = serving_run(tmp_path / "a"), serving_run(tmp_path / "b", serves, at_sites)
    here, there = ("".join(Outline(page([run])).text) for run in runs)
    sentence, system = "each client's own model on its own test examples.", "The system's answers:"
    assert system in here
    assert sentence not in here
    assert sentence in there
    assert system not in there


def test_a_single_round_has_no_deviation(tmp_path: Path) -> None:
    def once(data: dict[str, Any]) -> None:
        data["last"]["rounds"] = 1

    outline = Outline(page([serving_run(tmp_path / "a", serves, once)]))
    assert outline.row("vote of all models")[1] == "41.2%"
    assert "Share of right answers, in the last round." in "".join(outline.text)
    assert over_rounds([1, 1]) == "last round"
    assert over_rounds([5]) == "last 5 rounds"
    assert over_rounds([1, 5]) == "last 1 to 5 rounds"


def test_the_numbers_of_clients_and_router_are_those_of_the_summary(tmp_path: Path) -> None:
    run = serving_run(tmp_path / "a")
    outline = Outline(page([run]))
    assert outline.row("client 1", "–") == ["client 1", "–", "100.0%", "50.0%"]
    assert outline.row("client 2", "30.0%") == ["client 2", "30.0%", "0.0%", "70.0%", "0.0%"]
    assert outline.row("client 0", "–", "0.900")[2:] == ["0.900"] * 3
    assert outline.row("FedDRM", "0.0625") == ["FedDRM", "0.0625", "0.3125", "0.1875"]
    n = f"{run.clients[3].n:.0f}"
    assert outline.row("client 3", "unchanged") == [
        "client 3", "unchanged", n, "61.3%", "25.0%",
    ]  # fmt: skip
    assert outline.row("FedDRM", "4")[2:5] == ["65.3%", "50.0%", "client 0"]
    assert outline.row("1", "1.5")[2] == "6.2%"
    assert outline.row("2", "0.5")[2] == "71.2%"


def test_rows_of_heat_maps_have_the_looks(tmp_path: Path) -> None:
    charts = {s.get("aria-label"): s for s in drawings(page([serving_run(tmp_path / "a")]))}
    names = [f"client {i}: {look}" for i, look in enumerate(LOOKS)]
    for title in (
        "Accuracy of each client's own model by class (FedDRM)",
        "Where each client's queries are sent (FedDRM)",
        "Share of each label per client, and of the tests of all (FedDRM)",
    ):
        words = [t.text for t in charts[title].iter(f"{SVG}text")]
        assert [w for w in words if w in names] == names, title
    cells = [t.text for t in charts[title].iter(f"{SVG}title")]
    assert any("tests of all, cat: 100.0%" in str(t) for t in cells)


def test_several_runs_are_drawn_over_one_another(tmp_path: Path) -> None:
    runs = [
        serving_run(tmp_path / "a"),
        serving_run(tmp_path / "b", one_model, method="FedAvg"),
    ]
    text = page(runs)
    outline = Outline(text)
    assert outline.row("one global model") == ["one global model", "–", "64.2% ± 0.0%"]
    assert outline.row("routed, router refitted")[2] == "–"
    titles = [s.get("aria-label") or "" for s in drawings(text)]
    assert sum(t.startswith("Accuracy per round: ") for t in titles) == 4
    assert sum(t.startswith("Accuracy of each client's own model") for t in titles) == 2
    assert sum(t.startswith("Where each client's queries") for t in titles) == 1
    # Without any router there is no section on routers.
    assert 'id="routing"' not in page(runs[1:])
    assert "Risk against coverage" not in page(runs[1:])


def test_runs_of_both_kinds_share_a_page(tmp_path: Path) -> None:
    text = page([serving_run(tmp_path / "a"), made(tmp_path / "b")])
    names = [a["id"] for tag, a in Outline(text).tags if tag == "section"]
    assert names[:3] == ["results", "answers", "rounds"]
    assert len(set(names)) == len(names)
    assert Outline(text).row("FedPALS", "81.2%")
    assert all(row[:2] != ["FedDRM", "81.2%"] for row in Outline(text).rows)


def test_weights_are_shown_where_they_are_not_the_sizes(tmp_path: Path) -> None:
    def weigh(data: dict[str, Any]) -> None:
        data["weights"] = [0.7, 0.1, 0.1, 0.1]

    assert 'id="weights"' not in page([serving_run(tmp_path / "a")])
    assert 'id="weights"' in page([serving_run(tmp_path / "b", serves, weigh)])


def test_folders_of_the_first_versions_are_read(tmp_path: Path) -> None:
    def older(data: dict[str, Any]) -> None:
        del data["serving"]["looks"], data["serving"]["client_accuracy"]

    text = page([serving_run(tmp_path / "a", serves, older)])
    assert 'id="own"' in text
    assert 'id="own-clients"' not in text
    assert made(tmp_path / "b").summary.serving is None


def test_hostile_looks_are_text(tmp_path: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        data["serving"]["looks"] = list(HOSTILE)

    text = page([serving_run(tmp_path / "a", serves, rename, classes=HOSTILE[:3])])
    assert "<script" not in text
    assert any(HOSTILE[0] in row for row in Outline(text).rows)
    drawings(text)


# --------------------------------------------------------------------------- damage


def put(*path: str | int, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return edit


DAMAGE = {
    "no last": (put("last", value=None), 'only one of "last" and "serving" is there'),
    "no rounds": (put("last", "rounds", value=None), '"last": .*a number "rounds" is needed'),
    "text": (put("last", "vote_accuracy", value="high"), '"last.vote_accuracy'),
    "few clients": (put("serving", "class_accuracy", value=OWN[:3]), "has 3 entries, 4 are needed"),
    "few classes": (
        put("serving", "class_accuracy", 2, value=[0.5]),
        '"serving.class_accuracy.2" has 1 entries, 3 are needed',
    ),
    "few looks": (put("serving", "looks", value=["a"]), '"serving.looks" has 1 entries'),
    "not square": (put("serving", "router", "sent", 1, value=[1.0]), '"serving.router.sent.1" has'),
    "curve": (put("serving", "router", "risk", value=[0.5]), '"serving.router.risk" has 1 entries'),
    "percent": (put("serving", "router", "ece", value=6.25), '"serving.router.ece": Input should'),
    "negative": (put("serving", "client_accuracy", 0, value=-0.1), '"serving.client_accuracy.0"'),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_keys_are_named(tmp_path: Path, case: str) -> None:
    edit, message = DAMAGE[case]
    folder = serving_folder(tmp_path / "a", serves, edit)
    with pytest.raises(DataError, match=message) as caught:
        read_run(folder)
    assert "summary.json" in str(caught.value)
    assert "run the experiment again" in str(caught.value)


def test_a_missing_or_damaged_served_csv_is_named(tmp_path: Path) -> None:
    folder = serving_folder(tmp_path / "a")
    (folder / "served.csv").write_text("round,system_accuracy\n1,0.5\n")
    with pytest.raises(DataError, match=r'served.csv: no column "average_accuracy"'):
        read_run(folder)
    (folder / "served.csv").unlink()
    with pytest.raises(DataError, match=r"has no served.csv: the run did not finish"):
        read_run(folder)


# --------------------------------------------------------------------------- drawings


def test_the_risk_of_a_handful_of_queries_is_not_drawn() -> None:
    assert shown_curve([0.01, 0.05, 1.0], [1.0, 0.25, 0.5]) == ([0.05, 1.0], [0.25, 0.5])


def test_a_comparison_says_whether_routing_pays(tmp_path: Path) -> None:
    routed = serving_run(tmp_path / "a", serves)
    shared = serving_run(tmp_path / "b", one_model, method="FedAvg")
    assert verdict(pools([routed, shared])) == (
        "Routing (FedDRM) beats one global model (FedAvg) here: 71.2% against 64.2%, +7.0 points."
    )
    assert "beats one global model" in page([routed, shared])
    assert "one global model (" not in page([routed])
    assert routed.summary.last is not None
    worse = routed.summary.last | {"routed_posterior": 0.5}
    poor = replace(routed, summary=replace(routed.summary, last=worse))
    words = "does not beat one global model (FedAvg) here: 50.0%"
    assert words in verdict(pools([poor, shared]))
    assert verdict(pools([routed])) == verdict(pools([routed, routed])) == ""


@pytest.mark.slow
def test_figures_of_serving_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `report`")
    runs = [
        serving_run(tmp_path / "a"),
        serving_run(tmp_path / "b", one_model, method="FedAvg"),
    ]
    first, second = (save_figures(runs, tmp_path / name) for name in ("one", "two"))
    names = {"system-accuracy", "own-accuracy", "risk-coverage"}
    assert {p.stem for p in first} == names
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    alone = save_figures(runs[1:], tmp_path / "three")
    assert {p.stem for p in alone} == names - {"risk-coverage"}


@pytest.mark.slow
def test_names_in_figures_are_no_formulas(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra `report`")
    run = serving_run(tmp_path / "a", classes=("$x_{$", "\x1b[31mdog", "\u202eowl"))
    assert "own-accuracy" in {p.stem for p in save_figures([run], tmp_path / "drawn")}


def test_the_fixture_has_the_columns_that_runs_have() -> None:
    """The fixture above must not drift from what is recorded."""
    assert {*MEANS, "round", "global_accuracy"} == {f.name for f in fields(ServedMetrics)}


def test_confusions_of_other_tests_say_of_which(tmp_path: Path) -> None:
    """Control: for the same tests the heading says it once."""
    folders = serving_folder(tmp_path / "a", method="ditto"), write_run(tmp_path / "b")
    for folder in folders:
        head = ["true", "predicted", "examples"]
        write_csv(folder / "confusion.csv", [head, ["cat", "cat", 13], ["cat", "dog", 3]])
    served, one = map(read_run, folders)
    both = "".join(Outline(page([served, one])).text)
    assert "Counted at the target." in both
    assert "Counted on the tests of all clients." in both
    assert "Confusion at" not in both
    alone = "".join(Outline(page([served])).text)
    assert "Confusion on the tests of all clients" in alone
    assert "Counted" not in alone
