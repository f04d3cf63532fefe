"""Heads row by row: the slots in which rows are sent, and sums over the clients with a label.

Shapes: N clients, C of them in the cohort, K labels, L slots.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from fedshift.errors import InputError, nearest
from fedshift.seeds import generator
from fedshift.server.cap import capped_columns
from fedshift.tree import Params, Parts, weighted_sum


def head_rows(params: Params, head: tuple[str, ...], labels: int) -> tuple[str, ...]:
    """Names of the head's parameters; each must have one row per label.

    Raises InputError if no parameter starts with a prefix of `head`, if one has another number of
    rows, or if `head` matches only some parameters of a layer.
    """
    names = tuple(k for k in params if k.startswith(head)) if head else ()
    if not names:
        close = nearest(head[0], params) if head else ""
        raise InputError(
            f"Setting.head = {list(head)} matches no parameter; the model has "
            f"{', '.join(list(params)[:8])}.{close} Name the last linear layer by Setting(head=...)"
        )
    for name in names:
        rows = tuple(params[name].shape)[:1]  # () for a scalar, which has no rows
        if rows != (labels,):
            raise InputError(
                f"label sets cut the head into one row per label, {labels} of them; {name} is "
                f"{tuple(params[name].shape)}. Name the last linear layer by Setting(head=...)"
            )
    _check_layers(params, names)
    return names


def _check_layers(params: Params, names: tuple[str, ...]) -> None:
    """Raise InputError if the head has only some parameters of a layer: they belong together."""
    for name in names:
        layer = name.rpartition(".")[0] + "."
        for other in params:
            if other.rpartition(".")[0] + "." == layer and other not in names:
                raise InputError(
                    f'the head has {name} and not {other} of the same layer; give head=("{layer}",)'
                )


def slot_table(label_sets: Tensor, slots: int | None, seed: int) -> Tensor:
    """The label in each slot of each client, -1 if empty: label_sets [N, K] bool -> [N, L] int64.

    L is `slots`, or the size of the largest label set. A client's labels and its empty slots are in
    an order drawn from (seed, client), so that it reveals nothing about the labels' numbers on the
    server. Raises InputError if L is too small.
    """
    largest = int(label_sets.sum(1).max())
    width = max(largest, 1) if slots is None else slots
    if width < max(largest, 1):
        client = int(label_sets.sum(1).argmax())
        raise InputError(
            f"slots={width} is too few, as client {client} holds {largest} labels; give at least "
            f"{largest}, or leave slots out"
        )
    table = torch.full((len(label_sets), width), -1)
    for i, row in enumerate(label_sets):
        labels = row.nonzero().flatten()
        # A generator per client: its order does not depend on how many other clients there are.
        order = torch.randperm(width, generator=generator(seed, "slots", i))
        table[i, order[: len(labels)]] = labels
    return table


def local_numbers(labels: Tensor, label_set: Tensor) -> Tensor:
    """The client's number of the label in each slot: its rank in the label set, -1 if empty.

    labels [L] as in a row of the table, label_set [K] bool.
    """
    # clamp: an empty slot has no rank, but needs a valid index; `where` discards the result.
    rank = label_set.long().cumsum(0) - 1
    return torch.where(labels < 0, labels, rank[labels.clamp(min=0)])


def in_slots(v: Tensor, labels: Tensor) -> Tensor:
    """Rows by slot from rows by label, zero in empty slots: v [K, ...], labels [L] -> [L, ...]."""
    empty = (labels < 0).reshape(-1, *[1] * (v.ndim - 1))
    return v[labels.clamp(min=0)].masked_fill(empty, 0)


def by_label(v: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Rows by label from rows by slot: v [C, L, ...], labels [C, L] -> [C, K, ...].

    Labels without a slot get zeros; the contents of empty slots are dropped.
    """
    index = torch.where(labels < 0, classes, labels).reshape(*labels.shape, *[1] * (v.ndim - 2))
    # An extra row, number `classes`, takes the contents of empty slots; it is cut off below.
    out = v.new_zeros(len(v), classes + 1, *v.shape[2:])
    return out.scatter(1, index.expand_as(v), v)[:, :classes]


