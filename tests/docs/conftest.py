"""What tests of the documentation share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of docs/site."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "site"))
    return importlib.import_module
