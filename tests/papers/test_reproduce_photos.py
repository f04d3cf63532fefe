"""The FedPALS paper's protocols on PACS and iWildCam: what every cell is, and what it needs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import DataError, InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import Config
from fedshift.sweeps.store import Store
from fedshift_papers.protocols.study import narrowed
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.output import notes_of
from fedshift_papers.reproduce.plan import Plan, config_of
from fedshift_papers.reproduce.reproduce import Request, make_plan, reproduce
from fedshift_papers.reproduce.results import collect
from support.image_fixtures import count_as_whole, png, write_tree, write_wildcam

# Of the authors' code: learning rate, batch, weight decay and options, where not as all others.
PACS_CELLS: dict[str, tuple[float, int, float, dict[str, Any]]] = {
    "FedPALS": (3e-5, 32, 0.0, {"lam": 0.0}),
    "FedAvg": (3e-5, 32, 0.0, {}),
    "FedProx": (1e-5, 32, 0.0, {"mu": 1.0}),
    "SCAFFOLD": (1e-5, 32, 0.0, {"option": "I"}),
    "AFL": (3e-5, 32, 5e-5, {"gamma": 0.1}),
    "FedRS": (3e-5, 32, 0.0, {"alpha": 0.5}),
    "Oracle": (3e-5, 32, 0.0, {}),
}
NORM = {"fidelity": "norm"}
WILD_CELLS: dict[str, tuple[float, int, float, dict[str, Any]]] = {
    **{f"FedPALS, lambda={lam}": (3e-5, 32, 0.0, {"lam": float(lam), **NORM})
       for lam in (0, 600, 2500, 5800)},
    "FedProx+FedPALS, lambda=5800": (3e-5, 32, 0.0, {"lam": 5800.0, "mu": 1.0, **NORM}),
    "FedAvg": (3e-5, 32, 0.0, {}),
    "FedProx": (3e-5, 196, 0.0, {"mu": 1.0}),
    "SCAFFOLD": (1e-5, 64, 0.0, {"option": "I"}),
    "AFL": (3e-5, 64, 0.0, {"gamma": 1e-4}),
}  # fmt: skip


def configs(table: str, dataset: str, **changed: Any) -> dict[str, Config]:
    plan = Plan(narrowed(study(table), (dataset,), (), ()), **changed)
    (column,) = plan.study.columns
    return {
        row.label: config_of(plan, row, column, {"lam": 0.0} if row.ess else {}, 0)
        for row in plan.study.rows
    }


@pytest.mark.parametrize(
    ("table", "dataset", "size", "clients", "cells"),
    [
        ("fedpals/table1", "pacs", 224, 3, PACS_CELLS),
        ("fedpals/table3", "iwildcam", 448, 100, WILD_CELLS),
    ],
)
def test_cells_are_the_papers_protocol(
    table: str, dataset: str, size: int, clients: int, cells: dict[str, Any]
) -> None:
    by_label = configs(table, dataset)
    assert by_label.keys() == cells.keys()
    for label, config in by_label.items():
        lr, batch, decay, options = cells[label]
        t = config.training
        assert (t.optimizer, t.lr, t.batch, t.decay) == ("adam", lr, batch, decay), label
        assert (t.rounds, t.epochs, t.momentum, t.cohort) == (80, None, 0.0, None)
        assert config.method.options == options
        assert (config.data.size, config.data.augment) == (size, "photos")
        assert (config.data.validation, config.shift.clients) == (0.0, clients)
        model = config.model
        assert (model.name, model.pretrained, model.freeze_norm, model.projection) == (
            "resnet50", True, True, 2048,
        )  # fmt: skip


def test_the_small_column_is_what_the_papers_was_until_now() -> None:
    """The same settings, hence the same run folders as before the paper's protocol was added."""
    for label, config in configs("fedpals/table1", "pacs-96").items():
        assert config.data.model_dump(exclude_defaults=True) == {"name": "pacs", "validation": 0.0}
        assert (
            config.training
            == validate(
                {"training": {"batch": 32, "lr": 0.1, "rounds": 80, "evaluate_every": 1}}
            ).training
        )
        assert config.model.model_dump(exclude_defaults=True) == {"name": "resnet18-gn"}
        assert config.method.options == {"SCAFFOLD": {"option": "II"}, "FedProx": {"mu": 0.01}}.get(
            label, PACS_CELLS[label][3]
        )


@pytest.mark.slow
def test_the_small_column_comes_only_when_it_is_named() -> None:
    for table in ("fedpals/table1", "fedpals/table2", "fedpals/table4"):
        plain = narrowed(study(table), (), (), ())
        assert {c.dataset for c in plain.columns if "pacs" in c.dataset} == {"pacs"}
        named = narrowed(study(table), ("pacs-96",), (), ())
        assert [c.split for c in named.columns] == [
            c.split for c in plain.columns if c.dataset == "pacs"
        ]


@pytest.mark.slow
def test_tuned_values_and_overrides_go_before_a_columns_own() -> None:
    tuned = configs("fedpals/table1", "pacs", tuned={("pacs C=6", "FedProx"): {"mu": 0.1}})
    assert tuned["FedProx"].method.options == {"mu": 0.1}
    assert tuned["FedProx"].training.lr == 1e-5
    changed = configs("fedpals/table1", "pacs", overrides=("training.lr=0.5",))
    assert {c.training.lr for c in changed.values()} == {0.5}
    assert changed["AFL"].training.decay == 5e-5


