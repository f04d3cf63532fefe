"""Federations of very many clients: made on demand, from one pool of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from fedshift.data import ClientData, client_data
from fedshift.errors import InputError
from fedshift.sketch import sketched
from fedshift.tree import Params


@sketched
@dataclass(frozen=True, eq=False)
class Pooled(Sequence[ClientData]):
    """Clients that are ranges of one pool of examples; each is made when it is accessed.

    x [P, ...], y [P]  the pool's examples; x may be mapped from disk
    starts, sizes [N]  client i has the rows starts_i, ..., starts_i + sizes_i - 1; ranges may
                       overlap, and may be empty

        clients = Pooled(x[order], y[order], starts, sizes)
        federation = Federation(clients, *model.init(), register(clients, classes), Seeds.of(0))

    A client takes 16 bytes here, and its row of the server's table 8 (1 + K) bytes. Raises
    InputError for what `fedshift.data.client_data` refuses, and for ranges that leave the pool.
    """

    x: Tensor
    y: Tensor
    starts: Tensor
    sizes: Tensor

    def __post_init__(self) -> None:
        # Check the whole pool once, here, because clients are slices of it.
        object.__setattr__(self, "y", client_data(self.x, self.y, 0).y)
        for name in ("starts", "sizes"):
            values = getattr(self, name)
            if values.ndim != 1 or values.is_floating_point() or len(values) != len(self.starts):
                raise InputError(
                    f"{name}: give one whole number per client, [N]; got {values.dtype} "
                    f"{tuple(values.shape)}"
                )
            object.__setattr__(self, name, values.long())
        outside = (self.starts < 0) | (self.sizes < 0) | (self.starts + self.sizes > len(self.y))
        if bool(outside.any()):
            i = int(outside.nonzero()[0])
            raise InputError(
                f"client {i}: {int(self.sizes[i])} examples from row {int(self.starts[i])} on, in "
                f"a pool of {len(self.y)}"
            )

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, client: int) -> ClientData: ...

    @overload
    def __getitem__(self, client: slice) -> list[ClientData]: ...

    def __getitem__(self, client: int | slice) -> ClientData | list[ClientData]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        i = client + len(self) if client < 0 else client
        if not 0 <= i < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        # A slice copies nothing, so x stays mapped from disk; an index tensor would copy.
        rows = slice(int(self.starts[i]), int(self.starts[i] + self.sizes[i]))
        y = self.y[rows]
        return ClientData(self.x[rows], y, torch.ones(len(y)), torch.tensor(i))

    def register(self, classes: int) -> Params:
        """n [N] and labels [N, K], float64; InputError for a label that is not below K."""
        if self.largest_label() >= classes:
            raise InputError(
                f"the pool has label {self.largest_label()}; with {classes} classes labels are "
                f"0..{classes - 1}: give register a larger number of classes"
            )
        # Label by label, in O(P + N) memory; a one-hot table of all rows would take O(P K).
        labels = torch.empty(len(self), classes, dtype=torch.float64)
        for k in range(classes):
            # before[r] is the number of rows before r with label k, so the count in a range is a
            # difference of two entries.
            before = torch.zeros(len(self.y) + 1, dtype=torch.int64)
            torch.cumsum(self.y == k, 0, out=before[1:])
            labels[:, k] = (before[self.starts + self.sizes] - before[self.starts]).double()
        return {"n": self.sizes.double(), "labels": labels}

    def largest_label(self) -> int:
        """The largest label in the pool; -1 without examples."""
        return int(self.y.max()) if len(self.y) else -1
