"""Cut a task's rows, fit the encoding on the training rows, and make the federation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedshift import data as core
from fedshift.data import Examples, client_data
from fedshift.datasets.base import Dataset, Samples, content_sha256
from fedshift.errors import InputError, shown
from fedshift.seeds import numpy_generator
from fedshift.shifts.target import resample_to
from fedshift.sketch import sketched
from fedshift.tasks.columns import fit_columns
from fedshift.tasks.cutting import Cut, cut_rows
from fedshift.tasks.encoding import Column, Encoding, codes_in
from fedshift.tasks.fields import TaskFields
from fedshift.tasks.layout import Layout, Part, part_of, scaled
from fedshift.tasks.names import Coded, Ints, listed, many
from fedshift.tasks.rows import Columns
from fedshift.tasks.tensors import Tensors, is_images
from fedshift.tasks.transforms import Transformed

# Numbers to predict that are larger than this on average get a note.
LARGE = 10
# Columns of an array whose deviations differ by this factor get a note.
SCALES = 100


@sketched
@dataclass(frozen=True, eq=False)
class Built:
    """A task that is ready to be trained on.

    task      clients, validation, target T and test examples (`fedshift.data.Task`)
    encoding  how raw rows became x; a model needs it to predict
    data      the clients' rows and the test rows, from which an oracle draws
    pool      rows of `data.train` that are not held out
    digest    SHA-256 of contents and cut: equal for equal tasks
    augment   the random change of training batches, None for none
    notes     sentences for the user: rows without a label, columns left out, ...
    """

    task: core.Task
    encoding: Encoding
    data: Dataset
    pool: Ints
    digest: str
    notes: tuple[str, ...]
    clients: tuple[str, ...]
    target: str
    augment: Transformed | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as the network gets it; with several inputs, of the first."""
        layout = self.encoding.layout
        return layout.inputs[0].shape if layout else tuple(self.task.clients[0].x.shape[1:])


def built(task: TaskFields, seed: int) -> Built:
    """The federation of a task: rows cut by `seed`, the encoding, T and test rows.

    The encoding is fitted on training rows only. Raises InputError if the target has labels that no
    test row has.
    """
    cut = cut_rows(task, seed)
    labels = _labels(task, cut)
    T, tests = _tested(task, cut, labels, seed)
    encoding, columns = _encoding(task, cut, task.outputs or labels.names)
    # Of dates both the table and its encoding speak, by the same sentence.
    notes = tuple(dict.fromkeys((*task.notes, *_about_labels(task, cut, labels, T), *columns)))
    data = _dataset(task, encoding, labels, np.concatenate(cut.rows), tests)
    tested = [len(rows) for rows in tests] if task.target.kind == "clients" else []
    federation = _federation(task, data, encoding.pixels, cut, T, tested)
    digest = hashlib.sha256(data.sha256.encode() + T.tobytes())
    # The contents do not say where the rows of one client end and those of the next begin.
    for rows in (*cut.rows, *tests):
        digest.update(np.int64(len(rows)).tobytes())
    return Built(
        federation,
        encoding,
        data,
        np.arange(sum(map(len, cut.trains))),
        digest.hexdigest(),
        notes,
        task.clients,
        task.target.text,
        None if task.transform is None else Transformed(task.transform, encoding.layout),
    )


def _labels(task: TaskFields, cut: Cut) -> Coded:
    """The class of each row; in regression, its bin between quantiles of the training values."""
    if task.kind != "regression":
        return task.labels
    assert task.values is not None
    y = task.values[:, 0].double().numpy()
    # Where many values are equal, quantiles coincide: there are then fewer bins than asked for.
    edges = np.unique(np.quantile(y[np.concatenate(cut.trains)], np.linspace(0, 1, task.bins + 1)))
    inner = edges[1:-1]
    ends = ["-inf", *(f"{edge:.4g}" for edge in inner), "inf"]
    names = tuple(f"[{a}, {b})" for a, b in pairwise(ends))
    codes = np.searchsorted(inner, y, side="right")
    return Coded(np.where(task.labels.codes < 0, -1, codes), names)


