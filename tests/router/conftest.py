"""A router that is trained once for each file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.router.route import Router
from support.federations import make_clients
from support.routing import (
    trained_router,
)


@pytest.fixture(scope="module")
def router() -> Router:
    return trained_router()


@pytest.fixture(scope="module")
def queries() -> Tensor:
    return torch.cat([c.x for c in make_clients(seed=9)])
