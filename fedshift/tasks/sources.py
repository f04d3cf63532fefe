"""Reading data sets of other libraries, which all have a length and rows by number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedshift.arguments import called
from fedshift.errors import InputError, nearest, shown
from fedshift.tasks.making import Rows
from fedshift.tasks.names import listed, plain
from fedshift.tasks.rows import inputs_of
from fedshift.tasks.tensors import Tensors, tensor_of

LABELS = ("label", "labels", "y", "target", "class", "fine_label")
INPUTS = ("image", "img", "x", "pixel_values", "features", "data")
# Keys of a tokeniser's rows, beside the label.
TOKENS = ("input_ids", "attention_mask", "token_type_ids")

Keys = str | Sequence[str] | None


class Taken(NamedTuple):
    """The inputs and labels of some rows, with an entry for each."""

    x: list[Any]
    y: list[Any]


def rows_of_datasets(sources: Any, x: Keys, y: str | None) -> Rows:
    """The rows of all clients' data sets; sources: a data set for each client, by name.

    Raises InputError for an object that is no data set, and if examples of two clients differ in
    shape.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise InputError(f"data sets are {called(sources)}; give a dict of them by client's name")
    parts = {str(name): taken(source, None, x, y, str(name)) for name, source in sources.items()}
    _check_alike(parts)
    client = np.repeat(np.array([*parts], dtype=object), [len(part.y) for part in parts.values()])
    everything = [value for part in parts.values() for value in part.x]
    return Rows(stacked(everything), [v for part in parts.values() for v in part.y], client)


def rows_of_partition(dataset: Any, indices: Any, x: Keys, y: str | None) -> Rows:
    """The rows of one data set, dealt to clients by lists of row numbers, by name or in order.

    Raises InputError for row numbers that do not exist, and for a row that two clients have.
    """
    named = indices if isinstance(indices, Mapping) else dict(enumerate(indices))
    parts = {str(name): _row_numbers(str(name), rows) for name, rows in named.items()}
    if not parts:
        raise InputError("indices is empty; give the row numbers of each client")
    n, everyone = _length(dataset, "the data set"), np.concatenate([*parts.values()])
    if len(everyone) and (everyone.min() < 0 or everyone.max() >= n):
        odd = everyone[(everyone < 0) | (everyone >= n)][0]
        raise InputError(f"indices hold row {odd}; the data set's rows are 0 to {n - 1}")
    if len(np.unique(everyone)) < len(everyone):
        rows, counts = np.unique(everyone, return_counts=True)
        raise InputError(
            f"row {rows[counts > 1][0]} is given to two clients, or twice to one; give it once"
        )
    examples = taken(dataset, everyone, x, y, "the data set")
    client = np.repeat(np.array([*parts], dtype=object), [len(part) for part in parts.values()])
    return Rows(stacked(examples.x), examples.y, client)


def tested(target: Any, x: Keys, y: str | None) -> Any:
    """A target that is a data set, as a pair (x, y) of its rows; other targets unchanged."""
    others = isinstance(target, str | Mapping | list | tuple | np.ndarray | torch.Tensor)
    pair_or_table = hasattr(target, "x") or hasattr(target, "iloc")
    by_number = hasattr(target, "__len__") and hasattr(target, "__getitem__")
    if others or pair_or_table or not by_number:
        return target
    rows = taken(target, None, x, y, "the target")
    if not rows.x:
        raise InputError("the target is an empty data set; there is nothing to test on")
    return stacked(rows.x), rows.y


def taken(source: Any, rows: Any, x: Keys, y: str | None, whose: str) -> Taken:
    """Inputs and labels at `rows` of a data set (None: all), labels by name if it names them."""
    numbers = range(_length(source, whose)) if rows is None else rows.tolist()
    pair = _pair(source)
    if pair is not None:
        xs, ys = pair
        return Taken([xs[i] for i in numbers], [_label(ys[i], None) for i in numbers])
    if not len(numbers):
        return Taken([], [])
    first = source[numbers[0]]
    if isinstance(first, Mapping):
        x_keys, y_key = _keys(list(map(str, first)), first, x, y, whose)
        made = [_of_dict(source[i], x_keys, y_key) for i in numbers]
        names = getattr(getattr(source, "features", {}).get(y_key), "names", None)
    elif isinstance(first, tuple | list) and len(first) == 2:
        made, names = [tuple(source[i]) for i in numbers], _classes(source)
    else:
        raise InputError(
            f"{shown(whose)}: a row is {called(first)}; rows are pairs (x, y), or dicts of which "
            'x="..." and y="..." name the input and the label'
        )
    labels = [_label(label, names) for _, label in made]
    return Taken([_value(value) for value, _ in made], labels)


def stacked(values: list[Any]) -> Any:
    """Examples put together: a tensor, a list of rows of unequal length, or tensors by name."""
    first = values[0] if values else None
    if isinstance(first, Mapping):
        if all(isinstance(v, torch.Tensor) and v.ndim for v in first.values()):
            return {name: stacked([value[name] for value in values]) for name in first}
        return values
    if isinstance(first, tuple):
        return tuple(stacked(list(part)) for part in zip(*values, strict=True))
    if len({tuple(value.shape) for value in values}) > 1:
        return values
    return torch.stack(values)