def _tested(
    task: TaskFields, cut: Cut, labels: Coded, seed: int
) -> tuple[NDArray[np.float64], list[Ints]]:
    """(T [K], the test rows: a single set, or one for each client with target "clients")."""
    kind = task.target.kind
    if kind == "clients":
        return _shares(labels, np.concatenate(cut.tests)), cut.tests
    if not task.target.cuts:
        return _shares(labels, cut.target), [cut.target]
    among = np.concatenate(cut.tests)
    everyone = np.concatenate([*cut.rows, among])
    T = np.array(task.target.shares) if task.target.shares else _shares(labels, everyone)
    counts = labels.counts(among)
    for name, share, count in zip(labels.names, T, counts, strict=True):
        if share > 0 and not count:
            raise InputError(
                f'target: no row with the label "{shown(name)}" (share {share:.3g}) is left for '
                f"testing; give test= more than {task.test:g}, or a test set (x, y) as the target"
            )
    rows = resample_to(labels.codes[among], T, len(T), numpy_generator(seed, "test"))
    return T, [among[rows]]


def _shares(labels: Coded, rows: Ints) -> NDArray[np.float64]:
    counts = labels.counts(rows)
    if not counts.sum():
        raise InputError("no labelled row is left to test on; give more rows, or test= a share")
    return np.asarray(counts / counts.sum())


def _encoding(task: TaskFields, cut: Cut, classes: tuple[str, ...]) -> tuple[Encoding, list[str]]:
    inputs, values = task.inputs, task.values
    ahead = () if values is None else (part_of("target", values),)
    if isinstance(inputs, Columns):
        columns, notes = fit_columns(inputs, cut.trains, task.rules)
        notes += _about_others(task, cut, columns)
        width = sum(column.width for column in columns)
        layout = Layout((Part("x", (width,)), *ahead), targets=True) if ahead else None
        return Encoding(classes, task.kind, columns, None, False, layout, task.rules.missing), notes
    if inputs.form == "one" and not ahead:
        x = inputs.of["x"]
        pixels = x.dtype == torch.uint8
        notes = _about_scales(x, cut) if x.ndim == 2 else []
        return Encoding(classes, task.kind, (), tuple(x.shape[1:]), pixels), notes
    # A single tensor of bytes holds images in regression as well as in classification.
    pixels = inputs.form == "one" and inputs.of["x"].dtype == torch.uint8
    parts = tuple(
        part_of(name, scaled(v[:1])) if pixels else part_of(name, v, images=is_images(inputs, name))
        for name, v in inputs.of.items()
    )
    layout = Layout((*parts, *ahead), inputs.form, bool(ahead))
    return Encoding(classes, task.kind, pixels=pixels, layout=layout), []


def _dataset(
    task: TaskFields, encoding: Encoding, labels: Coded, order: Ints, tests: list[Ints]
) -> Dataset:
    """Training rows and test rows as they are stored; images stay bytes."""

    def samples(rows: Ints) -> Samples:
        if encoding.pixels and encoding.layout is None and isinstance(task.inputs, Tensors):
            x = task.inputs.of["x"][torch.from_numpy(rows)]
        else:
            x = encoding.encoded(task.inputs, rows)
            if task.values is not None:
                ahead = task.values[torch.from_numpy(rows)].reshape(len(rows), -1)
                x = torch.cat([x.reshape(len(rows), -1), ahead], dim=1)
        return Samples(x, torch.from_numpy(labels.codes[rows]).long())

    train, test = samples(order), samples(np.concatenate(tests))
    sha256 = content_sha256(train, test)
    return Dataset(task.name, train, test, labels.names, sha256, "yours", "yours")


def _federation(
    task: TaskFields,
    data: Dataset,
    pixels: bool,
    cut: Cut,
    T: NDArray[np.float64],
    tested: list[int],
) -> core.Task:
    """The federation; tested: how many test rows each client has, if it has a test set, or []."""

    def split(samples: Samples, sizes: list[int]) -> list[Examples]:
        # torch.split gives views: rows are stored in the order of their use, so that no client
        # needs a copy.
        x = scaled(samples.x) if pixels else samples.x
        pairs = zip(torch.split(x, sizes), torch.split(samples.y, sizes), strict=True)
        return [Examples(*pair) for pair in pairs]

    M = len(cut.trains)
    sets = split(data.train, [len(rows) for rows in cut.rows])
    return core.Task(
        clients=tuple(client_data(one.x, one.y, i) for i, one in enumerate(sets[:M])),
        validation=tuple(sets[M:]),
        target=torch.from_numpy(T),
        test=split(data.test, [len(data.test)])[0],
        target_validation=None,
        classes=data.classes,
        tests=tuple(split(data.test, tested)) if tested else (),
        kind=task.kind,
        outputs=task.outputs,
    )


