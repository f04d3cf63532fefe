"""`fedshift.Task`: your data as a federation, and the place where its model will be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from fedshift.arguments import called, check_path, check_whole
from fedshift.calls import called_as
from fedshift.datasets import load_table
from fedshift.errors import InputError, shown
from fedshift.real import is_whole
from fedshift.seeds import numpy_generator
from fedshift.shifts import Shift
from fedshift.tasks.building import Built, built
from fedshift.tasks.cutting import client_rows
from fedshift.tasks.fields import TaskFields
from fedshift.tasks.folders import rows_of_folder
from fedshift.tasks.making import Options, Rows, clients_with_labels, task_fields
from fedshift.tasks.names import Coded, coded, listed, many
from fedshift.tasks.rows import Columns
from fedshift.tasks.showing import html_of
from fedshift.tasks.sources import rows_of_datasets, rows_of_partition, tested
from fedshift.tasks.tables import (
    check_other_file,
    check_uses,
    labelled,
    names_in,
    of_frame,
    read_parquet,
    read_table,
    rows_of,
)
from fedshift.tasks.target import target_of
from fedshift.tasks.values import about_kinds

if TYPE_CHECKING:
    from fedshift.diagnosis import Diagnosis


class Task(TaskFields):
    """Clients with their examples, and a target; `build` cuts and encodes them.

    It is made by `from_arrays`, `from_csv`, `from_frame` and the like. `fedshift.fit` trains on it.

    clients  the names of the clients that train, in order
    classes  the names of the labels, in the order of the network's outputs
    """

    def __init__(self, *given: Any, **fields: Any) -> None:
        if given or not fields:
            raise InputError(
                "a task is made by fs.Task.from_arrays(x, y, client=..., target=...), from_csv, "
                "from_frame, from_folder or from_datasets"
            )
        super().__init__(**fields)

    @classmethod
    @called_as('fs.Task.from_arrays(x, y, client=hospital, target="north")')
    def from_arrays(
        cls, x: Any, y: Any, *, client: Any, target: Any, **options: Unpack[Options]
    ) -> Task:
        """Rows of arrays or tensors: x [n, ...], y [n] and the client of each row.

        x   an array or a tensor [n, ...], used unchanged; or several, as a tuple or a dict. Bytes
            [n, channels, height, width] are images, which are scaled to [-1, 1]. A list of
            sequences of unequal length is padded and gets a mask. A table (DataFrame, dict of
            columns) is encoded by column.
        y   numbers or text, one per row; see `Options` for regression and several labels per row
        target  a client's name; label shares or counts, as a dict by name or one per class;
            "pooled", "clients", or a labelled test set (x, y)

        Raises InputError for lengths that differ, and for any other target.

        >>> x, y = [[0.0], [1.0], [0.2], [0.9], [0.1]], ["no", "yes", "no", "yes", "no"]
        >>> task = fs.Task.from_arrays(x, y, client=["a", "a", "b", "b", "c"], target="c")
        >>> task.clients, task.classes
        (('a', 'b'), ('no', 'yes'))
        """
        notes = about_kinds(x) if hasattr(x, "iloc") else ()
        return cls(**task_fields(Rows(x, y, client, notes), target, options))

    @classmethod
    @called_as('fs.Task.from_frame(frame, client="hospital", label="outcome", target="north")')
    def from_frame(
        cls,
        frame: Any,
        *,
        client: str,
        label: str | Sequence[str],
        target: Any,
        columns: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Task:
        """Rows of a pandas DataFrame or a dict of columns, which are read as in `from_csv`.

        Objects with `to_pandas` work, too: a HuggingFace data set, a table of Arrow or Polars.

        >>> rows = {"age": [30, 45, 28, 61, 50], "ill": [0, 1, 0, 1, 1], "site": list("aabbc")}
        >>> fs.Task.from_frame(rows, client="site", label="ill", target="c").clients
        ('a', 'b')
        """
        client, label = str(client), str(label) if is_whole(label) else label
        columns, drop = names_in(columns), names_in(drop) or ()
        # With several label columns, True and False are read as numbers.
        labels = [label] if isinstance(label, str) else []
        names = options.get("categories", ())
        table, notes = of_frame(frame, (client, *labels, *names), (client, target))
        rows = rows_of(table, client, label, columns, drop, notes)
        return cls(**task_fields(rows, labelled(target, label, names), options))

    @classmethod
    @called_as(
        'fs.Task.from_csv("patients.csv", client="hospital", label="outcome", target="north")'
    )
    def from_csv(
        cls,
        path: str | Path,
        *,
        client: str,
        label: str | Sequence[str],
        target: Any,
        columns: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        separator: str | None = None,
        decimal: str | None = None,
        encoding: str | None = None,
        header: Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> Task:
        """Rows of a CSV file, one per example, with columns that name its client and its label.

        Numbers are standardised by the clients' pooled sums, and text becomes one-hot. Columns that
        do not vary, free text and row numbers are left out; `build().notes` lists them.

        label    a column; or several columns of 0 and 1, for kind="multilabel"
        target   as in `from_arrays`; a test set is a DataFrame or the name of a CSV file
        columns  the columns to learn from; by default all but those to `drop`
        separator, decimal, encoding, header (names of the columns)  by default found out from the
                 file

        >>> columns = {"client": "hospital", "label": "outcome"}
        >>> fs.Task.from_csv("patients.csv", **columns, target="north").clients
        ('coast', 'east', 'south', 'west')

        Raises DataError for a file that is no such table, and InputError for missing columns.
        """
        check_path("path", path)
        columns, drop = names_in(columns), names_in(drop) or ()
        labels = [label] if isinstance(label, str) else list(label)
        names = (client, *options.get("categories", ()))
        given: dict[str, Any] = {
            "separator": separator,
            "decimal": decimal,
            "encoding": encoding,
            "header": header,
        }

        def read(path: Path, wanted: Sequence[str]) -> tuple[Columns, list[str]]:
            aside = (client, target)
            return read_table(
                path, wanted, leave=drop, names=names, label=label, aside=aside, **given
            )

        check_uses(client, labels, columns, drop)
        check_other_file(path, target)
        wanted = (client, *labels, *(columns or ()), *drop)
        table, notes = read(Path(path), wanted)
        rows = rows_of(table, client, label, columns, (), notes)
        tested = labelled(target, label, names[1:], lambda path: read(path, labels)[0])
        options = {"name": Path(path).stem, **options}
        return cls(**task_fields(rows, tested, options))

    @classmethod
    @called_as(
        'fs.Task.from_parquet("patients.parquet", client="hospital", label="outcome", '
        'target="north")'
    )
    def from_parquet(
        cls,
        path: str | Path,
        *,
        client: str,
        label: str | Sequence[str],
        target: Any,
        columns: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Task:
        """Rows of a Parquet file (extra `parquet`), as in `from_csv`."""
        check_path("path", path)
        frame, options = read_parquet(Path(path)), {"name": Path(path).stem, **options}
        return cls.from_frame(
            frame, client=client, label=label, target=target, columns=columns, drop=drop, **options
        )

    @classmethod
    @called_as('fs.Task.from_folder("photos", target="north")')
    def from_folder(
        cls,
        path: str | Path,
        *,
        target: Any,
        size: int | tuple[int, int] | None = None,
        index: str | Path | None = None,
        **options: Unpack[Options],
    ) -> Task:
        """Colour images (JPEG, PNG; extra `vision`) in folders client/label/.

        size   pixels a side, or (height, width), to which all images are resized; without it all
               must have the same size
        index  a CSV file with columns path (from the folder), client and label, for other folders

        Raises DataError for a folder without such images, and for the first image of another size.
        """
        check_path("path", path)
        rows = rows_of_folder(Path(path), size, index)
        options = {"name": Path(path).name, **options}
        return cls(**task_fields(rows, target, options))

    @classmethod
    @called_as('fs.Task.from_datasets({"north": one, "south": two}, target="north")')
    def from_datasets(
        cls,
        datasets: Mapping[str, Any],
        *,
        target: Any,
        x: str | Sequence[str] | None = None,
        y: str | None = None,
        **options: Unpack[Options],
    ) -> Task:
        """A data set for each client, by name: of torch, HuggingFace or Flower, or a pair (x, y).

        Rows are pairs (x, y) or dicts. For dicts, x and y name the input (or inputs) and the label,
        unless the usual names are clear. All rows are read once. Labels have the names that the
        data set gives them. A data set as target is a test set.

        >>> import torch
        >>> pair = torch.utils.data.TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
        >>> fs.Task.from_datasets({"a": pair, "b": pair, "c": pair}, target="c").clients
        ('a', 'b')
        """
        goal = tested(target, x, y)
        return cls(**task_fields(rows_of_datasets(datasets, x, y), goal, options))

    @classmethod
    @called_as('fs.Task.from_partition(dataset, indices, target="0")')
    def from_partition(
        cls,
        dataset: Any,
        indices: Any,
        *,
        target: Any,
        x: str | Sequence[str] | None = None,
        y: str | None = None,
        **options: Unpack[Options],
    ) -> Task:
        """One data set (see `from_datasets`) and the row numbers of each client.

        indices  lists of row numbers by client's name, or in order: clients are then "0", "1", ...

        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.tensor([0, 1] * 3))
        >>> fs.Task.from_partition(data, {"a": [0, 1], "b": [2, 3, 4, 5]}, target="b").clients
        ('a',)

        Raises InputError for a row that does not exist, or that two clients have.
        """
        goal = tested(target, x, y)
        return cls(**task_fields(rows_of_partition(dataset, indices, x, y), goal, options))

    @classmethod
    @called_as('fs.Task.from_split(x, y, shift, clients=10, target="pooled")')
    def from_split(
        cls,
        x: Any,
        y: Any,
        shift: Shift,
        *,
        clients: int,
        target: Any,
        **options: Unpack[Options],
    ) -> Task:
        """Rows that a shift of `fedshift.shifts` deals to clients "0", "1", ... by their labels.

        For a target that is drawn like the clients, deal one client more: clients=11, target="10".

        >>> from fedshift.shifts import Sparsity
        >>> y = [0, 1, 2, 3] * 30
        >>> x, two = [[v] for v in y], Sparsity(2)
        >>> fs.Task.from_split(x, y, two, clients=3, target="pooled").clients
        ('0', '1', '2')
        """
        if not callable(shift):
            raise InputError(f"shift is {called(shift)}; give one of fedshift.shifts")
        if isinstance(shift, type):
            raise InputError(
                f"shift is {called(shift)}; give an object of it, {shift.__name__}(...)"
            )
        check_whole("clients", clients, 1)
        kind = options.get("kind", "classification")
        if kind != "classification":
            raise InputError(
                f'a shift deals rows by their labels, and this task is "{kind}"; name the client '
                "of each row by client= of from_arrays"
            )
        labels = coded(y, "y")
        if (labels.codes < 0).any():
            raise InputError("some rows have no label, by which a shift deals; leave them out")
        rng = numpy_generator(options.get("seed", 0), "split")
        parts = shift(labels.codes, len(labels.names), clients, rng)
        places = np.full(len(labels.codes), -1)
        for i, part in enumerate(parts):
            places[part] = i
        client = Coded(places, tuple(map(str, range(clients))))
        return cls(**task_fields(Rows(x, labels, client), target, options))

    @classmethod
    @called_as('fs.Task.from_name("chem97", target="pooled")')
    def from_name(cls, name: str, /, *, target: Any, **options: Unpack[Options]) -> Task:
        """A table of the library with natural clients (`fedshift datasets` lists them).

        Raises InputError for an unknown name, and DataError for a table not on this machine.
        """
        table = load_table(name)
        named: Options = {"name": name, "classes": table.classes}
        rows = Rows(table.inputs, table.y, table.client)
        return cls(**task_fields(rows, target, named | options))

    @called_as('task.held_out("north")')
    def held_out(self, client: str) -> Task:
        """The same rows with this client as the target: it trains nothing, and its rows test.

        Columns are read as they were for this task. Raises InputError for a name that is no
        client's, and if the target is a test set.

        >>> x, y = [[0.0], [1.0], [0.2], [0.9], [0.1]], ["no", "yes", "no", "yes", "no"]
        >>> task = fs.Task.from_arrays(x, y, client=["a", "a", "b", "b", "c"], target="c")
        >>> task.held_out("a").clients
        ('b', 'c')
        """
        if self.outside:
            raise InputError(
                "the target of this task is a test set; make it with a client, or with "
                'target="pooled", to hold out one client after the other'
            )
        goal = target_of(client, self.places.names, self.labels.names)
        if goal.kind != "client":
            raise InputError(f'"{shown(goal.kind)}" is no client to hold out; give a name')
        clients, _ = clients_with_labels(self.places, self.labels, goal)
        return replace(self, target=goal, clients=clients)

    @property
    def labelled(self) -> tuple[str, ...]:
        """The clients with a labelled row, the target included: each of them can be held out."""
        counts = self.places.counts(np.flatnonzero(self.labels.codes >= 0))
        return tuple(n for n, count in zip(self.places.names, counts, strict=True) if count)

    def build(self, seed: int | None = None) -> Built:
        """Clients, validation, T and test rows, cut by `seed` (by default the task's own).

        Raises InputError if there are too few rows for the target.
        """
        return self._built if seed in (None, self.seed) else built(self, seed)

    @cached_property
    def _built(self) -> Built:
        return built(self, self.seed)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the labels; in regression, of the bins."""
        return self._built.task.classes if self.kind == "regression" else self.labels.names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example as the network gets it."""
        return self._built.input_shape

    def diagnose(self) -> Diagnosis:
        """Can the clients be mixed into the target? See `fedshift.diagnose.diagnose`."""
        from fedshift.diagnose import diagnose

        task = self._built.task
        counts = task.table()["labels"].numpy()
        return diagnose(counts, task.target.numpy(), classes=task.classes, clients=self.clients)

    def __str__(self) -> str:
        try:
            shape = " x ".join(map(str, self.input_shape))
            ends = f"{many(len(self.classes), 'class')} ({listed(self.classes)}), inputs [{shape}]"
            notes = self._built.notes
        except InputError as e:  # shown, so that printing a task says what is wrong with it
            ends, notes = "not to be built", (str(e),)
        parts = client_rows(self)
        clients = f"{many(len(self.clients), 'client')} ({listed(self.clients)})"
        first = f"{self.name}: {clients}, {many(sum(map(len, parts)), 'row')}, {ends}"
        return "\n".join(
            [first, *(f"  {line}" for line in (f"target: {self.target.text}", *notes))]
        )

    def __repr__(self) -> str:
        rows = f"{len(self.places.codes):,} rows of {many(len(self.clients), 'client')}"
        return f"Task({self.name}: {rows}, {self.kind}; target: {self.target.text})"

    def _repr_html_(self) -> str:
        """The label counts of each client, for notebooks."""
        return html_of(self.name, self._built)
