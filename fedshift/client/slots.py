"""Labels numbered from 0 by each client, and the rows of a head that belong to them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.client.objectives import Around, View
from fedshift.data import ClientData
from fedshift.errors import InputError
from fedshift.tree import Params, Parts

# Sorts after every label.
PADDING = torch.iinfo(torch.int64).max


def local_labels(data: ClientData) -> tuple[Tensor, Tensor]:
    """(local label of each example [n], how many labels the client has []), both int64.

    A local label is the rank of the label among the client's, 0, 1, ...; padding has 0.
    """
    # Sort instead of torch.unique: its shapes depend on values, which vmap does not allow.
    present = data.w != 0
    ordered, index = torch.where(present, data.y, PADDING).sort(stable=True)
    # `new` is 1 at the first example of each label, so its running sum numbers the labels.
    first = ordered.new_ones(min(1, len(ordered)))
    new = torch.cat([first, (ordered[1:] != ordered[:-1]).long()])
    rank = torch.zeros_like(index).scatter(0, index, new.cumsum(0) - 1)
    return torch.where(present, rank, 0), (new * (ordered != PADDING)).sum()


def check_slots(local: Tensor, labels: Tensor, data: ClientData) -> None:
    """Raise InputError unless the server sent as many rows as the client has labels.

    Nothing else in a client's round looks at values. This check has to, because with another number
    of labels the client would silently train the wrong rows. Different labels of the same number
    cannot be detected, since labels are not sent.
    """
    count = int((local >= 0).sum())
    if count != int(labels):
        raise InputError(
            f"client {int(data.id)} has examples of {int(labels)} labels and is registered with "
            f"{count}; make the table from these clients, fedshift.data.register(clients, classes)"
        )


def rows_of_client(params: Params, names: Collection[str], data: ClientData) -> Params:
    """The first model as this client receives it: the head has only the rows of its labels."""
    labels = torch.bincount(data.y[data.w != 0]).nonzero().flatten()
    return {k: v[labels] if k in names else v for k, v in params.items()}


def reordered(parts: Parts, names: Collection[str], order: Tensor) -> Parts:
    """`parts` with the rows of every entry in `names` put into this order [L]."""
    # In all parts, because moments, controls and anchors have the head's rows, too.
    return {
        part: {k: v[order] if k in names else v for k, v in tree.items()}
        for part, tree in parts.items()
    }


def padded(parts: Parts, names: Collection[str], rows: int) -> Parts:
    """`parts` with zeros appended to every entry in `names`, up to this number of rows."""

    def longer(v: Tensor) -> Tensor:
        return torch.cat([v, v.new_zeros(rows - len(v), *v.shape[1:])])

    return {
        part: {k: longer(v) if k in names else v for k, v in tree.items()}
        for part, tree in parts.items()
    }


def cut_as(parts: Parts, names: Collection[str], like: Parts) -> Parts:
    """`parts` with every entry in `names` cut to the number of rows that it has in `like`."""
    return {
        part: {k: v[: len(like[part][k])] if k in names else v for k, v in tree.items()}
        for part, tree in parts.items()
    }


@dataclass(frozen=True)
class OwnLabels(Around):
    """`term`, with the logits of slots without a label set to minus infinity.

    `context["slots"]["held"]` [L] says which slots have one. A masked logit has probability and
    gradient exactly 0, so that the softmax runs over the client's own labels. If all slots have a
    label it is `term`, bit for bit.
    """

    def __call__(self, view: View) -> Tensor:
        empty = ~view.context["slots"]["held"]
        logits = view.out["logits"].masked_fill(empty, -torch.inf)
        return self.term(view._replace(out=view.out | {"logits": logits}))
