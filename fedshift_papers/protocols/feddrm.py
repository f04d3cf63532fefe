"""FedDRM: protocols of its tables and figures, and what it printed.

Wang et al. 2026 (FedDRM), "Beyond aggregation: guiding clients in heterogeneous federated
learning", ICLR, arXiv 2509.23049. "Authors' code" is their repository; where it runs something
else than a baseline's publication, the rows use the recipes `..._drm_repo`, since those are what
can give the printed numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fedshift_papers.datasets.retina import ratios_text
from fedshift_papers.protocols.routing import (
    DIRICHLET,
    EIGHT_LOOKS,
    Tables,
    cosine_sgd,
    drm,
    small_columns,
    tuned_row,
)
from fedshift_papers.protocols.study import Column, Metric, Row, Study, printed

ROUNDS = 800
SYSTEM = Metric("system accuracy, %", "system_accuracy", digits=2, stop="last", last=50)
AVERAGE = Metric("average accuracy, %", "average_accuracy", digits=2, stop="last", last=50)
BOTH = {"system": "system_accuracy", "average": "average_accuracy"}
# What the paper's tables have in common: system accuracy, rows compared with fine-tuned FedAvg.
Table = partial(Study, metric=SYSTEM, baseline="FedAvgFT")
NAMES = {"cifar-10": "CIFAR-10", "cifar-20": "CIFAR-20", "cifar-100": "CIFAR-100"}

# --------------------------------------------------------------------------- methods


FEDDRM = drm(0.8)
AVGFT = tuned_row("FedAvgFT", "fedavgft", 100)
FEDAS = Row("FedAS", "fedas", "fedas_drm_repo")
ALL = (
    Row("Ditto", "ditto", "ditto_drm_repo"),
    Row("FedRep", "fedrep", "fedrep_drm_repo"),
    tuned_row("FedBABU", "fedbabu_drm_repo", 200),
    Row("FedPAC", "fedpac", "fedpac_drm_repo"),
    Row("FedALA", "fedala", "fedala_drm_repo"),
    FEDAS,
    Row("ConFREE", "confree", "confree_drm_repo"),
    AVGFT,
    tuned_row("FedProxFT", "fedproxft", 100, mu=0.01),
    tuned_row("FedSAMFT", "fedsamft", 100, rho=0.05),
    FEDDRM,
)

# --------------------------------------------------------------------------- what the paper leaves

AVERAGED = (
    "As in the paper, a cell is the mean over the last 50 rounds of one run, and its deviation "
    "that over these rounds, not over seeds; a shorter run is averaged over the same share of its "
    "rounds."
)
LAMBDA = "lambda = 0.8, the paper's best; the authors' code has 0.9."
ROUTING = (
    "System accuracy of FedDRM sends each query to the client of largest posterior, as the text "
    "says; the code divides by n_i / N first."
)
BASELINES = (
    "Baselines as the authors' code runs them, which is not always as published: docs/methods says "
    "how they differ."
)
POOL = (
    "Training and test images in one pool, dealt to the clients, 70 % of each for training.",
    "No random resized crop; the authors' code crops at random in training and in testing.",
    "The seed is 0; the authors' code has 2025.",
)
RESNET = (
    "ResNet-18 with group normalisation and projections to 256 with layer normalisation, Kaiming "
    "initialisation: from the authors' code."
)
PHASES = "The steps' division among phases: from the authors' code."
TABLES = (AVERAGED, LAMBDA, ROUTING, BASELINES, PHASES, *POOL)

# --------------------------------------------------------------------------- data sets and splits


def _clients(count: int = 8, **more: Any) -> dict[str, Any]:
    return EIGHT_LOOKS | {"clients": count} | more


def _column(name: str, split: str, shift: Mapping[str, Any], **more: Any) -> Column:
    model = more.pop("model", {"name": "resnet18-projected"})
    more = {"chosen": (RESNET,)} | more
    settings: Tables = {
        "data": {"name": name, "validation": 0.0, "test": 0.3},
        "shift": dict(shift),
        "model": model,
        "training": cosine_sgd(),
    }
    return Column(name, NAMES[name], split, settings, ROUNDS, seeds=1, **more)


def _dirichlet(name: str, alpha: float) -> Column:
    # As many examples as there are labels by which images are dealt: CIFAR-20 has 20 classes, but
    # is dealt by CIFAR-100's fine labels.
    least = 10 if name == "cifar-10" else 100
    return _column(
        name, f"Dir={alpha:g}", _clients(**DIRICHLET | {"beta": alpha, "min_size": least})
    )


def _on_cifar_10(split: str, clients: int = 8, **shift: Any) -> Column:
    """CIFAR-10 dealt by Dir(0.3) as in Table 1, with another number of clients or other looks."""
    return _column("cifar-10", split, _clients(clients, **DIRICHLET | shift))


def _shards(name: str, per_client: int) -> Column:
    return _column(name, f"SPC={per_client}", _clients(kind="shards", shards_per_client=per_client))


def split_of(partition: str) -> str:
    """The split as columns name it: "Dir=0.3" for the paper's "Dir-0.3", "SPC=5" for "5-SPC"."""
    rule, _, value = partition.partition("-")
    return f"Dir={value}" if rule == "Dir" else f"SPC={rule}"


