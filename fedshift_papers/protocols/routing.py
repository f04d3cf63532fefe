"""Small experiments on routing, which are ours: images in eight looks, and four hospitals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedshift_papers.protocols.study import Column, Metric, Row, Study

Tables = Mapping[str, Mapping[str, Any]]
# Eight clients, each with its own look of the images, and tested on its own kind of data.
EIGHT_LOOKS: dict[str, Any] = {"clients": 8, "target": "clients", "transform": "bits"}
DIRICHLET: dict[str, Any] = {
    "kind": "dirichlet-per-class", "beta": 0.3, "capacity": True, "min_size": 10,
}  # fmt: skip
SMALL = Metric("accuracy, %", "system_accuracy", digits=2, stop="last", last=5)


def tuned_row(label: str, method: str, rounds: int, **options: Any) -> Row:
    """A row for a method whose last `rounds` are local fine-tuning."""
    return Row(label, method, method, {"tune_rounds": rounds, **options}, scaled=("tune_rounds",))


def drm(lam: float, label: str = "FedDRM", reads: str = "") -> Row:
    """A row for FedDRM at one lambda; `reads` is the key of the summary that it shows."""
    against = "-" if reads == "router_accuracy" else ""
    return Row(label, "feddrm", "feddrm", {"lam": lam}, reads=reads, against=against)


def cosine_sgd(**changed: Any) -> dict[str, Any]:
    """Local SGD as in the FedDRM authors' code; `changed` replaces single values."""
    usual = {"steps": 10, "batch": 128, "lr": 0.01, "schedule": "cosine", "momentum": 0.9}
    return usual | {"decay": 5e-4} | changed


CAUTION = (
    "Not in the paper: 4,000 images of Fashion-MNIST, two labels per client, eight looks, a "
    "network of 56,000 weights, 80 rounds of 5 steps.",
    "Fine-tuning is named by its share of the rounds: the paper's 12.5 %, and 50 %, which was "
    "chosen after seeing that 12.5 % leaves the personal models close to the global one.",
    "Refitted: the frozen router's last layer fitted to convergence. Moments: the same layer in "
    "closed form from each client's means and covariance. L2 penalty, loading and temperature are "
    "chosen on what clients hold out of their training examples. Neither is in the paper.",
    "Mean over the last 5 rounds; rows of refitted routers are of the last round.",
    "FedRep: half of the steps on the head, half on the body, as in the FedDRM authors' code.",
)
SMALL_ROUNDS = 80
VERDICT = ("FedDRM, hard routing", "FedDRM, refitted router", "FedDRM, mixture")


_Table = partial(Study, metric=SMALL, baseline="FedAvg, global model")


def small_rows() -> tuple[Row, ...]:
    """A row for each way to answer a query, for FedDRM and for the baselines."""
    routes = (
        ("hard routing", "routed_posterior"),
        ("routing by density ratio", "routed_density"),
        ("mixture", "mixture_accuracy"),
        ("refitted router", "refitted_accuracy"),
        ("moment router", "moment_accuracy"),
        ("oracle-routed", "oracle_routed"),
        ("vote", "vote_accuracy"),
        ("average accuracy", "average_accuracy"),
        ("client accuracy", "router_accuracy"),
    )
    routed = tuple(drm(0.8, f"FedDRM, {name}", reads) for name, reads in routes)
    return (
        Row("FedAvg, global model", "fedavg", "fedavg", reads="global_accuracy"),
        *routed,
        *(
            drm(lam, f"FedDRM lambda={lam:g}, {name}", reads)
            for lam in (0.5, 0.95)
            for name, reads in (routes[0], *routes[-2:])
        ),
        *(
            row
            for share, rounds in (("12.5", 10), ("50", 40))
            for row in _voted(f"FedAvgFT, {share} % tuning", tuned_row("", "fedavgft", rounds))
        ),
        *_voted("FedBABU, head tuned", tuned_row("", "fedbabu", 10, tune_part="head")),
        *_voted("Ditto", Row("", "ditto", "ditto")),
        *_voted("FedRep", Row("", "fedrep", "fedrep_drm_repo")),
        *_voted("Local only", Row("", "local_only", "local_only")),
    )


