"""FedPALS: protocols of its tables and figures, and what it printed.

Listo Zec, Breitholtz and Johansson 2024, "Overcoming label shift with target-aware federated
learning", arXiv 2411.03799. Settings that the paper does not state are marked in `chosen` texts;
"authors' code" is their fork of FedDG_Benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedshift.papers.protocols.fedpals_columns import (
    CIFAR,
    FASHION,
    PHOTO_ROUNDS,
    ROUNDS,
    cameras,
    dirichlet,
    mini,
    photos,
    small_photos,
    sparsity,
)
from fedshift.papers.protocols.fedpals_figures import figures
from fedshift.papers.protocols.fedpals_methods import (
    ALL,
    BASELINES,
    FEDAVG,
    FEDPALS,
    FIDELITY,
    GENERAL,
    NORM_ON_WILDCAM,
    ON_PACS,
    ON_WILDCAM,
    ORACLE,
    PROX_PALS,
    TUNING,
    pals,
)
from fedshift.papers.protocols.printed import printed, printed_rows
from fedshift.papers.protocols.study import Metric, Row, Study

CORRECTED, BASE = "target_accuracy_corrected", "FedAvg, corrected"

# --------------------------------------------------------------------------- printed numbers


def _with_lambda(row: Mapping[str, str]) -> str:
    """The label of a row in the tables that have one row per lambda."""
    return f"{row['method']}, lambda={row['lambda']}" if row["lambda"] else row["method"]


# --------------------------------------------------------------------------- tables


def _table1() -> Study:
    columns = (
        *(sparsity(name, c) for name in (FASHION, CIFAR) for c in (3, 2)),
        dirichlet(CIFAR, 0.1),
        photos(),
        small_photos(),
        *(mini(c) for c in (3, 2)),
    )
    return Study(
        "fedpals/table1",
        "Accuracy on the target under label shift",
        ALL,
        columns,
        ROUNDS,
        (*GENERAL, *TUNING),
        printed=printed("fedpals_table1", lambda r: (r["dataset"], r["label_split"], r["method"])),
    )


def _with_both(row: Row) -> tuple[Row, Row]:
    """A method's model as trained, and corrected for the target."""
    if not row.ess:
        # Of the same runs: what is tuned for the one counts for the other.
        moved = replace(
            row, label=f"{row.label}, corrected", reads=CORRECTED, against=BASE,
            grid={}, tuned_as=row.label,
        )  # fmt: skip
        return replace(row, against="FedAvg"), moved
    # The target's own validation examples play no part: the estimate needs T alone.
    plain = replace(row, picked_by="estimated_accuracy")
    moved = replace(row, label=f"{row.label}, corrected", reads=CORRECTED, against=BASE)
    return plain, replace(moved, picked_by="estimated_accuracy_corrected")


def _corrected() -> Study:
    """Table 1 once more, with every method's prior corrected, beside weights of examples."""
    weighed = (
        Row("IW-ERM", "iwerm", "iwerm"),
        Row("FedPALS re-weighted", "fedpals_joint", "fedpals_joint"),
    )
    columns = tuple(
        replace(
            column, extra=column.title.endswith("mini"), differs="not in the paper",
            settings={
                **column.settings,
                "training": {**column.settings["training"], "prior": "calibrated"},
            },
        )
        for column in (*(sparsity(name, c) for name in (FASHION, CIFAR) for c in (3, 2)), mini(3))
    )  # fmt: skip
    return Study(
        "fedpals/corrected",
        "Table 1 with the prior corrected",
        tuple(one for row in (FEDAVG, FEDPALS, *weighed, *BASELINES[1:], ORACLE)
              for one in _with_both(row)),
        columns,
        ROUNDS,
        (
            GENERAL[0],
            *GENERAL[2:4],
            "No part of the paper. Accuracy is that of the last round's model: as trained, and "
            "calibrated on the clients' validation examples and moved to T. Neither looks at an "
            "example of the target.",
            "FedPALS: of one model per ESS of lambda=0, 10, 25, 50 and 75 % the one whose estimate "
            "is highest: the estimate of the model as trained, or of the corrected one.",
            "Differences are to FedAvg as trained, and to FedAvg corrected.",
        ),
        metric=Metric(stop="final"),
    )  # fmt: skip


def _table2() -> Study:
    deltas = [float(row["delta"]) for row in printed_rows("fedpals_table2")]
    columns = tuple(
        make(f"delta={d:g}", target_noise=d) for make in (photos, small_photos) for d in deltas
    )
    return Study(
        "fedpals/table2",
        "FedPALS when the target is known with error: T + delta max(eps, 0), normalised",
        (pals(0.0, "FedPALS"),),
        columns,
        PHOTO_ROUNDS,
        (GENERAL[0], "FedPALS with lambda = 0, the best of Table 4."),
        printed=printed(
            "fedpals_table2", lambda r: (r["dataset"], f"delta={float(r['delta']):g}", "FedPALS")
        ),
    )


def _table3() -> Study:
    return Study(
        "fedpals/table3",
        "Macro F1 on iWildCam, 100 clients",
        ON_WILDCAM,
        (cameras(),),
        PHOTO_ROUNDS,
        (
            GENERAL[0],
            "FedRS is left out, as in the paper.",
            NORM_ON_WILDCAM,
            PROX_PALS,
        ),
        metric=Metric("macro F1", "target_macro_f1", 1.0, 2),
        printed=printed("fedpals_table3", lambda r: (r["dataset"], "M=100", _with_lambda(r))),
    )


def _table4() -> Study:
    return Study(
        "fedpals/table4",
        "The trade-off of lambda on PACS",
        ON_PACS,
        (photos(), small_photos()),
        PHOTO_ROUNDS,
        (GENERAL[0], FIDELITY, PROX_PALS),
        printed=printed("fedpals_table4", lambda r: (r["dataset"], "C=6", _with_lambda(r))),
    )


def studies() -> dict[str, Study]:
    """Every table and figure by name: "fedpals/table1" and so on."""
    made = (
        _table1(),
        _corrected(),
        _table2(),
        _table3(),
        _table4(),
        *figures(),
    )
    return {study.name: study for study in made}