# ----------------------------------------------------------------------------- what a cell needs


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Table 4 on a PACS of 8-pixel images, the paper's column and the small one."""
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tree(tmp_path / "pacs")
    return Plan(narrowed(study("fedpals/table4"), ("pacs", "pacs-96"), (), ()))


def problems(plan: Plan, dataset: str) -> set[str | None]:
    return {
        plan.problem(row, column)
        for column in plan.study.columns
        for row in plan.study.rows
        if column.dataset == dataset
    }


def absent(name: str) -> Any:
    raise ImportError(f"No module named {name!r}")


@pytest.mark.slow
def test_images_that_are_too_small_are_a_problem_of_their_column_alone(plan: Plan) -> None:
    (problem,) = problems(plan, "pacs")
    assert problem is not None
    assert "has 8 x 8 pixels, and enlarging images to 224 adds nothing to them" in problem
    assert "get the originals (`fedshift datasets` says where each set comes from)" in problem
    assert problems(plan, "pacs-96") == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "fedshift.models.pretrained.import_module",
            "Install the version that belongs to your torch",
        ),
        ("fedshift.datasets.augment.import_module", 'pip install "fedshift[vision]"'),
    ],
)
def test_a_missing_package_is_a_problem_with_its_cure(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, message: str
) -> None:
    for path in (tmp_path / "pacs").rglob("*.png"):
        path.write_bytes(png((1, 2, 3), (224, 224)))
    monkeypatch.setattr(module, absent)
    (problem,) = problems(plan, "pacs")
    assert problem is not None
    assert message in problem
    assert problems(plan, "pacs-96") == {None}


@pytest.mark.slow
def test_notes_call_default_only_what_was_not_set(tmp_path: Path) -> None:
    plan = Plan(narrowed(study("fedpals/table1"), ("pacs-96",), (), ()))
    cells = [replace(cell, problem=None) for cell in collect(plan, Store(tmp_path), {})]
    notes = " ".join(notes_of(plan, cells, {}))
    for label in ("FedProx: mu", "AFL: gamma", "FedRS: alpha"):
        assert f"{label} = " in notes
    paper = Plan(narrowed(study("fedpals/table1"), ("pacs",), (), ()))
    cells = [replace(c, column=paper.study.columns[0]) for c in cells]
    notes = " ".join(notes_of(paper, cells, {}))
    assert "FedRS: alpha = 0.5, a default (--tune has not been run)" in notes
    assert "FedProx: mu = " not in notes
    assert "PACS: FedProx with learning rate 1e-5 and mu = 1" in notes


@pytest.mark.slow
def test_the_wilds_metric_is_tabulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 3 on a generated iWildCam of 100 cameras, by a small network: macro F1 by run."""
    pytest.importorskip("kornia", reason='needs kornia: pip install "fedshift[vision]"')
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cameras = (1,) * 100 + (8, 8)
    write_wildcam(tmp_path / "iwildcam_v2.0", cameras, 3, (448, 448))
    count_as_whole(monkeypatch, cameras, 3)
    small = ("model.name=linear", "model.pretrained=false", "model.freeze_norm=false",
             "model.projection=", "training.cohort=2")  # fmt: skip
    out = tmp_path / "out"
    request = Request(
        "fedpals/table3", out, methods=("fedavg",), seeds=(0,), rounds=2, overrides=small
    )
    done = reproduce(request)
    (cell,) = done.outcome.cells
    (value,) = cell.values
    summary = json.loads((out / "runs" / value.run.name / "summary.json").read_text())
    assert value.value == summary["best"]["target_macro_f1"]
    assert 0 <= value.value <= 1
    assert "px=448" in value.run.name
    assert "0.20 ± 0.01" in (out / "table3" / "table.md").read_text()
    assert reproduce(request).report.trained == ()
    path = out / "runs" / value.run.name / "summary.json"
    del summary["best"]["target_macro_f1"]
    path.write_text(json.dumps(summary))
    with pytest.raises(DataError, match="has no target_macro_f1; .* Delete the folder .* to train"):
        reproduce(request)


@pytest.mark.slow
def test_the_size_of_images_can_be_changed(plan: Plan) -> None:
    """The column looks for images of the new size, and its runs have it."""
    request = Request(
        "fedpals/table4", Path("out"), ("pacs",), train=False, overrides=("data.size=8",)
    )
    changed = make_plan(request)
    (column,) = changed.study.columns
    config = config_of(changed, changed.study.rows[0], column, {}, 0)
    assert (config.data.size, config.model.name) == (8, "resnet50")
    assert column.missing() is None
    assert "enlarging images to 9" in str(
        make_plan(replace(request, overrides=("data.size=9",))).study.columns[0].missing()
    )
    assert "enlarging images to 224" in str(
        make_plan(replace(request, overrides=())).study.columns[0].missing()
    )


@pytest.mark.slow
def test_a_size_is_refused_where_images_have_one_size() -> None:
    request = Request("fedpals/table1", Path("out"), train=False, overrides=("data.size=64",))
    with pytest.raises(
        InputError, match=r"images of cifar-10, fashion-mnist have one size; add --d"
    ):
        make_plan(request)
    with pytest.raises(InputError, match=r"images of gaussians have one size; leave it out"):
        make_plan(replace(request, target="fedpals/fig9"))
    with pytest.raises(InputError, match=r"data.size = 0: must be at least 1"):
        make_plan(replace(request, datasets=("pacs",), overrides=("data.size=0",)))
