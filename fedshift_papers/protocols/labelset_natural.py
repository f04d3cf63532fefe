"""Label sets that come with the data: islands' penguins, airlines' destinations, periods' storms.

This study is ours. The first open question of Breitholtz, Listo Zec and Johansson 2025, arXiv
2508.18774, asks for data whose clients have different label sets by nature.
"""

from __future__ import annotations

from typing import Any

from fedshift_papers.protocols.labelsets import AHEAD, MODES, SERVED, Table, open_rows
from fedshift_papers.protocols.study import Column, Row, Study

ROUNDS = 20
TUNES: dict[str, dict[str, Any]] = {
    "MSE": {"tune": "mse"},
    "pairwise": {"tune": "pairwise"},
    "KL in three rounds": {"tune": "kl", "tune_part": "all", "tune_rounds": 3},
}


def _tuned() -> tuple[Row, ...]:
    """Rows of FedAvg in both modes with each loss of central tuning, against no tuning."""
    return tuple(
        Row(
            f"{mode} FedAvg + {words}, global model", "fedavg", "labelset_fedavg",
            {"mode": mode, **options}, reads="global_accuracy",
            against=f"{mode} FedAvg, global model",
        )
        for mode in reversed(MODES)
        for words, options in TUNES.items()
    )  # fmt: skip


def _column(name: str, epochs: int, unlabeled: int, seeds: int, rounds: int = ROUNDS) -> Column:
    settings: dict[str, dict[str, Any]] = {
        "data": {"name": name, "target": "clients", "test": 0.2, "validation": 0.0},
        "server": {"unlabeled": unlabeled},
        "model": {"name": "mlp", "hidden": [100]},
        "training": {"batch": 32, "lr": 0.1, "epochs": epochs},
    }
    return Column(name, name.capitalize(), f"E={epochs}", settings, rounds, seeds=seeds)


def studies() -> dict[str, Study]:
    """The one study, by name."""
    study = Table(
        "labelsets/natural",
        "Label sets that come with the data",
        (*open_rows(("FedAvg", "FedProx", "SCAFFOLD", "Ditto")), *_tuned()),
        (
            _column("penguins", 1, 60, 20),
            _column("penguins", 10, 60, 20),
            _column("flights", 1, 1000, 5, rounds=10),
            _column("storms", 1, 1000, 5),
        ),
        ROUNDS,
        (
            "Not in the paper, whose label sets are drawn.",
            "Clients are 3 islands (1 or 2 of 3 species; two species share none), 11 airlines (1 "
            "to 19 of 30 destinations) and 13 periods (5 to 9 of 9 kinds of storm). A seed draws "
            "rows for the server and for testing, the first model and batches, and no label set.",
            "A fifth of each client's rows is for testing. Global model: the server's, on all "
            "clients' test rows together; own models: each client's on its own, in private mode "
            "restricted to its labels.",
            "All clients in every round; 100 hidden units, SGD with learning rate 0.1, batch 32. "
            "E: local epochs; of penguins one epoch is 2 to 4 steps, so 10 are tried as well.",
            "20 rounds; 10 of flights, whose rounds are 5,000 steps long.",
            "FedProx: mu = 0.01; SCAFFOLD: option II; Ditto: lambda = 1.",
            "Tuning: 60 unlabeled rows on the server, 1,000 of flights and storms, no client's; 50 "
            "steps of Adam at 0.001 per round, on 128 rows or all, from the aggregate. MSE and "
            "pairwise: the head alone, in all rounds. KL: the whole model, in rounds 1 to 3.",
            "Differences are paired by seed: private minus public of the same method; public minus "
            "public FedAvg; with tuning minus the same without.",
            "Whether private SCAFFOLD is ahead of private FedAvg where label sets are drawn: "
            "labelsets/open.",
        ),
        metric=SERVED,
        plot="rows",
        compared=AHEAD,
    )
    return {study.name: study}