def _voted(label: str, row: Row) -> tuple[Row, ...]:
    """Two rows for a baseline: the vote over all clients' models, and the average accuracy."""
    return tuple(
        Row(f"{label}, {name}", row.key, row.method, row.options, scaled=row.scaled, reads=reads)
        for name, reads in (("vote", "vote_accuracy"), ("average accuracy", "average_accuracy"))
    )


def small_columns() -> tuple[Column, ...]:
    """Columns of the images that ship with the package and, on request, of the full set."""
    settings: dict[str, dict[str, Any]] = {
        "data": {"validation": 0.0, "test": 0.3, "limit": 4000},
        "shift": {
            "kind": "shards", "shards_per_client": 2, "clients": 8, "target": "clients",
            "transform": "fashion",
        },
        "model": {"name": "lenet-gn-small"},
        "training": cosine_sgd(steps=5, batch=32, lr=0.03),
    }  # fmt: skip
    return tuple(
        Column(
            title.lower(), title, "SPC=2",
            settings | {"data": {"name": title.lower(), **settings["data"]}},
            SMALL_ROUNDS, seeds=3, extra=extra,
        )
        for title, extra in (("Fashion-MNIST-mini", False), ("Fashion-MNIST", True))
    )  # fmt: skip


def _small() -> Study:
    return _Table(
        "feddrm/small",
        "Does routing beat one global model?",
        small_rows(),
        small_columns(),
        SMALL_ROUNDS,
        CAUTION,
        plot="routing",
        verdict=VERDICT,
    )


def _heart() -> Study:
    settings: Tables = {
        "data": {"name": "heart-disease", "validation": 0.0, "test": 0.3},
        "shift": {"kind": "natural", "clients": 4, "target": "clients"},
        "model": {"name": "mlp-projected", "hidden": (32, 16)},
        "training": {"batch": 16, "lr": 0.05},
    }
    column = Column("heart-disease", "Heart disease", "M=4", settings, 40, seeds=10)
    chosen = (
        "Not in the paper: four hospitals' patients, 13 numbers each, 70 % for training.",
        "Mean over the last 5 rounds; rows of refitted routers are of the last round.",
    )
    title = "Four hospitals: one model, their own, or routing"
    rows = _rows_of("FedAvg, global", "FedDRM, ", "Ditto", "Local only")
    return _Table(
        "feddrm/heart", title, rows, (column,), 40, chosen, plot="routing", verdict=VERDICT,
    )  # fmt: skip


def _rows_of(*beginnings: str) -> tuple[Row, ...]:
    """The rows of `small_rows` whose labels begin with one of these."""
    return tuple(row for row in small_rows() if row.label.startswith(beginnings))


def _lenet() -> Study:
    settings: Tables = {
        "data": {"name": "cifar-10", "validation": 0.0, "test": 0.3},
        "model": {"name": "lenet-gn"},
        "training": cosine_sgd(),
    }
    shards = {"kind": "shards", "shards_per_client": 5}
    columns = tuple(
        Column(
            "cifar-10", "CIFAR-10", split, {**settings, "shift": EIGHT_LOOKS | shift}, 800, seeds=1
        )
        for split, shift in (("Dir=0.3", DIRICHLET), ("SPC=5", shards))
    )
    tuned = _voted("FedAvgFT, 12.5 % tuning", tuned_row("", "fedavgft", 100))
    return _Table(
        "feddrm/lenet",
        "Table 1's data with a small network: one model, their own, or routing",
        (*_rows_of("FedAvg, global", "FedDRM, ", "Ditto", "FedRep", "Local only"), *tuned),
        columns,
        800,
        (
            "Not in the paper: LeNet with group normalisation (its Figure 6) on the data of its "
            "Tables 1 and 2, measured after the last round.",
        ),
        metric=replace(SMALL, last=1),
    )


def studies() -> dict[str, Study]:
    """All studies of this file by name."""
    return {study.name: study for study in (_small(), _heart(), _lenet())}
