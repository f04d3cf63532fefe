"""What a client holds: its examples, with checks of their form, and the table of all clients.

Shapes: n examples of a client, K classes, M training clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedshift.arguments import called, check_listed, check_whole
from fedshift.errors import InputError, shown
from fedshift.real import is_whole
from fedshift.sketch import sketched

MADE = "make each by fedshift.data.client_data(x, y, position)"


@sketched
class ClientData(NamedTuple):
    """One client's examples: x [n, ...], y [n] int64, w [n], id [].

    `w` is each example's importance in the loss, finite and 0 or more; an example with w = 0 counts
    as absent. So importance weighting changes the data, not the code of losses. Within a round,
    w = 0 marks padding at the end; a `Federation` has no such examples (`of_importance`).
    """

    x: Tensor
    y: Tensor
    w: Tensor
    id: Tensor


def client_data(x: Tensor, y: Tensor, client: int) -> ClientData:
    """A client with importance 1 for each example; labels of any integer type become int64.

    x       inputs [n, ...]
    y       labels [n], from 0 on
    client  the client's position in the federation

    >>> import torch
    >>> from fedshift.data import client_data
    >>> client_data(torch.zeros(3, 2), torch.tensor([0, 1, 1]), 0).w.tolist()
    [1.0, 1.0, 1.0]

    Raises InputError for unequal lengths, labels that are not such a vector, inputs that are not
    finite, and an id that is not a whole number of at least 0.
    """
    if not is_whole(client) or client < 0:
        raise InputError(
            f"client id {shown(repr(client))}: must be a whole number, 0 for the first client"
        )
    for name, v in (("x", x), ("y", y)):
        check_plain(v, name, client)
    n, labels = (v.shape[0] if v.ndim else 0 for v in (x, y))
    if n != labels:
        raise InputError(f"client {client} has {n} inputs and {labels} labels; give as many")
    check_labels(y, f"client {client}")
    check_finite(x, f"client {client}: x", "training")
    return ClientData(x, y.long(), torch.ones(len(y)), torch.tensor(int(client)))


def count(data: ClientData) -> Tensor:
    """The number of examples that are not padding, a 0-d float tensor."""
    return (data.w != 0).sum().to(data.w.dtype)


def label_counts(data: ClientData, classes: int) -> Tensor:
    """The number of examples of each label, without padding: [K] float."""
    # Not bincount: shapes must not depend on values, so that several clients can share a pass.
    counts = torch.zeros(classes, dtype=data.w.dtype, device=data.w.device)
    return counts.index_add(0, data.y, (data.w != 0).to(data.w.dtype))


def register(clients: Sequence[ClientData], classes: int) -> dict[str, Tensor]:
    """The server's table of the clients: n [M] and labels [M, K], float64.

    >>> import torch
    >>> from fedshift.data import client_data, register
    >>> client = client_data(torch.zeros(3, 2), torch.tensor([0, 1, 1]), 0)
    >>> register([client], classes=2)["labels"].tolist()
    [[1.0, 2.0]]

    Raises InputError without clients, for a label that is not below K, and for clients that were
    changed into what `client_data` does not make: importances, for instance, are one number per
    example, floating, finite and 0 or more.
    """
    check_whole("the number of classes", classes)
    check_listed("clients", clients, ClientData, MADE)
    if isinstance(clients, Surveyed):
        return clients.register(classes)
    for i, c in enumerate(clients):
        check_client(c, i)
        if len(c.y) and int(c.y.max()) >= classes:
            raise InputError(
                f"client {i} has label {int(c.y.max())}; with {classes} classes labels are "
                f"0..{classes - 1}: give register a larger number of classes"
            )
    # Counted in float64: importances in 16 bits cannot count to 3,000.
    counted = [c._replace(w=c.w.double()) for c in clients]
    return {
        "n": torch.stack([count(c) for c in counted]),
        "labels": torch.stack([label_counts(c, classes) for c in counted]),
    }


@runtime_checkable
class Surveyed(Protocol):
    """Clients that were checked together when they were made, so that none is checked again.

    `fedshift.pooled.Pooled` is one: it makes clients on demand.
    """

    def register(self, classes: int) -> dict[str, Tensor]:
        """n [M] and labels [M, K], float64; InputError for a label that is not below K."""

    def largest_label(self) -> int:
        """The largest label that a client has; -1 without examples."""


def of_importance(clients: Sequence[ClientData]) -> Sequence[ClientData]:
    """The clients without their examples of importance 0; unchanged if there are none."""
    if isinstance(clients, Surveyed):
        return clients
    counted = [c.w != 0 for c in clients]
    if all(bool(rows.all()) for rows in counted):
        return clients
    pairs = zip(clients, counted, strict=True)
    # Clients that lose nothing stay the same objects: no copy of a large data set.
    return tuple(
        c if bool(rows.all()) else ClientData(c.x[rows], c.y[rows], c.w[rows], c.id)
        for c, rows in pairs
    )


def largest_label(clients: Sequence[ClientData]) -> int:
    """The largest label that a client has; -1 without examples."""
    if isinstance(clients, Surveyed):
        return clients.largest_label()
    return max((int(c.y.long().max()) for c in clients if len(c.y)), default=-1)


def check_clients(clients: Sequence[ClientData]) -> None:
    """Raise InputError unless the clients can be one federation.

    There must be at least one. Ids must be positions, labels class numbers in int64, importances
    one per example, finite and not negative, and all inputs finite and of one type.
    """
    check_listed("clients", clients, ClientData, MADE)
    if isinstance(clients, Surveyed):
        return
    for i, c in enumerate(clients):
        check_client(c, i)
    # A client's id is its row in the server's table and in the weights.
    ids = [int(c.id) for c in clients]
    if ids != list(range(len(ids))):
        raise InputError(
            f"client ids must be 0..{len(ids) - 1} in order, got {ids[:10]}; "
            "an id is the client's position, client_data(x, y, position)"
        )
    for i, c in enumerate(clients):
        if c.x.dtype != clients[0].x.dtype:
            types = f"x is {c.x.dtype}, client 0's is {clients[0].x.dtype}"
            raise InputError(f"client {i}: {types}; give all clients inputs of one type")
        check_finite(c.x, f"client {i}: x", "training")


def check_client(c: ClientData, position: int) -> None:
    """Raise InputError unless its tensors have the forms that `client_data` gives them.

    `client_data` has checked most of this, but clients can also be made by `_replace`.
    """
    for name, v in (("x", c.x), ("y", c.y)):
        check_plain(v, name, position)
    check_labels(c.y, f"client {position}")
    check_importance(c.w, len(c.y), position)
    if c.y.dtype != torch.int64:
        raise InputError(f"client {position}: labels are {c.y.dtype}; client_data makes them int64")
    if not isinstance(c.id, Tensor) or c.id.ndim or c.id.dtype != torch.int64:
        what = f"{c.id.dtype} {tuple(c.id.shape)}" if isinstance(c.id, Tensor) else called(c.id)
        raise InputError(
            f"client {position}: id is {what}; it is a whole number in a tensor, as "
            f"client_data(x, y, {position}) makes it"
        )


def first_not_finite(x: Tensor) -> int | None:
    """The first row of x [n, ...] with NaN or infinity; None if all are finite.

    Integers are not read at all: images as bytes may be mapped from disk, and need not be loaded.
    """
    # One sum is several times faster than a test of each entry, and is finite only if all entries
    # are. If finite entries overflow it, the test below finds nothing.
    if not (x.is_floating_point() or x.is_complex()) or bool(torch.isfinite(x.sum())):
        return None
    # Only now test each entry, since the mask is as large as x.
    bad = ~torch.isfinite(x.reshape(len(x), -1)).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None


def check_finite(x: Tensor, what: str, until: str) -> None:
    """Raise InputError, with the first such row, if x [n, ...] has NaN or infinity."""
    bad = first_not_finite(x)
    if bad is not None:
        raise InputError(
            f"{what}[{bad}] holds NaN or infinity; leave such examples out, or fill them in, "
            f"before {until}"
        )


def check_plain(v: object, name: str, client: int) -> None:
    """Raise InputError unless v is a dense tensor with numbers in it and of one shape."""
    if name == "y":
        check_numbered(v, f"client {client}")
    if not isinstance(v, Tensor):
        raise InputError(
            f"client {client}: {name} is a {type(v).__name__}; give torch.as_tensor({name})"
        )
    if v.is_nested or v.is_meta:
        odd = "nested" if v.is_nested else "on the device meta, and holds no numbers"
        raise InputError(f"client {client}: {name} is {odd}; give a tensor [n, ...] of one shape")
    if v.layout != torch.strided:
        raise InputError(f"client {client}: {name} is sparse; give {name}.to_dense()")


def check_numbered(y: object, whose: str) -> None:
    """Raise InputError for labels that are text, with how to number them: torch has no text."""
    if not isinstance(y, Tensor) and _has_text(y):
        raise InputError(
            f"{whose}: labels are text; number those of all clients together, names, numbers = "
            "numpy.unique(y, return_inverse=True), and give torch.as_tensor(numbers)"
        )


def _has_text(y: object) -> bool:
    entries = y.tolist() if hasattr(y, "tolist") else y
    return isinstance(entries, list | tuple) and any(isinstance(label, str) for label in entries)


def check_labels(y: Tensor, whose: str) -> None:
    """Raise InputError unless y [n] are whole numbers of at least 0, as int64 holds them."""
    if y.ndim != 1:
        raise InputError(f"{whose}: labels of shape {tuple(y.shape)}; give one per example")
    if y.is_floating_point() or y.is_complex():
        raise InputError(
            f"{whose}: labels are {y.dtype}; they are class numbers 0, 1, ...: "
            "give whole numbers, as y.long() makes them"
        )
    least = int(y.long().min()) if len(y) else 0  # long: torch has no `min` for unsigned integers
    if least < 0:
        # As int64 a large uint64 is negative: the message must name the label that was given.
        label = least + 2**64 if y.dtype == torch.uint64 else least
        raise InputError(f"{whose} has label {label}; labels are 0, 1, ..., K-1")


def check_importance(w: object, n: int, client: int) -> None:
    """Raise InputError unless w [n] are floating numbers, finite and of at least 0."""
    if not isinstance(w, Tensor) or w.is_complex() or w.shape != (n,):
        what = f"of shape {tuple(w.shape)}" if isinstance(w, Tensor) else f"a {type(w).__name__}"
        raise InputError(
            f"client {client}: w is {what}; give a tensor of one number per example, {n} of them"
        )
    if not w.is_floating_point():  # such as True and False, which count to 1
        raise InputError(f"client {client}: w is {w.dtype}; give floating numbers: w.float()")
    if bool((w == 1).all()):  # the usual case, without the temporaries of the checks below
        return
    odd = ~(torch.isfinite(w) & (w >= 0))
    if bool(odd.any()):
        row = int(odd.nonzero()[0])
        raise InputError(
            f"client {client}: w[{row}] is {w[row].item()}; importances are finite and 0 or more, "
            "and 0 leaves the example out"
        )
