"""When central tuning pays: its losses round by round, and variants of KL. Not in the paper."""

from __future__ import annotations

from typing import Any

from fedshift_papers.protocols.labelsets import ACCURACY, CIFAR, FASHION, MODES, NETWORK, Table
from fedshift_papers.protocols.study import Column, Row, Study

MINI = "Fashion-MNIST-mini"
KL: dict[str, Any] = {"tune": "kl", "tune_part": "all"}
# The rows of `labelsets/tuning`: how their labels end, after the mode and "FedAvg", and options.
TUNES: dict[str, dict[str, Any]] = {
    "": {"tune": "none"},
    " + MSE": {"tune": "mse"},
    " + pairwise": {"tune": "pairwise"},
    " + KL": KL,
    " + KL in 3 rounds": {**KL, "tune_rounds": 3},
}
# Variants of KL tuning, each of which changes one thing.
VARIANTS: dict[str, dict[str, Any]] = {
    " of the head": {"tune_part": "head"},
    " with kept moments": {"tune_moments": "kept"},
    " by confidence": {"tune_weights": "confidence"},
    " at a fitted temperature": {"tune_temperature": "fitted"},
    " until held-out inputs say so": {"tune_stop": "held-out", "tune_steps": 500},
    " of 500 steps": {"tune_steps": 500},
}
CHOSEN = (
    "Not in the paper.",
    "Fashion-MNIST-mini: 10 clients of 300 examples, 784-100-10 units; 1,000 unlabeled examples on "
    "the server, and 500 labelled ones, on which nothing here is chosen.",
    "All clients in every round; SGD with learning rate 0.1, batch 32; E local epochs.",
    "50 steps of Adam at 0.001 on 128 inputs per round, from the aggregate. MSE and pairwise tune "
    "the head, as in labelsets/sweep, KL the whole model.",
    "Tested after every round, on test examples of the labels that some client holds, equally many "
    "of each. The table has the last round.",
)


def _row(mode: str, end: str, against: str, **options: Any) -> Row:
    return Row(
        f"{mode} FedAvg{end}", "fedavg", "labelset_fedavg", {"mode": mode, **options},
        against=against,
    )  # fmt: skip


def _rows(mode: str) -> list[Row]:
    """The rows of one mode; each tuned row is compared with the row without tuning."""
    public = "public FedAvg" if mode == "private" else "-"
    return [
        _row(mode, end, f"{mode} FedAvg" if end else public, **options)
        for end, options in TUNES.items()
    ]


def _column(title: str, labels: int, epochs: int, rounds: int, seeds: int) -> Column:
    mini = title == MINI
    settings: dict[str, dict[str, Any]] = {
        "data": {"name": title.lower(), "validation": 0.0},
        "shift": {
            "kind": "label-sets", "clients": 10, "samples": 300 if mini else 2000,
            "labels_per_client": labels, "target": "union",
        },
        "server": {"unlabeled": 1000, "validation": 500} if mini
        else {"unlabeled": 5000, "validation": 2000},
        "model": {"name": "mlp", "hidden": (100,)} if mini else {"name": "lenet"},
        "training": {"batch": 32, "lr": 0.1, "epochs": epochs},
    }  # fmt: skip
    split = f"C={labels}-E={epochs}"
    return Column(title.lower(), title, split, settings, rounds, seeds=seeds)


def _tuning() -> Study:
    # One local epoch changes the model little in a round, so there the small setting takes 20.
    small = (_column(MINI, c, e, 20 if e == 1 else 10, 10) for c in (2, 3, 5) for e in (1, 10))
    # Ten local epochs take ten times as long, so there are few rounds: one more than KL is tuned
    # in.
    rounds = {1: 10, 10: 4}
    full = (
        _column(t, c, e, n, 3) for t in (FASHION, CIFAR) for c in (3, 5) for e, n in rounds.items()
    )
    return Table(
        "labelsets/tuning",
        "Central tuning by round: losses, local epochs and modes",
        tuple(row for mode in reversed(MODES) for row in _rows(mode)),
        (*small, *full),
        10,
        (
            *CHOSEN,
            "Fashion-MNIST and CIFAR-10: 2,000 examples per client, 5,000 unlabeled and 2,000 "
            f"labelled ones on the server. {NETWORK.partition(';')[0]}.",
            "Four rounds of ten local epochs there, and ten of one.",
            "KL in 3 rounds: tuning in the first three alone.",
            "Differences are paired by seed: tuned minus the same without; private minus public.",
        ),
        by_round=(ACCURACY,),
    )


def _variants() -> Study:
    kl = "private FedAvg + KL"
    rows = [
        _row("private", "", "-", tune="none"),
        _row("private", " + KL", "private FedAvg", **KL),
        *(_row("private", f" + KL{end}", kl, **{**KL, **new}) for end, new in VARIANTS.items()),
        _row("public", "", "private FedAvg", tune="none"),
        _row("public", " + KL", kl, **KL),
    ]
    columns = (_column(MINI, c, e, 20 if e == 1 else 10, 10) for c in (2, 3, 5) for e in (1, 10))
    return Table(
        "labelsets/variants",
        "Central tuning by KL: what else was tried",
        tuple(rows),
        tuple(columns),
        10,
        (
            *CHOSEN[:4],
            "By confidence: on each input clients count by the probability of their likeliest "
            "label. Temperature: one for all clients, fitted in each round on the server's "
            "labelled examples by sums of the clients' losses on labels that they hold. Held-out: "
            "every fifth input; at most 500 steps, which end where the KL there no longer falls. "
            "Kept moments: Adam's, from round to round.",
            CHOSEN[4],
            "Differences are paired by seed: KL and public minus none, others minus KL as it is.",
        ),
        by_round=(ACCURACY,),
    )


def studies() -> dict[str, Study]:
    """Both by name."""
    return {s.name: s for s in (_tuning(), _variants())}