# --------------------------------------------------------------------------- tables and figures


def _table(number: int, metric: Metric) -> Study:
    what = "a query sent to the pooled test set" if number == 1 else "each client's own queries"
    shards = {"cifar-10": 5, "cifar-20": 25, "cifar-100": 25}
    return Table(
        f"feddrm/table{number}",
        f"{metric.name.partition(',')[0].capitalize()}: {what}",
        ALL,
        tuple(c for name, s in shards.items() for c in (_dirichlet(name, 0.3), _shards(name, s))),
        ROUNDS,
        TABLES,
        metric=metric,
        printed=printed(
            f"feddrm_table{number}",
            lambda r: (r["dataset"], split_of(r["partition"]), r["method"]),
        ),
    )


def both(*rows: Row) -> tuple[Row, ...]:
    """Each row twice: one shows system accuracy, the other average accuracy of the same runs."""
    return tuple(
        replace(r, label=f"{r.label}, {name}", reads=reads, against=f"FedAvgFT, {name}")
        for name, reads in BOTH.items()
        for r in rows
    )


def label_of(row: Mapping[str, str]) -> str:
    """The row's label for a printed cell, in tables whose rows come from `both`."""
    return f"{row['method']}, {row['metric'].partition('_')[0]}"


def _table3() -> Study:
    columns = tuple(_on_cifar_10(f"M={m}", m, transform="wide") for m in (8, 16, 24, 32))
    return Table(
        "feddrm/table3",
        "Number of clients, CIFAR-10",
        both(FEDAS, AVGFT, FEDDRM),
        columns,
        ROUNDS,
        (*TABLES, "Client i has entry i of the 54 looks, two bits kept where it posterises."),
        printed=printed(
            "feddrm_table3", lambda r: ("CIFAR-10", f"M={r['num_clients']}", label_of(r))
        ),
    )


def _table4() -> Study:
    return Table(
        "feddrm/table4",
        "Strength of label shift, CIFAR-10",
        both(*ALL),
        tuple(_dirichlet("cifar-10", a) for a in (0.3, 1.3, 2.3)),
        ROUNDS,
        TABLES,
        printed=printed(
            "feddrm_table4", lambda r: ("CIFAR-10", f"Dir={r['dir_alpha']}", label_of(r))
        ),
    )


def _fig4() -> Study:
    rows = tuple(
        drm(lam, f"lambda={lam:g}, {name}", reads)
        for lam in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
        for name, reads in (*BOTH.items(), ("client", "router_accuracy"))
    )
    chosen = (
        AVERAGED, ROUTING, *POOL,
        "The values of lambda are chosen; the figure's numbers are not printed.",
    )  # fmt: skip
    columns = (_dirichlet("cifar-10", 0.3),)
    title = "Weight lambda of the class loss"
    return Table("feddrm/fig4", title, rows, columns, ROUNDS, chosen, baseline="")


