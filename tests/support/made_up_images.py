"""Random images in the layouts of the data sets that the papers use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedshift.datasets import registry
from support.dataset_fixtures import write_cifar_100, write_cifar_batches
from support.site_fixtures import write_tree
from support.writer_fixtures import write_digits


def write_images(place: Path, patch: pytest.MonkeyPatch) -> Path:
    """Write small CIFAR-10, CIFAR-100, RETINA and FEMNIST's digits to their usual folders."""
    source = np.random.default_rng(0)
    images = source.integers(0, 256, (800, 3, 32, 32), dtype=np.uint8)
    ten, hundred = [i % 10 for i in range(120)], [i % 100 for i in range(800)]
    write_cifar_batches(place / "cifar-10-batches-py", images[:120], ten)
    write_cifar_100(place / "cifar-100-python", images, hundred)
    write_tree(place / "retina")
    write_digits(place)
    patch.setenv("FEDSHIFT_DATA", str(place))
    # The official sets have 60,000 images; everything else is checked as ever.
    entry = registry.entry
    patch.setattr(registry, "entry", lambda name: replace(entry(name), self_checked=True))
    return place