def _about_labels(task: TaskFields, cut: Cut, labels: Coded, T: NDArray[np.float64]) -> list[str]:
    """Sentences on the target's labels, classes that no client has, and small clients."""
    notes = []
    at_clients = labels.counts(np.concatenate(cut.rows))
    alone = [n for n, t, c in zip(labels.names, T, at_clients, strict=True) if t > 0 and not c]
    if task.target.kind in ("client", "test set"):
        rows = many(len(cut.target), "row")
        what = "counts by bin" if task.kind == "regression" else "label counts"
        notes.append(
            f"T is the {what} of {task.target.text} ({rows}); its rows are for testing alone."
        )
    if alone:
        notes.append(
            f"At the target alone, at no client: {listed(alone)}; {T[at_clients == 0].sum():.1%} "
            "of its rows."
        )
    if task.target.kind in ("shares", "counts", "pooled"):
        notes.append(
            f"Each client keeps {task.test:.0%} of its rows for testing; of these, test rows are "
            "drawn so that their labels follow T."
        )
    if task.kind == "classification":
        notes += _about_clients(task, cut, labels)
        if unused := [name for name in labels.names if name not in labels.used]:
            notes.append(f"Classes that no row has: {listed(unused)}.")
    if task.kind == "regression" and task.values is not None:
        y = task.values[torch.from_numpy(np.concatenate(cut.trains))]
        if (size := float((y**2).mean().sqrt())) > LARGE:
            notes.append(
                f"The numbers to predict are about {size:.2g} in size, and so are the steps of "
                "training; if it diverges, divide them or lower the learning rate."
            )
    return notes


def _about_clients(task: TaskFields, cut: Cut, labels: Coded) -> list[str]:
    sizes = [len(a) + len(b) for a, b in zip(cut.trains, cut.validations, strict=True)]
    notes = []
    if tiny := [c for c, n in zip(task.clients, sizes, strict=True) if n < 2]:
        notes.append(f"Clients with less than 2 rows: {listed(tiny)}.")
    tables = np.stack([labels.counts(rows) for rows in cut.trains])
    only = [n for n, c in zip(labels.names, (tables > 0).sum(0), strict=True) if c == 1]
    if only and len(task.clients) > 1:
        notes.append(f"Labels of one client alone: {listed(only)}.")
    return notes


def _about_scales(x: Tensor, cut: Cut) -> list[str]:
    """A sentence if the columns' scales differ so much that training would suffer."""
    sd = x[torch.from_numpy(np.concatenate(cut.trains))].std(0, correction=0)
    sd = sd[sd > 0]
    if not len(sd) or float(sd.max() / sd.min()) < SCALES:
        return []
    return [
        f"The columns of x have deviations from {float(sd.min()):.3g} to {float(sd.max()):.3g}; "
        "arrays are taken as they are, from_frame standardises them."
    ]


def _about_others(task: TaskFields, cut: Cut, columns: tuple[Column, ...]) -> list[str]:
    """Sentences on categories of validation and test rows that training rows do not have."""
    notes = []
    assert isinstance(task.inputs, Columns)
    rows = np.concatenate([cut.target, *cut.tests, *cut.validations])
    for column in columns:
        given = task.inputs.of[column.name]
        at_target = (given.codes if isinstance(given, Coded) else given)[cut.target]
        lacks = at_target < 0 if isinstance(given, Coded) else np.isnan(at_target)
        if len(lacks) and lacks.all():
            what = "has no value in any row of the target"
            notes.append(f'Column "{shown(column.name)}" {what}, and counts as missing there.')
        elif column.categories is not None:
            codes = codes_in(given, column.categories)[rows]
            count = int((codes == len(column.categories)).sum())
            if count:
                notes.append(
                    f'Column "{shown(column.name)}": {count:,} values outside training are none of '
                    f'its categories there; they count as "other".'
                )
    return notes
