"""What a run needs besides its algorithm: clients, first model, seeds, gate and shelf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedshift.arguments import called, check_kind
from fedshift.data import ClientData, Surveyed, check_clients, of_importance
from fedshift.engine.checks.gate import Gate
from fedshift.engine.checks.replies import not_finite
from fedshift.engine.storage.client_states import Shelf
from fedshift.errors import InputError, shown
from fedshift.seeds import Seeds
from fedshift.tree import Params, ordinary

TABLE = "make it with fedshift.data.register(clients, classes)"


@dataclass(frozen=True)
class Federation:
    """Clients, first model and seeds: all that a run needs besides the algorithm.

    clients          as `fedshift.data.client_data` makes them; their ids are their positions.
                     Examples of importance 0 are left out
    params, buffers  the first model, most often `Model.init()`
    table            what clients registered (n [N], labels [N, K]): `fedshift.data.register`
    seeds            `fedshift.seeds.Seeds.of(seed)`
    gate             which replies are accepted
    shelf            where clients' states are kept between rounds

    `fedshift.run` has an example. Raises InputError for clients that do not fit together
    (`fedshift.data.check_clients`), a table without a row per client, and fields of other types.
    """

    clients: Sequence[ClientData]
    params: Params
    buffers: Params
    table: Params
    seeds: Seeds
    gate: Gate = Gate()
    shelf: Shelf = Shelf()

    def __post_init__(self) -> None:
        check_federation(self)
        # Tensors made in inference mode are copied, because no gradient can be taken of them. Those
        # with a history of gradients lose it: examples are not trained.
        for name in ("params", "buffers", "table"):
            object.__setattr__(self, name, ordinary(getattr(self, name)))
        clients = of_importance(self.clients)
        if not isinstance(clients, Surveyed) and any(
            v.is_inference() or v.requires_grad for c in clients for v in c
        ):
            clients = tuple(
                ClientData(**{k: v.detach() for k, v in ordinary(c._asdict()).items()})
                for c in clients
            )
        object.__setattr__(self, "clients", clients)

    @cached_property
    def infinite(self) -> Params:
        """Buffers that are not finite from the start, see `engine.checks.gate.Asked`."""
        return not_finite(self.buffers)

    def __repr__(self) -> str:
        sizes = self.table["n"]
        labels = f"{self.table['labels'].shape[1]} labels, " if "labels" in self.table else ""
        return (
            f"Federation({len(self.clients)} clients, {int(sizes.sum()):,} examples, {labels}"
            f"{sum(v.numel() for v in self.params.values()):,} parameters, {self.seeds})"
        )


def check_federation(made: Federation) -> None:
    """Raise InputError unless a federation's fields have the right types and fit together."""
    check_clients(made.clients)
    check_params("params", made.params)
    check_params("buffers", made.buffers)
    check_table(made.table, len(made.clients))
    check_kind("seeds", made.seeds, Seeds, f"give {_seeds(made.seeds)}")
    check_kind("gate", made.gate, Gate, "give Gate()")
    check_kind("shelf", made.shelf, Shelf, "give Shelf()")


def _seeds(given: object) -> str:
    return f"Seeds.of({given})" if isinstance(given, int) else "Seeds.of(0)"


def check_params(what: str, given: object) -> None:
    """Raise InputError unless `given` is a dictionary of tensors that require no gradient."""
    cure = "give *model.init(), or the parameters and buffers of a round's server"
    if not isinstance(given, dict):
        raise InputError(f"{what} must be a dictionary of tensors, got {called(given)}; {cure}")
    for name, v in given.items():
        if not isinstance(name, str) or not isinstance(v, Tensor):
            raise InputError(
                f"{what}[{name!r}] is {called(v)}; give tensors by name, as torch.as_tensor(...) "
                "makes them of arrays"
            )
        if v.requires_grad:
            raise InputError(
                f'{what}["{name}"] carries a gradient\'s history (requires_grad); give '
                "*model.init(), or detach() it"
            )


def check_table(table: object, clients: int) -> None:
    """Raise InputError unless the table has a row per client of counts: "n", maybe "labels"."""
    if not isinstance(table, dict):
        raise InputError(f"table must be a dictionary of tensors, got {called(table)}; {TABLE}")
    if "n" not in table:
        has = ", ".join(f'"{shown(str(name))}"' for name in table)
        raise InputError(f'the table has {has or "no column"}, and "n" is missing; {TABLE}')
    for name, column in table.items():
        if not isinstance(column, Tensor):
            raise InputError(f'the table\'s "{name}" is {called(column)}, no tensor; {TABLE}')
        if column.ndim < 1 or len(column) != clients:
            count = len(column) if column.ndim else 0
            raise InputError(
                f'{clients} clients and {count} rows of "{name}" in the table; {TABLE}'
            )
        form = 1 if name == "n" else 2 if name == "labels" else column.ndim
        if column.ndim != form or column.dtype != torch.float64:
            raise InputError(
                f'the table\'s "{name}" is {column.dtype} {tuple(column.shape)}; "n" is float64 '
                f'[N], "labels" float64 [N, K]: {TABLE}'
            )
        if not bool(torch.isfinite(column).all()) or bool((column < 0).any()):
            raise InputError(
                f'the table\'s "{name}" holds a number that is negative or not finite; {TABLE}'
            )
    if "labels" in table:
        _check_counts(table["n"], table["labels"])


def _check_counts(n: Tensor, labels: Tensor) -> None:
    """Raise InputError for label shares in place of counts; counts with noise are no shares."""
    sums = labels.sum(1)
    if bool((n > 1).all()) and bool(((sums - 1.0).abs() < 1e-6).all()):
        raise InputError(
            f'each row of the table\'s "labels" sums to 1, and client 0 has {float(n[0]):g} '
            f"examples: these are shares, and counts are due; {TABLE}"
        )
