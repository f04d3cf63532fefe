"""The figures of the papers that need no training runs, and the code that draws each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fedshift import datasets
from fedshift.experiments.task.feature_shift import look_name
from fedshift.report.charts import Axis, LineChart, Series
from fedshift.report.svg import svg
from fedshift.report.tables import Table
from fedshift.shifts.covariate import Pool, Transform, bit_pool, fashion_pool, wide_pool
from fedshift_papers.datasets import retina
from fedshift_papers.pictures import log_weights
from fedshift_papers.pictures.clients import (
    as_images,
    client_panel,
    config_of_column,
    grid_panel,
    look_panel,
    partition_panel,
    shown,
)
from fedshift_papers.pictures.federations import cameras, three_labels
from fedshift_papers.pictures.head_gradients import HEADS, Spread, embedded_clients, train
from fedshift_papers.pictures.picture import Figure, Panel, Shown
from fedshift_papers.pictures.sheets import sheet
from fedshift_papers.pictures.weights import BY_CLIENT, SIMPLEX, by_client, in_simplex
from fedshift_papers.protocols import feddrm, made
from fedshift_papers.protocols.routing import DIRICHLET, EIGHT_LOOKS
from fedshift_papers.protocols.study import Column

MINI = "fashion-mnist-mini"
ORDER = (
    "Figures 8 to 12 and 14 of the paper are pictures of looks and partitions; which of them has "
    "which number is ours."
)
SEED = "Images and partitions are those of seed 0 here; the authors' code has 2025."


def _by_name(pool: Pool) -> dict[str, Transform]:
    return {f"{i}: {look_name(look)}": look for i, look in enumerate(pool)}


# --------------------------------------------------------------------------- looks


def _eight_looks(dataset: str, seed: int, _: int) -> Shown:
    pool = fashion_pool() if dataset == MINI else bit_pool("high")
    title = f"Eight looks of {dataset}, one for each client"
    return shown(look_panel(title, dataset, _by_name(pool), seed))


def _three_strengths(dataset: str, seed: int, _: int) -> Shown:
    panels = (
        look_panel(f"Feature shift {s}: {dataset}", dataset, _by_name(bit_pool(s)), seed)
        for s in ("low", "mid", "high")
    )
    return shown(*panels)


def _wide_looks(dataset: str, seed: int, _: int) -> Shown:
    return shown(grid_panel(f"The 54 looks of {dataset}, from 0", dataset, wide_pool(), 9, seed))


# --------------------------------------------------------------------------- partitions


def _partitions(columns: Sequence[Column], dataset: str, seed: int, _: int) -> Shown:
    of_dataset = [c for c in columns if c.dataset == dataset]
    return shown(*(partition_panel(c, dataset, seed) for c in of_dataset or columns[:2]))


def _columns(*targets: str) -> tuple[Column, ...]:
    """The columns of some tables, each once."""
    studies = feddrm.studies()
    columns = {c.key: c for t in targets for c in studies[f"feddrm/{t}"].columns}
    return tuple(columns.values())


# --------------------------------------------------------------------------- RETINA


def ratio_table() -> Table:
    """Images of each site in its publisher's layout, and the ratio that the paper prints."""
    header = ("Site", "Glaucoma", "Normal", "Glaucoma / normal", "Normal / glaucoma", "Paper")
    rows = tuple(
        (r.site, r.glaucoma, r.normal, r.sick, 1 / r.sick, r.printed) for r in retina.ratios()
    )
    return Table(
        header, rows, ("", "d", "d", ".2f", ".2f", ".2f"), "Class ratios of RETINA's sites"
    )


RATIOS = (
    "The paper's ratios are of the tree that FedLGD made, whose numbers of images are not "
    "published: by none of the two ways of dividing do the publishers' layouts have all three.",
)


def _retina(dataset: str, seed: int, _: int) -> Shown:
    one = datasets.entry(dataset)
    place = datasets.find(dataset)
    assert one.at_sites is not None
    everyone, _rows = one.at_sites(place, seed, 0.3)
    rows, names = [], []
    for i, site in enumerate(everyone.sites):
        for label, name in enumerate(everyone.classes):
            hits = ((everyone.site == i) & (everyone.y == label)).nonzero().flatten()[:6]
            images = as_images(everyone.x[hits])
            blank = torch.ones(6 - len(images), *images.shape[1:])
            rows.append(torch.cat([images, blank]))
            names.append(f"{site}, {name}")
    title = "Optic discs of three sites"
    drawing = sheet(title, names, [""] * 6, torch.stack(rows))
    return Shown({"picture-1.svg": Panel(drawing, title)}, (ratio_table(),), RATIOS)


# --------------------------------------------------------------------------- gradients of heads


