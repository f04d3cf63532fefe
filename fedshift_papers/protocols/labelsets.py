"""Private label sets: the protocol of the sweep, and three studies of ours.

Breitholtz, Listo Zec and Johansson 2025, "Federated learning with heterogeneous and private label
sets", arXiv 2508.18774. We know its abstract and a summary: data sets, 2 to 10 labels per client
drawn at random, FedAvg and FedProx, public and private, no tuning, MSE and pairwise, global test
accuracy; 2,000 examples per client and 10 seeds with bootstrap intervals at second hand. Everything
else is chosen, and no numbers of the paper are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedshift.shifts.label_sets import cyclic_sets
from fedshift_papers.protocols.label_graphs import algebraic_connectivity
from fedshift_papers.protocols.study import Column, Metric, Row, Study

FASHION, CIFAR, CIFAR_100 = "Fashion-MNIST", "CIFAR-10", "CIFAR-100"
ROUNDS, SEEDS = 150, 10
Tables = dict[str, dict[str, Any]]
ACCURACY = Metric(stop="final")

# --------------------------------------------------------------------------- methods

MODES = ("public", "private")
TUNES = {"none": "", "mse": " + MSE", "pairwise": " + pairwise"}
WORDS = {**TUNES, "kl": " + KL"}
FEDPROX = {"mu": (0.001, 0.01, 0.1, 1.0)}


def _row(mode: str, method: str, tune: str = "none", **more: Any) -> Row:
    """A row of FedAvg or FedProx in one mode; with tuning it is compared with the same without."""
    prox = method == "fedprox"
    name = f"{mode} {'FedProx' if prox else 'FedAvg'}"
    public = "public FedProx" if prox else "public FedAvg"
    against = name if tune != "none" else {"private": public}.get(mode, "public FedAvg")
    options = {"mode": mode, "tune": tune, **({"mu": 0.01} if prox else {}), **more}
    label = name + WORDS[tune] + (" over union" if more.get("tune_over") == "union" else "")
    grid = FEDPROX if prox else {}
    return Row(label, method, f"labelset_{method}", options, grid, against=against)


FEDAVG = tuple(_row(mode, "fedavg", tune) for mode in MODES for tune in TUNES)
ALL = (*FEDAVG, *(_row(mode, "fedprox", tune) for mode in MODES for tune in TUNES))
UNION = tuple(_row("private", "fedavg", tune, tune_over="union") for tune in ("mse", "pairwise"))
# Not in the paper. KL leaves the head's rows of absent labels as they are.
KL = _row("private", "fedavg", "kl", tune_part="all")

# --------------------------------------------------------------------------- what is chosen

NETWORK = (
    "Two convolutions of 6 and 16 (5 x 5), then 120 and 84 units; SGD with learning rate 0.1, "
    "batch 32, one local epoch, no momentum, no weight decay: as in the same authors' FedPALS code."
)
PROTOCOL = (
    "2,000 examples per client, labels drawn uniformly at random for each, 10 seeds and accuracy "
    "on the test set come from a description of the paper; the rest is ours.",
    "10 clients, all in every round. Label sets are drawn anew until every label has a client and "
    "enough examples.",
    "Tested after the last round, on test examples of the labels that some client holds, equally "
    "many of each.",
    NETWORK,
    "150 rounds, as there.",
)
TUNING = (
    "5,000 unlabeled examples on the server, which no client has, equally many of each label; 50 "
    "steps of Adam at 0.001 on 128 of them per round, on the head alone, from the aggregate.",
    "FedProx's mu by 2,000 labelled examples on the server, which no client has, with --tune.",
)
INTERVALS = (
    "Differences are paired by seed: private without tuning minus public; with tuning minus the "
    "same without; public FedProx minus public FedAvg.",
)

HALF = "Five of ten clients per round, so that labels can be absent from all of them."
OVER_UNION = "Over union: tuning with a softmax over the labels that the cohort holds (ours)."

# --------------------------------------------------------------------------- data sets and splits


def _column(title: str, split: str, shift: Mapping[str, Any], **more: Any) -> Column:
    training = {"batch": 32, "lr": 0.1, **more.pop("training", {})}
    settings: Tables = {
        "data": {"name": title.lower(), "validation": 0.0},
        "shift": {"kind": "label-sets", "clients": 10, "samples": 2000, "target": "union", **shift},
        "model": {"name": "lenet"},
        "training": training,
    }
    server = more.pop("server", {"unlabeled": 5000, "validation": 2000})
    settings |= {"server": server} if server else {}
    settings["data"] |= more.pop("data", {})
    return Column(
        title.lower(), title, split, settings, more.pop("rounds", ROUNDS),
        seeds=more.pop("seeds", SEEDS), **more,
    )  # fmt: skip


def _labels(title: str, labels: int, **more: Any) -> Column:
    return _column(title, f"C={labels}", {"labels_per_client": labels}, **more)


def _mini(split: str, training: Mapping[str, Any] = {}, **shift: Any) -> Column:
    """A column of the images that ship with the package, with a tenth of the examples."""
    return _column(
        "Fashion-MNIST-mini", split, {"samples": 200, **shift}, extra=True,
        server={"unlabeled": 500, "validation": 200}, training=training,
        differs="a tenth of the examples",
    )  # fmt: skip


# What the studies of this page have in common. No baseline: each row names its own in `against`.
Table = partial(Study, plot="lines", baseline="", interval="bootstrap", metric=ACCURACY)


def _sweep() -> Study:
    labels = (2, 3, 5, 7, 10)
    columns = (
        *(_labels(title, c) for title in (FASHION, CIFAR) for c in labels),
        *(_mini(f"C={c}", labels_per_client=c) for c in labels),
    )
    return Table(
        "labelsets/sweep",
        "Private and public label sets by labels per client",
        ALL,
        columns,
        ROUNDS,
        (*PROTOCOL, *TUNING, *INTERVALS),
    )


def _overlap() -> Study:
    def shift(common: int) -> dict[str, Any]:
        return {"clients": 3, "labels_per_client": 3, "common_labels": common}

    columns = (
        *(_column(t, f"common={c}", shift(c)) for t in (FASHION, CIFAR) for c in range(4)),
        *(_mini(f"common={c}", **shift(c)) for c in range(4)),
    )
    return Table(
        "labelsets/overlap",
        "Disjoint to full overlap at three labels per client",
        FEDAVG,
        columns,
        ROUNDS,
        (
            "3 clients of 3 labels, of which 0 to 3 are common to all and the others have one "
            "client each; all together 9, 7, 5 and 3 labels, over which the test set is. "
            "Accuracies of different overlap are of problems of different size: compare the rows.",
            *PROTOCOL[3:],
            TUNING[0],
            "The server's examples are of the labels that some client holds.",
            *INTERVALS,
        ),
    )


# Divisible by the number of label sets for most reaches, where each set then has equally many
# clients.
GRAPH_CLIENTS = 90


def _graph() -> Study:
    """Graphs of ten labels, from disjoint pairs and a ring to all pairs."""

    def split(reach: int) -> str:
        value = algebraic_connectivity(10, cyclic_sets(10, 2, reach))
        return f"connectivity={value:.3g}"

    def shift(reach: int, samples: int = 200) -> dict[str, Any]:
        return {
            "clients": GRAPH_CLIENTS, "labels_per_client": 2, "reach": reach, "samples": samples,
        }  # fmt: skip

    columns = (
        *(_column(t, split(r), shift(r)) for t in (FASHION, CIFAR) for r in range(6)),
        *(_mini(split(r), **shift(r, 20)) for r in (0, 1, 5)),
    )
    return Table(
        "labelsets/graph",
        "Overlap at fixed labels and two labels per client",
        FEDAVG,
        columns,
        ROUNDS,
        (
            "Ours: ten labels and 90 clients of two labels and 200 examples everywhere. Labels "
            "stand on a ring in random order, and a client holds two that are at most 1, 2, ... "
            "apart; for 0 they are disjoint pairs. All pairs that there are have equally many "
            "clients, or one more.",
            "Connectivity: the second smallest eigenvalue of the Laplacian of the graph of labels "
            "that share a client; 0 where it falls apart, 10 where all pairs share one.",
            *PROTOCOL[2:],
            TUNING[0],
            *INTERVALS,
        ),
    )


def _absent() -> Study:
    cohort = {"cohort": 5}
    columns = (
        *(_labels(title, c, training=cohort) for title in (FASHION, CIFAR) for c in (2, 3)),
        _mini("C=2", cohort, labels_per_client=2),
    )
    return Table(
        "labelsets/absent",
        "Half of the clients per round: labels that no client of a round holds",
        (*FEDAVG, *UNION, KL, *map(_outside, (*FEDAVG[4:], *UNION, KL))),
        columns,
        ROUNDS,
        (
            HALF,
            *PROTOCOL,
            TUNING[0],
            OVER_UNION,
            "KL: tuning on each client's labels alone, of the whole model (ours).",
            "Mass: mean probability of the absent labels after the last round's tuning, in %.",
            *INTERVALS,
        ),
    )


def _rounds() -> Study:
    """The runs of `_absent` with pairwise tuning, measured after every round."""
    absent = _absent()
    pairwise = (row for row in absent.rows if row.options["tune"] == "pairwise" and not row.reads)
    return Table(
        "labelsets/rounds",
        "Absent labels against the pairwise loss, round by round",
        tuple(replace(row, against="-") for row in pairwise),
        absent.columns,
        ROUNDS,
        (
            HALF,
            *PROTOCOL,
            TUNING[0],
            OVER_UNION,
            "Correlation: Pearson's, over all rounds of a run, between the number of labels that "
            "no client of the cohort holds and the loss of central tuning before its steps. None "
            "where either is the same in all rounds.",
        ),
        metric=Metric("correlation over rounds", "absent_loss_correlation", 1.0, 2, stop="final"),
        plot="absent",
    )


def _outside(row: Row) -> Row:
    """A further row on the same runs: the probability mass on absent labels."""
    return Row(
        f"{row.label}, mass", row.key, row.method, row.options, reads="sets_outside_after",
        against="-",
    )  # fmt: skip


# --------------------------------------------------------------------------- open questions

READS = {"global model": "global_accuracy", "own models": "average_accuracy"}
SERVED = Metric("accuracy, %", "global_accuracy", stop="last", last=1)
# The sentence below the table: does SCAFFOLD help if label sets are private?
AHEAD = (("private SCAFFOLD, global model", "private FedAvg, global model"),)


def open_rows(methods: Sequence[str] = ("FedAvg", "SCAFFOLD", "Ditto")) -> tuple[Row, ...]:
    """Rows of each method in both modes, for the global model and the clients' own.

    A private row is compared with the public row of its method, a public row with public FedAvg.
    """
    return tuple(
        Row(
            f"{mode} {method}, {reads}", method.lower(), f"labelset_{method.lower()}",
            {"mode": mode}, reads=key,
            against=f"public {method if mode == 'private' else 'FedAvg'}, {reads}",
        )
        for reads, key in READS.items()
        for method in methods
        # Ditto's global model is that of FedAvg, which has its row already.
        if (method, reads) != ("Ditto", "global model")
        for mode in MODES
    )  # fmt: skip


def _open() -> Study:
    def column(title: str, labels: int, **more: Any) -> Column:
        samples = more.pop("samples", 2500)
        shift = {"labels_per_client": labels, "samples": samples, "target": "clients"}
        return _column(title, f"C={labels}", shift, data={"test": 0.2}, server={}, **more)

    columns = (
        *(column(title, c) for title in (FASHION, CIFAR) for c in (2, 3, 5)),
        column("Fashion-MNIST-mini", 3, extra=True, samples=250, differs="250 examples per client"),
    )
    return Table(
        "labelsets/open",
        "SCAFFOLD and Ditto with private label sets",
        open_rows(),
        columns,
        ROUNDS,
        (
            "Not in the paper, which leaves both open.",
            "2,500 examples per client of training and test file together, of which each keeps 500 "
            "for testing. Global model: the server's, on all clients' test examples together; own "
            "models: each client's on its own, in private mode restricted to its labels.",
            PROTOCOL[1],
            *PROTOCOL[3:],
            "SCAFFOLD: option II; Ditto: lambda = 1; no tuning.",
            "Differences are paired by seed: private minus public of the same method; public minus "
            "public FedAvg.",
        ),
        metric=SERVED,
        compared=AHEAD,
    )


# --------------------------------------------------------------------------- what travels


def _scaling() -> Study:
    """Bytes of the messages of the last round, per client."""
    rows = [
        Row(
            f"{mode}, {way}", "fedavg", "labelset_fedavg", {"mode": mode}, reads=f"bytes_{way}",
            against=f"public, {way}",
        )
        for way in ("down", "up")
        for mode in MODES
    ]  # fmt: skip
    whole = Row(
        "whole model", "fedavg", "labelset_fedavg", {"mode": "public"}, reads="bytes_model",
        against="-",
    )  # fmt: skip
    columns = (
        *(_many(FASHION, m, 2) for m in (10, 30, 100, 300, 1000)),
        # Few users have CIFAR-100 at hand, so it is drawn only on request.
        *(_many(CIFAR_100, m, 10, extra=True) for m in (10, 30, 100, 300, 1000)),
        *(_many("Fashion-MNIST-mini", m, 2, 2000, extra=True) for m in (10, 100)),
    )
    # The number of bytes does not depend on the seed: one seed is enough, without an interval.
    return Table(
        "labelsets/scaling",
        "Bytes per client and round, 10 to 1,000 clients",
        (*rows, whole),
        columns,
        3,
        (
            "Bytes of the tensors of a message, counted on the messages of the last round, mean "
            "over the clients: the model or the client's part of it, the slots' numbers, the "
            "client's id and loss. All clients together: times the number of clients.",
            "20,000 examples shared evenly; 2 labels per client on Fashion-MNIST, 10 on CIFAR-100, "
            "whose classifier is a larger part of the model. 3 rounds, for messages do not grow.",
            NETWORK,
        ),
        metric=Metric("kB per client and round", "bytes_up", 1e-3, 2, stop="final"),
        interval="t",
    )  # fmt: skip


def _many(title: str, clients: int, labels: int, pool: int = 20_000, **more: Any) -> Column:
    shift = {"clients": clients, "labels_per_client": labels, "samples": pool // clients}
    more = {"rounds": 3, "seeds": 1, **more}
    return _column(title, f"M={clients}", shift, server={}, **more)


def _clients() -> Study:
    """Accuracy and bytes when the same examples are shared among more and more clients."""
    sent = Metric("kB per client and round, both ways", "bytes_both", 1e-3, 2, stop="final")
    plain = [row for row in FEDAVG if row.options["tune"] == "none"]
    rows = (
        *plain,
        *(replace(row, label=f"{row.label}, bytes", shows=sent, against=against)
          for row, against in zip(plain, ("-", "public FedAvg, bytes"), strict=True)),
    )  # fmt: skip
    whole = {"rounds": ROUNDS, "seeds": SEEDS}
    columns = (
        *(_many(t, m, 2, **whole) for t in (FASHION, CIFAR) for m in (10, 100, 1000)),
        *(_many("Fashion-MNIST-mini", m, 2, 2000, extra=True, **whole) for m in (10, 100)),
    )
    return Table(
        "labelsets/clients",
        "Accuracy and bytes at 10, 100 and 1,000 clients",
        rows,
        columns,
        ROUNDS,
        (
            "20,000 examples shared evenly, 2 labels per client; all clients in every round. With "
            "1,000 clients each has 20 examples, which are one step of its local epoch.",
            "Bytes: tensors of the last round's messages down and up, mean over the clients. All "
            "clients together: times their number.",
            *PROTOCOL[2:],
            "Differences are paired by seed: private minus public.",
        ),
        log_axes=("M",),
    )


def studies() -> dict[str, Study]:
    """All studies of this file by name."""
    all_ = (
        _sweep(), _overlap(), _graph(), _absent(), _rounds(), _open(), _scaling(), _clients(),
    )  # fmt: skip
    return {s.name: s for s in all_}
