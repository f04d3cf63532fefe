"""A user's weight rule: its columns are registered, and clients get the weights it returns."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fedshift import FedAvg, Federation, Model, run
from fedshift.data import client_data, register
from fedshift.seeds import Seeds
from fedshift.server.combine import Mean
from fedshift.tree import Params

SIZES = (4, 16, 36)


@dataclass(frozen=True)
class Root:
    """a_i proportional to the square root of n_i, or of the count of label 0."""

    needs: tuple[str, ...] = ("n",)

    def __call__(self, table: Params) -> Tensor:
        assert {*table} >= {*self.needs}
        root = (table["labels"][:, 0] if "labels" in self.needs else table["n"]).sqrt()
        return root / root.sum()


@pytest.mark.parametrize(
    ("needs", "columns", "shares"),
    [(("n",), {"n"}, (2, 4, 6)), (("n", "labels"), {"n", "labels"}, (1, 2, 3))],
)
def test_clients_register_what_it_needs(
    needs: tuple[str, ...], columns: set[str], shares: tuple[int, ...]
) -> None:
    clients = [
        client_data(torch.ones(n, 2), (torch.arange(n) % 4 != 0).long(), i)
        for i, n in enumerate(SIZES)
    ]
    model = Model(nn.Linear(2, 2))
    method = FedAvg(model, combine=Mean(Root(needs)))
    federation = Federation(clients, *model.init(), register(clients, 2), Seeds.of(0))
    (played,) = run(method, federation, rounds=1)
    assert {*played.server["table"]} == columns
    expected = [share / sum(shares) for share in shares]
    assert played.weights.tolist() == pytest.approx(expected, abs=1e-12)
    assert ("per label" in method.reveals()["register"]) == ("labels" in needs)
