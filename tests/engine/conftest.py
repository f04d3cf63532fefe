"""Eight clients whose sums are taken side by side."""

from __future__ import annotations

import pytest

from fedshift.engine.run import Federation
from fedshift.recipes import Setting
from support.federations import make_clients, make_federation
from support.odd_work import SIZES


@pytest.fixture
def federation(setting: Setting) -> Federation:
    return make_federation(setting.model, make_clients(sizes=SIZES))
