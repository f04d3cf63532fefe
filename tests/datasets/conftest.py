"""A small PACS tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.image_fixtures import (
    write_tree,
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pacs") / "PACS")
