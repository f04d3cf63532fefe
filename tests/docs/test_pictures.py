"""The pages' pictures are those that docs/site draws now; README's: `cli/test_end_to_end.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from fedshift.experiments.config.shift import Split

DOCS = Path(__file__).parents[2] / "docs"
PICTURES, README = DOCS / "pictures", (DOCS.parent / "README.md").read_text()
DETERMINISTIC = sorted(p.stem for p in PICTURES.glob("*.svg") if p.stem != "readme")


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_pictures_are_what_is_drawn_now(name: str, site: Any) -> None:
    if name == "tutorial":
        pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra dev)")
    stored = (PICTURES / f"{name}.svg").read_text()
    assert site("pictures").drawn(name) == stored


def test_every_picture_is_drawn_and_shown(site: Any) -> None:
    text = README + "".join(p.read_text() for p in DOCS.rglob("*.md"))
    names = {p.stem for p in PICTURES.iterdir()}
    assert names == site("pictures").PICTURES.keys()
    assert all(f"pictures/{name}.svg)" in text for name in names)


def test_every_split_stands_on_the_page() -> None:
    text = (DOCS / "label-splits.md").read_text()
    assert all(f'`"{kind}"`' in text for kind in get_args(Split.model_fields["kind"].annotation))
    keys = {"rule", "capacity", "min_size", "common_labels", "cover"}
    assert all(f"`shift.{key}`" in text for key in keys)


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.stem)
def test_labels_can_be_read_on_a_telephone(path: Path) -> None:
    """A page of the site has 357 px for a picture on a telephone of 390; 9 px is the least."""
    text = path.read_text()
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', text)
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', text)]
    assert min(sizes) * min(1.0, 357 / float(width)) >= 9
