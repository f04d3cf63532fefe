"""FedDisk on data of known densities: what true and estimated weights of examples change.

These data are ours; no paper has them (`fedshift_papers.datasets.worlds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedshift_papers.protocols.study import Column, Metric, Row, Study

ROUNDS, LOOKS_ROUNDS, SEEDS, LAST = 40, 30, 5, 20
# Rounds in which examples are weighed: one if all clients take part. If one of three is drawn in
# each round, twelve rounds reach all of them in 98 % of runs, and in all runs of this study.
ALL, DRAWN = 1, 12

LOSS = Metric("test loss, nats", "target_loss", 1.0, 3, stop="final", span=LAST)
WORST = Metric("accuracy of the worst round, %", stop="final", span=LAST, of="least")

FITTED = {"density_rounds": 20, "hidden": (50,), "least_ess": 0.0}
BEFORE = ("density_rounds", "weighing_rounds")


def _row(label: str, key: str, **options: Any) -> Row:
    return Row(label, key, "feddisk", {**FITTED, **options}, before=BEFORE)


RUNS = (
    _row("FedAvg", "fedavg", estimator="equal"),
    _row("true weights", "true", estimator="true", useful=0.0),
    _row("direct at temper 1", "direct", estimator="direct", temper=1.0, useful=0.0),
    _row("direct at temper 0.02", "tempered", estimator="direct", temper=0.02, useful=0.0),
    _row("classifier", "classifier", estimator="classifier", useful=0.0),
    _row("default", "default"),
)
WORSTS = tuple(
    replace(
        row, label=f"{row.label}, {WORST.name}", shows=WORST,
        against="-" if row.key == "fedavg" else f"FedAvg, {WORST.name}",
    )
    for row in RUNS
)  # fmt: skip

CHOSEN = (
    "Ours: three clients of one size, whose mean density is the target's. Eight bits of 4,000 "
    "examples a client, tilted by -0.9, 0 and 0.9; four Gaussian numbers, means -1/2, 0 and 1/2 "
    "in each; 7,000 small images in three looks of shares 90, 5 and 5 %.",
    "A linear classifier of bits and numbers, whose labels depend on a square that it cannot have; "
    "a hidden layer of 50 for images. SGD with learning rate 0.1, batch 50, one local epoch.",
    f"Loss: mean over the last {LAST} rounds; worst round: the lowest accuracy of these. cohort: "
    "clients drawn in a round.",
    "20 rounds fit densities (MADE, a hidden layer of 50), 1 weighs examples, or 12 where one "
    "client is drawn. They come before the 40 (30 of images) in which the model is trained, for "
    "FedAvg too: all rows share cohorts and batches.",
    "Default: direct at temper 1, and weights of 1 where they would be worth less than 30 % of a "
    "client's examples; the other rows have no such bound. Where one client is drawn it is the "
    "default with 12 weighing rounds.",
    "Gaussians: densities take inputs by low = -2, high = 2.",
)


def _column(
    dataset: str, title: str, cohort: int, model: Mapping[str, Any], rounds: int = ROUNDS,
    **options: Any,
) -> Column:  # fmt: skip
    settings = {
        "data": {"name": dataset, "validation": 0.0},
        "shift": {"kind": "natural", "clients": 3},
        "model": model,
        "training": {"epochs": 1, "batch": 50, "lr": 0.1, "cohort": cohort},
    }
    method = {"method": {"weighing_rounds": ALL if cohort == 3 else DRAWN, **options}}
    return Column(
        dataset, title, f"cohort={cohort}", settings, rounds, seeds=SEEDS,
        by_method={row.key: method for row in RUNS},
    )  # fmt: skip


def _participation() -> Study:
    linear, layer = {"name": "linear"}, {"name": "mlp", "hidden": (50,)}
    columns = (
        *(_column("binary-world", "Tilted bits", m, linear) for m in (1, 3)),
        _column("gaussian-world", "Gaussians", 1, linear, low=-2.0, high=2.0),
        *(_column("looks-world", "Looks", m, layer, LOOKS_ROUNDS) for m in (1, 3)),
    )
    return Study(
        "made/participation",
        "True and estimated weights of examples, with all clients and with one of three",
        (*RUNS, *WORSTS),
        columns,
        ROUNDS,
        CHOSEN,
        metric=LOSS,
        by_round=(LOSS,),
    )


def studies() -> dict[str, Study]:
    """The study by name: "made/participation"."""
    study = _participation()
    return {study.name: study}
