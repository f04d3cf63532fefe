"""The protocol of shifts, checks of their input and output, label tables and dealing by them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from fedshift.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Partition = tuple[Ints, ...]

SMALLEST_BETA, LARGEST_BETA = 1e-6, 1e6

# Tolerance of rounding: floats such as 0.1 * 30 can lie slightly beside the integer they mean.
_SLACK = 1e-9


class Shift(Protocol):
    """A rule that deals one pool of labelled samples to clients.

    `labels` is int64 [n] with values 0..K-1, `classes` is K, `clients` is M. The result is M index
    arrays into `labels`, each ascending, no index in two of them. Every draw comes from `rng`.
    Implementations are frozen dataclasses; bad input is an `InputError`. To split off a target
    in the same way as the clients, ask for M + 1 parts and take the last one.

    >>> import numpy as np
    >>> from fedshift.shifts import Shards
    >>> parts = Shards(1)([0, 1] * 6, 2, 2, np.random.default_rng(0))
    >>> sorted(part.tolist() for part in parts)
    [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    """

    def __call__(
        self, labels: Ints, classes: int, clients: int, rng: np.random.Generator
    ) -> Partition: ...


def check_count(name: str, value: object, low: int, high: int | None = None, do: str = "") -> int:
    """`value` as an int when it is a whole number in low..high, else an `InputError` with `do`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if whole and value >= low and (high is None or value <= high):  # type: ignore[operator]
        return int(value)  # type: ignore[call-overload, no-any-return]
    span = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise InputError(
        f"{name}={value!r}; allowed: a whole number {span}." + (f" {do}" if do else "")
    )


def check_beta(beta: object) -> float:
    """A Dirichlet concentration in 1e-6..1e6, beyond which draws only differ by rounding errors."""
    number = isinstance(beta, int | float | np.floating | np.integer) and beta is not True
    if number and SMALLEST_BETA <= beta <= LARGEST_BETA:  # type: ignore[operator]
        return float(beta)  # type: ignore[arg-type]
    raise InputError(
        f"beta={beta!r}; allowed: a number from {SMALLEST_BETA:g} to {LARGEST_BETA:g} "
        "(small: very unequal; large: close to equal). Use Iid() for no shift at all."
    )


def as_numbers(name: str, values: ArrayLike) -> Floats:
    """`values` as float64; ragged rows or words instead of numbers are an `InputError`."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name}: {error}; allowed: numbers, all rows equally long.") from error


def check_pool(labels: ArrayLike, classes: int, rng: np.random.Generator) -> Ints:
    """`labels` as int64 [n] when they are a non-empty vector of whole numbers in 0..K-1.

    Also refuses an `rng` that is not a Generator, such as a seed.
    """
    check_count("classes", classes, 1)
    if not isinstance(rng, np.random.Generator):
        raise InputError(
            f"rng={rng!r}; allowed: a numpy Generator, for instance "
            'fedshift.seeds.numpy_generator(seed, "split").'
        )
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise InputError(
            f"labels of shape {array.shape}; allowed: a vector with one label per sample, "
            "at least one sample."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"labels of type {array.dtype}; allowed: whole numbers 0..{classes - 1}. "
            "Convert class names to their positions first."
        )
    for worst in (array.min(), array.max()):
        if not 0 <= worst < classes:
            raise InputError(
                f"label {worst} with classes={classes}; allowed: 0..{classes - 1}. "
                "Raise classes or renumber the labels."
            )
    return array.astype(np.int64, copy=False)


def check_inputs(
    labels: ArrayLike, classes: int, clients: int, rng: np.random.Generator, min_size: int = 0
) -> Ints:
    """`check_pool`, and enough samples for M clients of at least max(1, min_size) each."""
    array = check_pool(labels, classes, rng)
    check_count("clients", clients, 1, array.size, "Each client needs at least one sample.")
    if clients * min_size > array.size:
        raise InputError(
            f"min_size={min_size} for {clients} clients needs {clients * min_size} samples; there "
            f"are {array.size}. Lower min_size to at most {array.size // clients}, or ask for "
            "fewer clients."
        )
    return array


def check_partition(
    parts: Sequence[Ints], n: int, clients: int, *, whole: bool = False, min_size: int = 0
) -> None:
    """An `InputError` unless `parts` is what a `Shift` promises for n samples and M clients.

    M int64 vectors, ascending, indices in 0..n-1, none used twice, each of at least `min_size`;
    with `whole`, every sample used.
    """
    if len(parts) != clients:
        raise InputError(f"{len(parts)} parts for {clients} clients; a shift returns one for each.")
    for client, part in enumerate(parts):
        if part.dtype != np.int64 or part.ndim != 1 or (np.diff(part) <= 0).any():
            raise InputError(f"part {client} is not a strictly ascending int64 vector; sort it.")
        if part.size < min_size:
            raise InputError(
                f"part {client} holds {part.size} samples, fewer than min_size={min_size}."
            )
    used = np.concatenate(parts)
    if used.size and (used.min() < 0 or used.max() >= n):
        raise InputError(f"parts point outside the samples; allowed: indices 0..{n - 1}.")
    uses = np.bincount(used, minlength=n)
    if uses.max(initial=0) > 1:
        raise InputError(
            f"sample {uses.argmax()} is in {uses.max()} parts; a sample has one owner."
        )
    if whole and used.size < n:
        raise InputError(
            f"sample {uses.argmin()} is in no part, and {n - used.size - 1} others; "
            "this shift promises to use all."
        )


def label_counts(labels: ArrayLike, parts: Sequence[Ints], classes: int) -> Ints:
    """The label table: int64 [M, K], entry (i, y) = how many samples of part i have label y."""
    array, clients = np.asarray(labels), len(parts)
    sizes = np.array([part.size for part in parts], dtype=np.int64)
    owner = np.repeat(np.arange(clients), sizes)
    # Without parts, the empty array keeps the type of an index.
    used = array[np.concatenate([*parts, np.empty(0, np.int64)])]
    if used.size and (used.min() < 0 or used.max() >= classes):
        raise InputError(
            f"labels from {used.min()} to {used.max()} with classes={classes}; "
            f"allowed: 0..{classes - 1}."
        )
    return np.bincount(owner * classes + used, minlength=clients * classes).reshape(
        clients, classes
    )


def marginals(counts: ArrayLike) -> Floats:
    """Row-wise label marginals S_iy = n_iy / n_i, float64 [M, K] from counts [M, K].

    The row of a client without samples is all zeros: it has no marginal, and zeros change no sum.
    Negative, non-finite or non-rectangular counts are an `InputError`.
    """
    table = as_numbers("counts", counts)
    if table.ndim != 2 or not np.isfinite(table).all() or (table < 0).any():
        raise InputError(
            f"counts of shape {table.shape}; allowed: a table [clients, classes] of finite "
            "numbers >= 0."
        )
    sizes = table.sum(axis=1, keepdims=True)
    return np.asarray(table / np.where(sizes > 0, sizes, 1))


def largest_remainder(quota: Floats) -> Ints:
    """Each row of `quota` [..., K] rounded to integers with the row's sum kept (Hamilton's method).

    Every entry becomes its floor or its ceiling; the ceilings go to the largest fractions, ties
    to the lower index. Row sums must be whole up to rounding errors.
    """
    base = np.floor(quota + _SLACK)
    missing = np.rint(quota.sum(axis=-1, keepdims=True)) - base.sum(axis=-1, keepdims=True)
    # Sorting twice gives ranks: 0 for the largest fraction, which is rounded up first.
    rank = np.argsort(np.argsort(base - quota, axis=-1, kind="stable"), axis=-1)
    return np.asarray(base + (rank < missing), dtype=np.int64)


def round_within(quota: Floats, capacity: Ints) -> Ints:
    """`quota` [M, K] rounded to integers, row sums kept and column sums at most `capacity` [K].

    Every entry becomes its floor or its ceiling. This is controlled rounding (Cox 1987): the
    fractional parts are a feasible flow from rows to columns, hence there is an integral one
    whenever the column sums of `quota` are within `capacity`. Largest remainders first; where they
    overfill a column, its smallest fractions are dropped and the rows repaired along augmenting
    paths, so that few entries differ from plain rounding.
    """
    base = np.floor(quota + _SLACK).astype(np.int64)
    fraction = quota - base
    up = largest_remainder(quota) - base
    missing = up.sum(axis=1)
    room = capacity - base.sum(axis=0)
    for column in np.flatnonzero(up.sum(axis=0) > room):
        smallest_first = np.argsort(np.where(up[:, column] > 0, fraction[:, column], np.inf))
        up[smallest_first[: up[:, column].sum() - room[column]], column] = 0
    missing -= up.sum(axis=1)
    room -= up.sum(axis=0)
    if missing.any():
        up += _repair(up, fraction > _SLACK, missing, room)
    return base + up


def _repair(up: Ints, open_: NDArray[np.bool_], missing: Ints, room: Ints) -> Ints:
    """Changes in {-1, 0, 1} [M, K]: `missing[i]` more in row i, at most `room[y]` in column y."""
    # Nodes: rows, columns, a source that asks for what rows miss, a sink that takes columns' room.
    # An edge row -> column rounds that entry up, column -> row rounds one down again.
    rows, columns = up.shape
    source, sink = rows + columns, rows + columns + 1
    add, drop = np.argwhere((up == 0) & open_), np.argwhere(up == 1)
    row, column = np.arange(rows), rows + np.arange(columns)
    tails = [add[:, 0], rows + drop[:, 1], np.full(rows, source), column]
    heads = [rows + add[:, 1], drop[:, 0], row, np.full(columns, sink)]
    limit = [np.ones(len(add) + len(drop), np.int64), missing, room]
    edges = (np.concatenate(tails), np.concatenate(heads))
    graph = coo_array((np.concatenate(limit), edges), shape=(sink + 1, sink + 1))
    flow = maximum_flow(csr_array(graph).astype(np.int32), source, sink).flow
    return np.asarray(csr_array(flow)[:rows, rows:source].toarray(), dtype=np.int64)


def split_by_owner(order: Ints, owner: Ints, clients: int) -> Partition:
    """Sample `order[j]` goes to client `owner[j]`; owners outside 0..M-1 are M: in no part."""
    # Sorted by owner, then by index, so that each part is ascending.
    by_owner = order[np.lexsort((order, owner))]
    sizes = np.bincount(owner, minlength=clients)[:clients]
    return tuple(np.split(by_owner, np.cumsum(sizes))[:clients])


def shuffled_by_label(labels: Ints, rng: np.random.Generator) -> Ints:
    """All indices, sorted by label, in random order within a label."""
    # A stable sort of a random order keeps that order within each label.
    shuffled = rng.permutation(labels.size)
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def deal(labels: Ints, counts: Ints, rng: np.random.Generator) -> Partition:
    """Parts with the label table `counts` [M, K], samples of each label dealt at random.

    Asking for more samples of a label than there are is an `InputError`.
    """
    clients, classes = counts.shape
    unused = np.bincount(labels, minlength=classes) - counts.sum(axis=0)
    if (unused < 0).any():
        y = int(unused.argmin())
        raise InputError(
            f"{counts[:, y].sum()} samples of label {y} asked for; there are "
            f"{counts[:, y].sum() + unused[y]}. Ask for fewer."
        )
    # One more owner, M, takes what is not dealt; `split_by_owner` drops it.
    owners = np.tile(np.arange(clients + 1), classes)
    owner = np.repeat(owners, np.vstack([counts, unused]).T.ravel())
    return split_by_owner(shuffled_by_label(labels, rng), owner, clients)


def dirichlet(beta: float, dimensions: int, rows: int, rng: np.random.Generator) -> Floats:
    """`rows` independent draws from the symmetric Dir(beta), float64 [rows, dimensions]."""
    return rng.dirichlet(np.full(dimensions, beta), size=rows)


def even_sizes(n: int, clients: int) -> Ints:
    """n as M whole numbers that differ by at most one, the larger ones first, int64 [M]."""
    return n // clients + (np.arange(clients) < n % clients).astype(np.int64)


def largest_multiple(supply: Ints, demand: Floats) -> tuple[int, int]:
    """The largest whole s with s * demand_y <= supply_y for all y, and the y that binds.

    Holds up to 1e-12 of the supply: without that tolerance a demand computed as supply_y / n would
    often give n - 1.
    """
    # Demands near the smallest float give inf here, which is right: they never bind.
    with np.errstate(over="ignore"):
        limits = np.divide(supply, demand, out=np.full(demand.size, np.inf), where=demand > 0)
    binding = int(limits.argmin())
    return math.floor(limits[binding] * (1 + 1e-12)), binding
