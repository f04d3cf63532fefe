"""FedDRM's protocols against numbers written down from the paper and the authors' code."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift_papers.protocols import routing
from fedshift_papers.reproduce.catalogue import study
from fedshift_papers.reproduce.plan import Plan, config_of

EIGHT = {"clients": 8, "target": "clients", "transform": "bits"}


def dirichlet(alpha: float, smallest: int, **more: Any) -> dict[str, Any]:
    kind = {"kind": "dirichlet-per-class", "beta": alpha, "capacity": True, "min_size": smallest}
    return EIGHT | kind | more


def shards(per_client: int) -> dict[str, Any]:
    return EIGHT | {"kind": "shards", "shards_per_client": per_client}


SIX = [
    ("cifar-10", dirichlet(0.3, 10)),
    ("cifar-10", shards(5)),
    ("cifar-20", dirichlet(0.3, 100)),
    ("cifar-20", shards(25)),
    ("cifar-100", dirichlet(0.3, 100)),
    ("cifar-100", shards(25)),
]
COLUMNS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "table1": SIX,
    "table2": SIX,
    "table3": [
        ("cifar-10", dirichlet(0.3, 10, clients=m, transform="wide")) for m in (8, 16, 24, 32)
    ],
    "table4": [("cifar-10", dirichlet(alpha, 10)) for alpha in (0.3, 1.3, 2.3)],
    "fig4": [("cifar-10", dirichlet(0.3, 10))],
    "fig5": [("cifar-10", dirichlet(0.3, 10, intensity=name)) for name in ("low", "mid", "high")],
    "fig6": [("cifar-10", dirichlet(0.3, 10))] * 4,
    "fig7": [("retina", {"kind": "natural", "clients": 3, "target": "clients"})],
    "lenet": [("cifar-10", dirichlet(0.3, 10)), ("cifar-10", shards(5))],
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Ditto": ("ditto_drm_repo", {}),
    "FedRep": ("fedrep_drm_repo", {}),
    "FedBABU": ("fedbabu_drm_repo", {"tune_rounds": 200}),
    "FedPAC": ("fedpac_drm_repo", {}),
    "FedALA": ("fedala_drm_repo", {}),
    "FedAS": ("fedas_drm_repo", {}),
    "ConFREE": ("confree_drm_repo", {}),
    "FedAvgFT": ("fedavgft", {"tune_rounds": 100}),
    "FedProxFT": ("fedproxft", {"tune_rounds": 100, "mu": 0.01}),
    "FedSAMFT": ("fedsamft", {"tune_rounds": 100, "rho": 0.05}),
    "FedDRM": ("feddrm", {"lam": 0.8}),
}
TEN = {
    "steps": 10, "batch": 128, "lr": 0.01, "schedule": "cosine", "momentum": 0.9, "decay": 5e-4,
}  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COLUMNS)
def test_every_columns_data_and_shift(name: str) -> None:
    columns = study(f"feddrm/{name}").columns
    pairs = [(c.settings["data"]["name"], dict(c.settings["shift"])) for c in columns]
    assert pairs == COLUMNS[name]
    for column in columns:
        assert column.settings["data"] == {
            "name": column.dataset, "validation": 0.0, "test": 0.3,
        }  # fmt: skip
        batch = 32 if name == "fig7" else 128
        assert column.settings["training"] == TEN | {"batch": batch}
        assert column.rounds == (100 if name == "fig7" else 800)


@pytest.mark.parametrize("name", ["table1", "table2", "table4", "fig7"])
def test_every_rows_method_and_options(name: str) -> None:
    expected = {
        label: (method, {k: v // 10 if "rounds" in k and name == "fig7" else v
                         for k, v in options.items()})
        for label, (method, options) in ROWS.items()
    }  # fmt: skip
    methods = {row.label.partition(",")[0]: (row.method, dict(row.options)) for row in
             study(f"feddrm/{name}").rows}  # fmt: skip
    assert methods == expected


@pytest.mark.slow
def test_the_figures_rows_and_networks() -> None:
    lams = [row.options["lam"] for row in study("feddrm/fig4").rows]
    assert lams == [lam for lam in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9) for _ in range(3)]
    assert {row.options["lam"] for row in study("feddrm/fig3-body").rows} == {0.8}
    branches = [c.settings["model"] for c in study("feddrm/fig6").columns]
    levels = ("deep", "mid", "shallow", "none")
    assert branches == [{"name": "lenet-gn", "branches": level} for level in levels]
    for name in ("table1", "table3", "table4", "fig4", "fig5", "fig7"):
        columns = study(f"feddrm/{name}").columns
        assert all(c.settings["model"] == {"name": "resnet18-projected"} for c in columns)
    client = ("FedDRM, client", "feddrm", "router_accuracy")
    for name, more in (("table3", []), ("fig5", [client])):
        rows = [(r.label, r.method, r.reads) for r in study(f"feddrm/{name}").rows]
        assert (
            rows
            == [
                (f"{label}, {metric}", ROWS[label][0], f"{metric}_accuracy")
                for metric in ("system", "average")
                for label in ("FedAS", "FedAvgFT", "FedDRM")
            ]
            + more
        )
    seventh = study("feddrm/fig7")
    assert [m.key for m in seventh.by_round] == ["train_loss"]
    config = config_of(Plan(seventh), seventh.rows[0], seventh.columns[0], {}, 0)
    assert config.training.evaluate_every == 1


def test_feet_are_of_their_own_figure() -> None:
    """No foot names lambda = 0.8 where it varies, a ResNet under LeNet, or 800 rounds."""
    names = ("table1", "fig3-body", "fig4", "fig5", "fig6", "fig7")
    studies = {name: study(f"feddrm/{name}") for name in names}
    feet = {name: " ".join((*s.chosen, *s.columns[0].chosen)) for name, s in studies.items()}
    says = {
        "lambda = 0.8": {"table1", "fig3-body", "fig5", "fig6", "fig7"},
        "ResNet-18 with group": {"table1", "fig3-body", "fig4", "fig5", "fig7"},
        "LeNet": {"fig6"},
        "Baselines as": {"table1", "fig5", "fig7"},
        "last 50 rounds": {"table1", "fig4", "fig5", "fig6"},
        "last 50 of 100 rounds": {"fig7"},
        "random resized crop": {"table1", "fig3-body", "fig4", "fig5", "fig6"},
        "Class ratios: in the publishers' layouts ACRIMA 396": {"fig7"},
    }
    for words, where in says.items():
        assert {name for name, foot in feet.items() if words in foot} == where, words


def test_the_small_experiments() -> None:
    small = study("feddrm/small").columns[0].settings
    assert small["shift"] == {
        "kind": "shards", "shards_per_client": 2, "clients": 8, "target": "clients",
        "transform": "fashion",
    }  # fmt: skip
    assert small["data"] == {
        "name": "fashion-mnist-mini", "validation": 0.0, "test": 0.3, "limit": 4000,
    }  # fmt: skip
    assert small["model"] == {"name": "lenet-gn-small"}
    assert small["training"] == TEN | {"steps": 5, "batch": 32, "lr": 0.03}
    assert study("feddrm/small").rounds == 80
    rows = {row.label: (row.method, dict(row.options)) for row in routing.small_rows()}
    assert rows["FedDRM, hard routing"] == ("feddrm", {"lam": 0.8})
    assert rows["FedAvgFT, 12.5 % tuning, vote"] == ("fedavgft", {"tune_rounds": 10})
    assert rows["FedAvgFT, 50 % tuning, vote"] == ("fedavgft", {"tune_rounds": 40})
    assert rows["FedRep, vote"] == ("fedrep_drm_repo", {})
    heart = study("feddrm/heart").columns[0].settings
    assert heart["shift"] == {"kind": "natural", "clients": 4, "target": "clients"}
    assert heart["model"] == {"name": "mlp-projected", "hidden": (32, 16)}
    assert heart["training"] == {"batch": 16, "lr": 0.05}