def _fig5() -> Study:
    columns = tuple(_on_cifar_10(f"shift={s}", intensity=s) for s in ("low", "mid", "high"))
    title = "Strength of the feature shift"
    rows = (*both(FEDAS, AVGFT, FEDDRM), drm(0.8, "FedDRM, client", "router_accuracy"))
    chosen = (*TABLES, "Client accuracy is FedDRM's alone: the other methods have no router.")
    return Table("feddrm/fig5", title, rows, columns, ROUNDS, chosen)


def _fig6() -> Study:
    columns = tuple(
        _column(
            "cifar-10", f"shared={name}", _clients(**DIRICHLET),
            model={"name": "lenet-gn", "branches": name}, chosen=(),
        )
        for name in ("deep", "mid", "shallow", "none")
    )  # fmt: skip
    title = "How much the two branches share, LeNet"
    rows = tuple(replace(row, against="-") for row in both(FEDDRM))
    chosen = (
        AVERAGED, LAMBDA, ROUTING, *POOL,
        "LeNet with group normalisation, torch's first weights: from the authors' code.",
    )  # fmt: skip
    return Table("feddrm/fig6", title, rows, columns, ROUNDS, chosen, baseline="")


def _body_drift() -> Study:
    """Gradients over the shared body: our addition to Figure 3, which has those of the heads."""
    rows = tuple(
        Row(f"{name} loss", "feddrm", "feddrm", {"lam": 0.8}, reads=f"drift_{name.lower()}")
        for name in ("Class", "Client")
    )
    chosen = (
        "Not in the paper, whose Figure 3 has the gradients of the heads (feddrm/fig3): here it is "
        "the drift over the shared body, sum_i w_i ||g_i - g||^2 of FedDRM's two losses at the "
        "models that clients serve after the last round.",
        LAMBDA,
        *POOL,
    )
    metric = Metric("gradient drift", "drift_client", 1.0, 5, stop="last", last=1)
    title = "How far clients' gradients are from their mean, over the shared body"
    columns = (_dirichlet("cifar-10", 0.3), *small_columns())
    return Table(
        "feddrm/fig3-body", title, rows, columns, ROUNDS, chosen, metric=metric, baseline=""
    )


def _fig7() -> Study:
    settings: Tables = {
        "data": {"name": "retina", "validation": 0.0, "test": 0.3},
        "shift": {"kind": "natural", "clients": 3, "target": "clients"},
        "model": {"name": "resnet18-projected"},
        "training": cosine_sgd(batch=32),
    }
    differs = "a ResNet-18 with projections to 256; the paper's network is not published"
    column = Column(
        "retina", "RETINA", "M=3", settings, 100, seeds=1, differs=differs, chosen=(RESNET,)
    )
    chosen = (
        "A cell is the mean over the last 50 of 100 rounds of one run, as the paper has it over "
        "the last 50 of its runs; its deviation is that over these rounds, not over seeds.",
        LAMBDA, ROUTING, BASELINES, PHASES,
        "Fine-tuning in the last 10 of 100 rounds, FedBABU's in 20.",
        "Each site's training and test images in one pool, 70 % for training.",
        "All sites have one preprocessing. The authors' code normalises each image with its own "
        "site's statistics, in testing, too, which tells a router what it is to find.",
        f"Class ratios: {ratios_text()}.",
        "Training loss: the mean of what clients' steps have seen, proximal terms included.",
    )  # fmt: skip
    return Table(
        "feddrm/fig7", "Glaucoma from three sources", both(*(shorten(row) for row in ALL)),
        (column,), 100, chosen,
        by_round=(Metric("training loss, nats", "train_loss", 1.0, 3),),
    )  # fmt: skip


def shorten(row: Row) -> Row:
    """The row with fine-tuning for a run of 100 rounds instead of 800.

    100 rounds of fine-tuning become 10, and 200 become 20.
    """
    tuned = {"tune_rounds": row.options["tune_rounds"] // 10} if row.scaled else {}
    return replace(row, options={**row.options, **tuned})


def studies() -> dict[str, Study]:
    """Every table and figure by name: "feddrm/table1" and so on."""
    made = (
        _table(1, SYSTEM), _table(2, AVERAGE), _table3(), _table4(), _body_drift(), _fig4(),
        _fig5(), _fig6(), _fig7(),
    )  # fmt: skip
    return {study.name: study for study in made}