def _head_gradients(dataset: str, seed: int, rounds: int) -> Shown:
    data = datasets.load(dataset)
    limit = min(4000, len(data.train) + len(data.test))
    settings = {
        "data": {"name": dataset, "validation": 0.0, "test": 0.3, "limit": limit},
        "shift": {**EIGHT_LOOKS, **DIRICHLET, "clients": 3},
        "model": {"name": "lenet-gn"},
    }
    column = Column("cifar-10", "CIFAR-10", "Dir=0.3", settings, rounds, seeds=1)
    config = config_of_column(column, dataset, seed)
    clients, classes = embedded_clients(config.data, config.shift, config.seeds.resolved())
    spreads = train(clients, len(classes), rounds, seed)
    panels = {
        f"{name}.svg": _spread_panel(title, what, spreads)
        for name, title, what in (
            ("share", "Share of the gradients that clients do not have in common", "share"),
            ("drift", "Gradient drift of each head, sum_i w_i ||g_i - g||^2", "drift"),
            ("cosine", "Cosine between clients' gradients, mean over pairs", "cosine"),
        )
    }
    rows = tuple(
        (f"{head} head", t + 1, *spreads[head][t])
        for head in HEADS
        for t in sorted({0, rounds // 2, rounds - 1})
    )
    header = ("Head", "Round", "Drift", "Share", "Cosine")
    return Shown(panels, (Table(header, rows, ("", "d", ".4g", ".3f", "+.3f"), "By round"),))


def _spread_panel(title: str, what: str, spreads: dict[str, list[Spread]]) -> Panel:
    series = []
    for head, names in zip(
        HEADS, ("class head (alpha, beta)", "client head (gamma, xi)"), strict=True
    ):
        values = tuple(getattr(s, what) for s in spreads[head])
        series.append(Series(names, tuple(map(float, range(1, len(values) + 1))), values))
    axes = Axis("round"), Axis(what, log=what == "drift", zero=what == "share")
    return Panel(svg(LineChart(title, tuple(series), *axes)), title)


HEAD_NOTES = (
    "As in the paper: the gradients of the heads (alpha, beta) of the classes and (gamma, xi) of "
    "the clients, ten classes, three clients, a random embedding, FedAvg.",
    "Share: sum_i w_i ||g_i - g||^2 / sum_i w_i ||g_i||^2, 0 where all clients agree and 1 where "
    "their gradients cancel; w_i = n_i / N. Gradients are over all training examples of a client, "
    "at the heads that the server sends.",
    "Chosen: 4,000 images dealt by Dir(0.3), the first three looks; 128 features relu(W x), W "
    "fixed, scaled to norm 1; heads from zeros, 10 steps of SGD a round, batch 128, rate 0.5. "
    "Footnote 2 has none of these.",
    "feddrm/fig3-body has the drift of whole networks over the body that both losses share.",
)


def _noise(dataset: str, seed: int, _: int) -> Shown:
    column = next(c for c in made.studies()["made/table1"].columns if c.dataset == dataset)
    title = f"Digits of some clients: their own writers, and noise that grows: {dataset}"
    return shown(client_panel(title, column, dataset, (0, 9, 19, 29), seed))


REPORT = (
    "What Figure 1 of the report shows is not known to us. Here: what its feature shift does.",
    "Client i has noise of standard deviation 0.5 i / 30.",
)


# --------------------------------------------------------------------------- FedPALS' weights


def _three(_dataset: str, _seed: int, _rounds: int) -> Shown:
    return in_simplex(three_labels())


def _hundred_cameras(_dataset: str, _seed: int, _rounds: int) -> Shown:
    return by_client(cameras(100))


PATH_NOTE = (
    "The path of FedPALS goes from lambda = 0, the point of the clients' hull nearest to T, to "
    "FedAvg's mixture at lambda = infinity.",
)
CAMERAS = (
    "Clients are in the order of their size, the largest first.",
    "ESS of 25, 50 and 75 % are reached by the smallest lambda; the paper's lambdas of 600, 2500 "
    "and 5800 are stated to give these.",
)


def figures() -> dict[str, Figure]:
    """All figures that need no training runs, by name: "feddrm/fig8" and so on."""
    looks, one = (SEED, ORDER), ("cifar-10",)
    mini: dict[str, Any] = {"extra": (MINI,), "differs": {MINI: "not in the paper"}}
    ten = tuple(c for c in _columns("table1", "table4") if c.dataset == "cifar-10")
    finer = tuple(c for c in _columns("table1") if c.dataset != "cifar-10")
    all_ = (
        Figure("fedpals/fig1", SIMPLEX, (), _three, chosen=PATH_NOTE, of_counts=in_simplex),
        Figure(
            "fedpals/fig4", BY_CLIENT, ("iwildcam",), _hundred_cameras, chosen=CAMERAS,
            of_counts=by_client,
        ),
        Figure(
            "feddrm/fig3", "How far clients' gradients of the two heads are apart", one,
            _head_gradients, chosen=HEAD_NOTES, rounds=100, **mini,
        ),
        Figure("feddrm/fig8", "Looks: eight clients", one, _eight_looks, chosen=looks, **mini),
        Figure("feddrm/fig9", "Looks: low, mid and high", one, _three_strengths, chosen=looks),
        Figure("feddrm/fig10", "Looks: up to 54 clients", one, _wide_looks, chosen=looks),
        Figure(
            "feddrm/fig11", "Partitions of CIFAR-10 among 8 clients", one,
            partial(_partitions, ten), chosen=looks, **mini,
        ),
        Figure(
            "feddrm/fig12", "Partitions of CIFAR-20 and CIFAR-100 among 8 clients",
            ("cifar-20", "cifar-100"), partial(_partitions, finer), chosen=looks,
        ),
        Figure(
            "feddrm/fig14", "RETINA: three sites, and their class ratios", ("retina",), _retina,
            chosen=(ORDER,), without=Shown({}, (ratio_table(),), RATIOS),
        ),
        Figure(
            "made/fig1", "What clients of the feature shift hold", tuple(made.TITLES)[:2], _noise,
            extra=tuple(made.TITLES)[2:], differs=made.IN_PLACE, chosen=REPORT,
        ),
        Figure(
            "made/slope", log_weights.TITLE, (), log_weights.slopes, chosen=log_weights.CHOSEN,
            rounds=log_weights.DENSITY_ROUNDS,
        ),
    )  # fmt: skip
    return {figure.name: figure for figure in all_}
