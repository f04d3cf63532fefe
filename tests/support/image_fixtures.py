"""Small PACS and iWildCam folders in their known layouts, generated."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedshift_papers.datasets import iwildcam, pacs

PER_CLASS = 4
IMAGES = len(pacs.DOMAINS) * len(pacs.CLASSES) * PER_CLASS


def colour(d: int, y: int, k: int) -> tuple[int, int, int]:
    """The colour of image k of domain d and class y."""
    return 60 * d, 30 * y, 40 * k


def png(rgb: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    """A picture of one colour."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", size, rgb).save(out, "PNG")
    return out.getvalue()


def keys() -> list[tuple[int, int, str]]:
    """(domain, class, path) of every image of the small PACS, sorted by path."""
    entries = [
        (d, y, f"{domain}/{name}/pic_{k:03d}.png")
        for d, domain in enumerate(pacs.DOMAINS)
        for y, name in enumerate(pacs.CLASSES)
        for k in range(PER_CLASS)
    ]
    return sorted(entries, key=lambda row: row[2])


def write_tree(folder: Path) -> Path:
    """The small PACS as domain/class/name.png."""
    for d, y, path in keys():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(colour(d, y, int(place.stem[-1]))))
    return folder


def write_tar(path: Path, tree: Path, top: str = "pacs96", mode: str = "w") -> Path:
    """A tar archive of a tree below `top`."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        tar.add(tree, arcname=top)
    return path


def write_metadata(path: Path, split_of: Callable[[int, str], str], reverse: bool = False) -> Path:
    """The benchmark's table; `split_of(j, domain)` names the split of image j."""
    rows = list(enumerate(keys()))
    lines = [",split,domain_remapped,domain,category,y,path"]
    for j, (d, y, key) in rows[::-1] if reverse else rows:
        domain, category = pacs.DOMAINS[d], pacs.CLASSES[y]
        lines.append(f"{j},{split_of(j, domain)},{d},{domain},{category},{y},{key}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_lists(folder: Path, ending: str, first: int, prefix: str) -> Path:
    """List files of every domain: the whole, and for training all but each class's last image."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in pacs.DOMAINS:
        entries = [(y, key) for d, y, key in keys() if pacs.DOMAINS[d] == domain]
        last = f"_{PER_CLASS - 1:03d}.png"
        for part, rows in (
            ("test", entries),
            ("train", [r for r in entries if not r[1].endswith(last)]),
        ):
            lines = [f"{prefix}{key} {y + first}" for y, key in rows]
            (folder / f"{domain}_{part}{ending}").write_text("\n".join(lines) + "\n")
    return folder


def count_as_whole(
    monkeypatch: pytest.MonkeyPatch, cameras: Sequence[int], classes: int = 4
) -> None:
    """What `write_wildcam` makes of these counts as the complete set."""
    *train, val, test = cameras
    monkeypatch.setattr(iwildcam, "COUNTS", (sum(train), val, test, 0, 0))
    monkeypatch.setattr(iwildcam, "CLASSES", classes)


def write_wildcam(
    folder: Path,
    cameras: Sequence[int] = (9, 5, 4, 3, 2, 2),
    classes: int = 4,
    size: tuple[int, int] = (12, 8),
) -> Path:
    """An iWildCam folder: camera c has cameras[c] images; the last two are val and test.

    size: width and height of the images in pixels.
    """
    (folder / "train").mkdir(parents=True)
    lines = [
        "," + "split,location_remapped,location,sequence_remapped,seq_id,y,category_id,datetime,"
        "filename,image_id"
    ]
    total = sum(cameras)
    camera = np.repeat(np.arange(len(cameras)), cameras)
    for j in range(total):
        split = {len(cameras) - 2: "val", len(cameras) - 1: "test"}.get(int(camera[j]), "train")
        y = j % classes
        lines.append(
            f"{j},{split},{camera[j]},{100 + camera[j]},{j},s{j},{y},{10 * y},"
            f"2013-01-01 00:00:{j % 60:02d}.000,image{j}.png,image{j}"
        )
        (folder / "train" / f"image{j}.png").write_bytes(
            png((j % 256, 2 * j % 256, 3 * j % 256), size)
        )
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    named = [f"{y},{10 * y},animal {y}" for y in range(classes)]
    (folder / "categories.csv").write_text(
        "\n".join(["y,category_id,name", *named, "99999,7,left out"]) + "\n"
    )
    return folder
