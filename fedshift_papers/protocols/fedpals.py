"""FedPALS: protocols of its tables and figures, and what it printed.

Listo Zec, Breitholtz and Johansson 2024, "Overcoming label shift with target-aware federated
learning", arXiv 2411.03799. Settings that the paper does not state are marked in `chosen` texts;
"authors' code" is their fork of FedDG_Benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedshift_papers.protocols.fedpals_columns import (
    CIFAR,
    FASHION,
    PHOTO_ROUNDS,
    ROUNDS,
    SPARSE,
    cameras,
    dirichlet,
    gaussians,
    mini,
    photos,
    small_photos,
    sparsity,
    ten_clients,
)
from fedshift_papers.protocols.fedpals_methods import (
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
from fedshift_papers.protocols.study import Column, Metric, Row, Study, printed, printed_rows

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
    """Two rows for a method: its model as trained, and with the prior corrected for the target."""
    if not row.ess:
        # Both rows read the same runs, so the second has no grid of its own.
        moved = replace(
            row, label=f"{row.label}, corrected", reads=CORRECTED, against=BASE,
            grid={}, tuned_as=row.label,
        )  # fmt: skip
        return replace(row, against="FedAvg"), moved
    # Chosen by the estimate, which needs T alone, so that no labelled example of the target plays
    # a part.
    plain = replace(row, picked_by="estimated_accuracy")
    moved = replace(row, label=f"{row.label}, corrected", reads=CORRECTED, against=BASE)
    return plain, replace(moved, picked_by="estimated_accuracy_corrected")


def _corrected() -> Study:
    """Table 1 with the prior of every method corrected, and two methods that weigh examples."""
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


# --------------------------------------------------------------------------- figures
# Figures 1 and 4 train nothing: `pictures`.

MINI = "Fashion-MNIST-mini"
SO_FAR = replace(FEDPALS, label="FedPALS, to the mix so far", options={"so_far": True})
SWEEP = (
    "The figure's numbers are not printed, so there is no column of the paper's.",
    "Projection distance is the optimum of Equation 7, as on the axis of Figure 9: the squared "
    "distance of T from the nearest mixture of the clients' marginals.",
)
BETAS = (0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


def _over_c(data: str) -> tuple[Column, ...]:
    """Columns for C from 2 to 10, of a data set and of the images that ship with the package."""
    return (*(sparsity(data, c) for c in range(2, 11)), *(mini(c) for c in range(2, 11)))


def _fig2() -> Study:
    title = "CIFAR-10 over the number of labels per client, C"
    chosen = (*GENERAL, *TUNING, *SWEEP)
    return Study("fedpals/fig2", title, ALL, _over_c(CIFAR), ROUNDS, chosen, plot="panels")


def _fig5() -> Study:
    columns = (*(dirichlet(CIFAR, b) for b in BETAS),
               *(dirichlet(MINI, b, extra=True) for b in (0.1, 1.0)))  # fmt: skip
    chosen = (*GENERAL, *TUNING, *SWEEP, "The values of beta are chosen, but for 0.1 and 0.2.")
    title = "CIFAR-10 over the Dirichlet concentration, beta"
    return Study("fedpals/fig5", title, ALL, columns, ROUNDS, chosen, plot="panels")


def _fig6() -> Study:
    title = "Fashion-MNIST over the number of labels per client, C"
    chosen = (*GENERAL, *TUNING, *SWEEP)
    return Study("fedpals/fig6", title, ALL, _over_c(FASHION), ROUNDS, chosen, plot="panels")


def _fig3a() -> Study:
    chosen = (GENERAL[0], FIDELITY, PROX_PALS, SWEEP[0], "Runs are those of Table 4.")
    return Study(
        "fedpals/fig3a",
        "PACS: target accuracy by round",
        ON_PACS,
        (photos(), small_photos()),
        PHOTO_ROUNDS,
        chosen,
        plot="curves",
    )


def _fig3b() -> Study:
    chosen = (GENERAL[0], NORM_ON_WILDCAM, PROX_PALS, SWEEP[0], "Runs are those of Table 3.")
    return Study(
        "fedpals/fig3b",
        "iWildCam: macro F1 on the target by round",
        ON_WILDCAM,
        (cameras(),),
        PHOTO_ROUNDS,
        chosen,
        metric=Metric("macro F1", "target_macro_f1", 1.0, 2),
        plot="curves",
    )


def _fig7() -> Study:
    columns = (sparsity(FASHION, 6), dirichlet(CIFAR, 0.2), mini(6), mini(3))
    chosen = (*GENERAL, *TUNING, SWEEP[0])
    title = "Target accuracy by round"
    return Study("fedpals/fig7", title, ALL, columns, ROUNDS, chosen, plot="curves")


def _many(data: str, labels: int, clients: int, split: str, extra: bool = False) -> Column:
    """A column of `clients` clients, one of which is the target.

    With more than ten clients, a tenth of them is drawn in each round.
    """
    shift = {"kind": "sparsity", "labels_per_client": labels, "clients": clients - 1}
    cohort = {"cohort": clients // 10} if clients > 10 else {}
    return ten_clients(data, split, shift, training=cohort, extra=extra)


def _hundred(data: str, labels: int, extra: bool = False) -> Column:
    """A column of a hundred clients.

    It has a title and key of its own, because its splits have the names of those of ten clients.
    """
    column = _many(data, labels, 100, f"C={labels}", extra)
    return replace(column, dataset=f"{column.dataset}-m100", title=f"{data}, 100 clients")


def _fig8a() -> Study:
    columns = (*(_hundred(CIFAR, c) for c in (2, 3, 10)),
               *(_many(CIFAR, 3, m, f"M={m}") for m in (10, 50, 100)),
               *(_hundred(MINI, c, extra=True) for c in (2, 3, 10)))  # fmt: skip
    chosen = (
        *GENERAL,
        *SPARSE,
        SWEEP[0],
        "FedPALS is solved anew over every round's cohort. One model per ESS of lambda=0, 10, 25, "
        "50 and 75 % of the cohort's examples, for every seed the one of highest validation "
        "accuracy, ties to the larger ESS.",
        "FedPALS, lambda=1000 is the paper's setting for 100 clients. There its weights are nearly "
        "FedAvg's: on CIFAR-10 the ESS is 91 % of the cohort's examples at C = 2, 96 % at C = 3. "
        "Hence FedPALS by ESS beside it.",
        "FedPALS, to the mix so far is not in the paper: so_far = true, by ESS as FedPALS.",
        "Of M clients one is the target, as in Table 1; a tenth of M is drawn per round where "
        "M > 10. M = 10, 50 and 100 are drawn at C = 3 (chosen).",
        "Hyper-parameters of FedProx are not tuned here unless --tune is given.",
    )
    rows = (FEDPALS, pals(1000.0), SO_FAR, *BASELINES[:2])
    title = "A hundred clients over the number of labels per client, C"
    return Study("fedpals/fig8a", title, rows, columns, ROUNDS, chosen, plot="values")


def _fig8b() -> Study:
    shift = {"kind": "sparsity", "labels_per_client": 3}

    def epochs(data: str, e: int, extra: bool = False) -> Column:
        training = {"epochs": e}
        return ten_clients(
            data, f"E={e}", shift, rounds=ROUNDS // e, training=training, extra=extra
        )

    columns = (*(epochs(CIFAR, e) for e in (1, 5, 10, 20, 40)),
               *(epochs(MINI, e, extra=True) for e in (1, 5)))  # fmt: skip
    chosen = (
        *GENERAL,
        TUNING[0],
        *SPARSE,
        SWEEP[0],
        "Hyper-parameters of FedProx are not tuned here unless --tune is given.",
        "150/E rounds, rounded down. C = 3 is chosen.",
    )
    rows = (FEDPALS, *BASELINES[:3])
    title = "CIFAR-10 over the number of local epochs, E"
    return Study("fedpals/fig8b", title, rows, columns, ROUNDS, chosen, plot="values")


def _fig9() -> Study:
    return Study(
        "fedpals/fig9",
        "Two clients, and a target that leaves what they can mix",
        (pals(0.0, "FedPALS"), FEDAVG),
        tuple(gaussians(d / 10) for d in range(11)),
        300,
        (
            GENERAL[0],
            "T_delta = (1 - delta) [1/2, 1/4, 1/4] + delta [0, 1/2, 1/2], delta in steps of 0.1.",
            "Logistic regression, as the paper says (its notebook fits a small network); learning "
            "rate 0.01, batch 32, 10 local epochs and 300 rounds from the notebook; accuracy after "
            "the last round, for there is no validation set.",
            "Bands are one standard deviation of the runs on either side, as in the paper.",
        ),
        metric=Metric(stop="final"),
        plot="projection",
    )


def studies() -> dict[str, Study]:
    """Every table and figure by name: "fedpals/table1" and so on."""
    made = (
        _table1(), _corrected(), _table2(), _table3(), _table4(), _fig2(), _fig3a(), _fig3b(),
        _fig5(), _fig6(), _fig7(), _fig8a(), _fig8b(), _fig9(),
    )  # fmt: skip
    return {study.name: study for study in made}