def holder_shares(weights: Tensor, label_sets: Tensor, cap: float = 1.0) -> Tensor:
    """a_iy = a_i 1{y in Y_i} / sum_j a_j 1{y in Y_j}, [C, K] float64.

    weights [C], label_sets [C, K] bool. If h clients have a label, none gets a share above the cap
    (or 1/h, if larger). A label that no client of positive weight has gets share 0 everywhere.
    """
    # Renormalise for each label: its row is a mean over the clients that have it, and must not
    # shrink with the number of the others.
    masses = weights.double()[:, None] * label_sets
    total = masses.sum(0)
    share = masses / torch.where(total > 0, total, 1.0)
    share = capped_columns(share, cap, masses > 0)
    # A label that all clients have takes the weights unchanged. Dividing by their sum, 1 up to
    # rounding, would change bits in runs where every client has every label.
    by_all = (label_sets | (weights == 0)[:, None]).all(0)
    return torch.where(by_all, weights.double()[:, None], share)


def row_sum(shares: Tensor, stacked: Tensor) -> Tensor:
    """sum_i a_iy v_iy: shares [C, K], stacked [C, K, ...] -> [K, ...].

    In float64 in the order of the clients, cast once; rows of share 0 are left out.
    """
    out = torch.zeros(stacked.shape[1:], dtype=torch.float64, device=stacked.device)
    for share, rows in zip(shares, stacked, strict=True):
        factor = share.reshape(-1, *[1] * (rows.ndim - 1))
        # Mask after multiplying, because 0 * NaN is NaN.
        out.add_((rows.double() * factor).masked_fill(factor == 0, 0))
    return out.to(stacked.dtype)


def row_mean(weights: Tensor, shares: Tensor, stacked: Params, names: Collection[str]) -> Params:
    """The entries in `names` combined by `row_sum`, all others by `weighted_sum`, weights [C]."""
    body = weighted_sum(weights, {k: v for k, v in stacked.items() if k not in names})
    return {k: row_sum(shares, v) if k in names else body[k] for k, v in stacked.items()}


def keep_rows(old: Params, new: Params, rows: Tensor, names: Collection[str]) -> Params:
    """`new`, but for the marked rows [K] bool of the entries in `names`, taken from `old`."""

    def kept(name: str, v: Tensor) -> Tensor:
        wide = rows.reshape(-1, *[1] * (v.ndim - 1))
        return torch.where(wide, old[name], v) if name in names else v

    return {k: kept(k, v) for k, v in new.items()}


def only_labels(params: Params, names: Collection[str], label_set: Tensor) -> Params:
    """A model of all K labels that gives probability 0 to labels outside `label_set` [K] bool.

    The head of `params` has all K rows, or only those of the set, in ascending order. The rows of
    other labels get weights 0 and biases minus infinity. Raises InputError for a head without bias.
    """
    if not any(params[k].ndim == 1 for k in names):
        raise InputError(
            f"the head ({', '.join(names)}) has no bias and cannot rule labels out, as a client "
            "with a private label set must to serve a model; give the last layer a bias"
        )

    def whole(v: Tensor) -> Tensor:
        # Minus infinity in the bias, so that the softmax is exactly 0.
        out = v.new_full((len(label_set), *v.shape[1:]), -torch.inf if v.ndim == 1 else 0.0)
        out[label_set] = v if len(v) != len(label_set) else v[label_set]
        return out

    return {k: whole(v) if k in names else v for k, v in params.items()}


def wire_labels(server: Parts, ids: Tensor) -> Tensor:
    """The label behind each logit of the cohort's models, -1 for none: ids [C] -> [C, L]."""
    sets = server["sets"]
    if "slot" in sets:
        return sets["slot"][ids]
    return torch.arange(sets["held"].shape[1]).expand(len(ids), -1)
