"""The locked packages are those of constraints.txt, each with hashes, and name no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Versions by package."""
    return {plain(n): v for n, v in re.findall(r"(?m)^([\w.-]+)==([^\s;\\]+)", text)}


LOCK, TORCH = ((ROOT / name).read_text() for name in ("requirements.lock", "torch.lock"))
ASKED = pins((ROOT / "constraints.txt").read_text())


def test_the_same_versions_each_with_hashes() -> None:
    locked = pins(LOCK)
    assert len(locked) > 60
    assert {name: v for name, v in locked.items() if ASKED.get(name, v) != v} == {}
    for piece in re.split(r"(?m)^(?=\w)", LOCK)[1:]:
        assert "--hash=sha256:" in piece, piece
    assert "://" not in LOCK + TORCH
    assert not re.search(r"(?m)^(nvidia|cuda|triton)", LOCK)


def test_what_a_federations_machines_need_is_locked() -> None:
    """`make lock` again where a dependency is new."""
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [*PROJECT["project"]["dependencies"]]
    needed += [one for extra in ("flower", "ops", "report") for one in extras[extra]]
    names = {plain(re.split(r"[^\w.-]", one)[0]) for one in needed}
    assert names - pins(LOCK).keys() == set()


def test_one_version_of_torch() -> None:
    (metadata,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    version = ASKED["torch"]
    assert metadata["version"] == version == pins(LOCK)["torch"]
    assert re.fullmatch(rf"torch=={version}(\+\w+)? --hash=sha256:[0-9a-f]{{64}}\n", TORCH)