def _length(source: Any, whose: str) -> int:
    if hasattr(source, "dataset") and not hasattr(source, "__getitem__"):
        raise InputError(f"{shown(whose)} is {called(source)}, of batches; give its .dataset")
    if isinstance(source, Mapping):  # for example HuggingFace's DatasetDict, a dict of splits
        keys = listed([str(key) for key in source])
        raise InputError(
            f'{shown(whose)} is {called(source)} of {keys}; give one data set, as ["train"] of it, '
            "or a pair (x, y)"
        )
    pair = _pair(source)
    if pair is not None:
        if len(pair[0]) != len(pair[1]):
            raise InputError(
                f"{shown(whose)}: {len(pair[0])} inputs and {len(pair[1])} labels; give as many"
            )
        return len(pair[1])
    if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
        cure = "; give list(...) of it" if isinstance(source, Iterable) else ""
        raise InputError(
            f"{shown(whose)} is {called(source)}; a data set has a length, and rows by number{cure}"
        )
    return len(source)


def _pair(source: Any) -> tuple[Any, Any] | None:
    """(x, y) of a pair of arrays, or of an object with both; else None."""
    if isinstance(source, tuple) and len(source) == 2:
        x, y = source
    elif hasattr(source, "x") and hasattr(source, "y"):
        x, y = source.x, source.y
    else:
        return None
    inputs = inputs_of(x)
    if not isinstance(inputs, Tensors) or inputs.form != "one":
        raise InputError(
            "x of a pair (x, y) is one array here; for tables and several inputs put all rows "
            "together, and use from_frame or from_arrays"
        )
    return inputs.of["x"], y


def _row_numbers(name: str, rows: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    array = np.asarray(plain(rows))
    if array.dtype.kind == "b":
        raise InputError(
            f'indices of "{shown(name)}" are True and False; give the numbers of its rows, as '
            "numpy.flatnonzero(mask)"
        )
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f'indices of "{shown(name)}" are {called(rows)}; give a list of rows')
    return array.astype(np.int64)


def _keys(
    names: list[str], first: Mapping[str, Any], x: Keys, y: str | None, whose: str
) -> tuple[list[str], str]:
    """(keys of the inputs, key of the label) of rows that are dicts: as given, or usual names."""
    given = [x] if isinstance(x, str) else list(x or ())
    for name in (*given, *([y] if y else [])):
        if name not in names:
            raise InputError(
                f'{shown(whose)}: rows have no "{shown(name)}"; they have {listed(names)}.'
                f"{nearest(name, names)}"
            )
    labels = [y] if y else [name for name in LABELS if name in names]
    if len(labels) != 1:
        raise InputError(f'{shown(whose)}: rows hold {listed(names)}; name the label by y="..."')
    if given:
        return given, labels[0]
    rest = [name for name in names if name != labels[0]]
    tokens = [name for name in TOKENS if name in rest]
    images = [name for name in INPUTS if name in rest]
    scalars = all(isinstance(first[name], int | float | str | None) for name in rest)
    keys = tokens if "input_ids" in tokens else images if len(images) == 1 else rest
    if not keys or (keys is rest and len(rest) > 1 and not scalars):
        raise InputError(
            f'{shown(whose)}: rows hold {listed(names)}; name what to learn from by x="..."'
        )
    return keys, labels[0]


def _of_dict(row: Mapping[str, Any], x: list[str], y: str) -> tuple[Any, Any]:
    """(input, label) of a row; a single input is not wrapped in a dict, unless it is a table's."""
    values = {name: row[name] for name in x}
    alone = len(x) == 1 and not isinstance(values[x[0]], int | float | str | None)
    return (values[x[0]] if alone else values), row[y]


def _value(value: Any) -> Any:
    """One input as a tensor; images of Pillow become bytes [channels, height, width]."""
    if isinstance(value, Mapping):
        if any(
            isinstance(v, str) or v is None or not hasattr(v, "__len__") for v in value.values()
        ):
            return value
        return {name: _value(v) for name, v in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    if hasattr(value, "mode") and hasattr(value, "convert"):
        grey = value.mode in ("1", "L")
        pixels = torch.from_numpy(np.array(value.convert("L" if grey else "RGB")))
        return pixels[None] if grey else pixels.permute(2, 0, 1).contiguous()
    return tensor_of(plain(value))


def _label(label: Any, names: Sequence[str] | None) -> Any:
    """A label by its name, if the data set has names for numbers; -1 then means no label."""
    label = plain(label)
    label = label.item() if hasattr(label, "item") and label.ndim == 0 else label
    if names is None or not isinstance(label, int):
        return label
    if label == -1:  # as HuggingFace writes rows without a label
        return None
    return names[label] if 0 <= label < len(names) else label


def _classes(source: Any) -> Sequence[str] | None:
    """The names of a data set's labels, or of the data set that it is a subset of."""
    names = getattr(source, "classes", None)
    inner = getattr(source, "dataset", None)
    return names if names is not None or inner is None else _classes(inner)


def _check_alike(parts: Mapping[str, Taken]) -> None:
    kinds = {name: _kind(part.x[0]) for name, part in parts.items() if part.x}
    if not kinds:
        raise InputError("the data sets are empty; there is nothing to train on")
    first, kind = next(iter(kinds.items()))
    for name, other in kinds.items():
        if other != kind:
            raise InputError(
                f'examples of "{shown(name)}" are {other}, those of "{shown(first)}" {kind}; bring '
                "them to one form (transforms.ToTensor() makes floats of images, for one)"
            )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} with {value.ndim} axes"
    return f"{called(value)} of {len(value)}"
