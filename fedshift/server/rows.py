"""Heads row by row: which clients have a label, the slot it travels in, sums over its holders.

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

    Raises InputError where none starts with a prefix of `head`, one has another number of rows, or
    only some of a layer's are named.
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
    """InputError where the head has some of a layer's parameters: their rows go together."""
    for name in names:
        layer = name.rpartition(".")[0] + "."
        for other in params:
            if other.rpartition(".")[0] + "." == layer and other not in names:
                raise InputError(
                    f'the head has {name} and not {other} of the same layer; give head=("{layer}",)'
                )


def slot_table(label_sets: Tensor, slots: int | None, seed: int) -> Tensor:
    """The label in each slot of each client, -1 if empty: label_sets [N, K] bool -> [N, L] int64.

    L is `slots`, or the size of the largest label set. A client's labels, and the empty slots
    between them, are in an order drawn from (seed, client). The order reveals nothing about the
    numbers that labels have on the server. Raises InputError where L is too small.
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
    """The client's own number of the label in each slot: its rank in the label set, -1 if empty.

    labels [L] as in a row of the table, label_set [K] bool.
    """
    # clamp: an empty slot has no rank, but must have some index.
    rank = label_set.long().cumsum(0) - 1
    return torch.where(labels < 0, labels, rank[labels.clamp(min=0)])


def in_slots(v: Tensor, labels: Tensor) -> Tensor:
    """Rows by label to rows by slot, zero in empty ones: v [K, ...], labels [L] -> [L, ...]."""
    empty = (labels < 0).reshape(-1, *[1] * (v.ndim - 1))
    return v[labels.clamp(min=0)].masked_fill(empty, 0)


def by_label(v: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Rows by slot to rows by label, zero where there is none: [C, L, ...], [C, L] -> [C, K, ...].

    The contents of empty slots are dropped.
    """
    index = torch.where(labels < 0, classes, labels).reshape(*labels.shape, *[1] * (v.ndim - 2))
    # One more row, `classes`, collects what lies in empty slots; it is cut off below.
    out = v.new_zeros(len(v), classes + 1, *v.shape[2:])
    return out.scatter(1, index.expand_as(v), v)[:, :classes]


def holder_shares(weights: Tensor, label_sets: Tensor, cap: float = 1.0) -> Tensor:
    """a_iy = a_i 1{y in Y_i} / sum_j a_j 1{y in Y_j}, [C, K] float64.

    weights [C], label_sets [C, K] bool. Of h clients that hold a label none has a share above the
    cap, or 1/h.

    A label that no client of positive weight holds has share 0 everywhere. A label that all of them
    hold gets the weights as they are: dividing by a sum of 1 up to rounding would change bits where
    every client has every label.
    """
    # Renormalised per label: a row is a mean over its holders, not shrunk by all other clients.
    masses = weights.double()[:, None] * label_sets
    total = masses.sum(0)
    share = masses / torch.where(total > 0, total, 1.0)
    share = capped_columns(share, cap, masses > 0)
    by_all = (label_sets | (weights == 0)[:, None]).all(0)
    return torch.where(by_all, weights.double()[:, None], share)


def row_sum(shares: Tensor, stacked: Tensor) -> Tensor:
    """sum_i a_iy v_iy: shares [C, K], stacked [C, K, ...] -> [K, ...].

    In float64 in the order of the clients, cast once; rows of share 0 are left out.
    """
    out = torch.zeros(stacked.shape[1:], dtype=torch.float64, device=stacked.device)
    for share, rows in zip(shares, stacked, strict=True):
        factor = share.reshape(-1, *[1] * (rows.ndim - 1))
        # Masked after multiplying: 0 * NaN is NaN.
        out.add_((rows.double() * factor).masked_fill(factor == 0, 0))
    return out.to(stacked.dtype)


def row_mean(weights: Tensor, shares: Tensor, stacked: Params, names: Collection[str]) -> Params:
    """The rows of `names` by `row_sum`, all other entries by weights [C], as `weighted_sum`."""
    body = weighted_sum(weights, {k: v for k, v in stacked.items() if k not in names})
    return {k: row_sum(shares, v) if k in names else body[k] for k, v in stacked.items()}


def keep_rows(old: Params, new: Params, rows: Tensor, names: Collection[str]) -> Params:
    """`new`, with the rows [K] bool of `names` as they are in `old`, bit for bit."""

    def kept(name: str, v: Tensor) -> Tensor:
        wide = rows.reshape(-1, *[1] * (v.ndim - 1))
        return torch.where(wide, old[name], v) if name in names else v

    return {k: kept(k, v) for k, v in new.items()}


def only_labels(params: Params, names: Collection[str], label_set: Tensor) -> Params:
    """A model of all K labels that gives labels outside `label_set` [K] bool probability 0.

    The head of `params` has K rows, or only those of the set, in ascending order. In the others
    weights are 0 and biases minus infinity. Raises InputError for a head without a bias.
    """
    if not any(params[k].ndim == 1 for k in names):
        raise InputError(
            f"the head ({', '.join(names)}) has no bias and cannot rule labels out, as a client "
            "with a private label set must to serve a model; give the last layer a bias"
        )

    def whole(v: Tensor) -> Tensor:
        # -inf in the bias, not a large negative number: the softmax is then exactly 0.
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
