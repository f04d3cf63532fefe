"""Pictures of clients' data: how their images look, and which labels they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import datasets
from fedshift.errors import InputError
from fedshift.experiments.config.load import validate
from fedshift.experiments.config.schema import Config
from fedshift.experiments.task.client_tests import deal_to_clients, pool
from fedshift.experiments.task.feature_shift import dealing, look_name, looks
from fedshift.report.charts import HeatMap, Shades
from fedshift.report.svg import svg
from fedshift.seeds import numpy_generator
from fedshift.shifts.covariate import Transform
from fedshift_papers.pictures.picture import Panel, Shown
from fedshift_papers.pictures.sheets import sheet
from fedshift_papers.protocols.study import Column

SHARES = Shades("share of row, %:", "none")


def as_images(x: Tensor) -> Tensor:
    """Stored images as numbers in [0, 1]. Raises InputError for data that are not images."""
    if x.dim() != 4 or x.dtype != torch.uint8:
        raise InputError(f"a picture needs images in bytes; given {x.dtype} {tuple(x.shape)}")
    return x.float() / 255


def one_of_each(
    y: Tensor, classes: int, among: NDArray[np.int64] | None = None
) -> list[int | None]:
    """The first row of each class, of all rows or of `among`; None for a class without a row."""
    rows = np.arange(len(y)) if among is None else among
    labels = y.numpy()[rows]
    first = (np.flatnonzero(labels == c) for c in range(classes))
    return [int(rows[hits[0]]) if len(hits) else None for hits in first]


def through(looks_by_name: Mapping[str, Transform], images: Tensor) -> Tensor:
    """The same images [n, ...] as each look changes them: [L, n, ...]."""
    return torch.stack([look(images) for look in looks_by_name.values()])


def look_panel(title: str, name: str, by_name: Mapping[str, Transform], seed: int) -> Panel:
    """One image of each class of a data set (ten at most), a row for each look."""
    data = pool(datasets.load(name), None, seed)
    rows = [r for r in one_of_each(data.train.y, len(data.classes)) if r is not None][:10]
    names = [data.classes[int(data.train.y[r])] for r in rows]
    tiles = through(by_name, as_images(data.train.x[rows]))
    return Panel(sheet(title, tuple(by_name), names, tiles), title)


def grid_panel(
    title: str, name: str, looks_of: Sequence[Transform], across: int, seed: int
) -> Panel:
    """One image of a data set through all looks, `across` of them in each row."""
    data = pool(datasets.load(name), None, seed)
    image = as_images(data.train.x[:1])
    tiles = torch.stack([look(image)[0] for look in looks_of])
    grid = tiles.reshape(-1, across, *tiles.shape[1:])
    rows = [f"{i * across}: {look_name(looks_of[i * across])}" for i in range(len(grid))]
    return Panel(sheet(title, rows, [f"+{j}" for j in range(across)], grid), title)


def config_of_column(column: Column, dataset: str, seed: int) -> Config:
    """The experiment of a table's column, on its own or on another data set.

    On another one clients have no looks: those of the column are made for its own images.
    """
    tables: dict[str, Any] = {k: dict(column.settings[k]) for k in ("data", "shift", "model")}
    if dataset != column.dataset:
        tables["data"]["name"] = dataset
        tables["shift"].pop("transform", None)
    return validate({**tables, "seeds": {"run": seed}}, origin=column.heading)


def partition_panel(column: Column, dataset: str, seed: int) -> Panel:
    """A map of label counts by client, split as in the table's runs.

    Training and test examples are counted together, since the split is made before they are
    divided.
    """
    config = config_of_column(column, dataset, seed)
    dealt = deal_to_clients(config.data, config.shift, config.seeds.resolved().split)
    y, classes = dealt.data.train.y.numpy(), dealt.data.classes
    rows = [np.concatenate(pair) for pair in zip(dealt.parts, dealt.tests, strict=True)]
    counts = np.stack([np.bincount(y[r], minlength=len(classes)) for r in rows])
    title = f"Labels by client: {dataset} {column.split}, {len(y):,} examples"
    return Panel(svg(label_map(title, counts, classes)), title)


def label_map(title: str, counts: NDArray[np.int64], classes: Sequence[str]) -> HeatMap:
    """Label counts [M, K] as shares of each client's examples, with the counts as notes."""
    sizes = counts.sum(1)
    names = tuple(f"client {i}: {n:,}" for i, n in enumerate(sizes))
    shares = counts / np.maximum(sizes, 1)[:, None]
    notes = tuple(
        tuple(f"client {i}, {c}: {n:,}" for c, n in zip(classes, row, strict=True))
        for i, row in enumerate(counts)
    )
    values = tuple(tuple(map(float, row)) for row in shares)
    return HeatMap(title, names, tuple(classes), values, notes, SHARES)


def client_panel(
    title: str, column: Column, dataset: str, clients: Sequence[int], seed: int
) -> Panel:
    """One image of each class for some clients of a column, from their own examples.

    Images are shown with the client's noise or look.
    """
    config = config_of_column(column, dataset, seed)
    data, split = datasets.load(dataset), config.shift
    key, everyone = config.seeds.resolved().split, np.arange(len(data.train.y))
    deal = dealing(split, dataset, key, everyone)
    rng = numpy_generator(key, "split")
    parts = deal(data.train.y.numpy(), len(data.classes), split.clients, rng)
    changes, rows = looks(split, split.clients, key), []
    for i in clients:
        chosen = one_of_each(data.train.y, len(data.classes), parts[i])
        images = [_image(data.train.x, row, changes[i]) for row in chosen]
        rows.append(torch.stack(images))
    names = [f"client {i + 1}: {look_name(changes[i])}" for i in clients]
    return Panel(sheet(title, names, data.classes, torch.stack(rows)), title)


def _image(x: Tensor, row: int | None, look: Transform) -> Tensor:
    """The image of a row through a look; a white tile for no row."""
    if row is None:
        return torch.ones_like(as_images(x[:1])[0])
    return look(as_images(x[row : row + 1]))[0]


def shown(*panels: Panel) -> Shown:
    """A figure of these panels, in files "picture-1.svg", "picture-2.svg", ..."""
    return Shown({f"picture-{i}.svg": panel for i, panel in enumerate(panels, 1)})
