"""What users could name at commit 2a94808c is there, but for what went on purpose."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
# Compact, as `python benchmarks/inventory.py TREE --compact` prints it.
BEFORE = HERE / "inventory.txt"
# Lines "item: reason"; the item is as the script prints it, and may have "*" in it.
GONE = HERE / "gone.txt"


def items(text: str) -> set[str]:
    """The items of a compact list."""
    groups = (line.partition(": ") for line in text.splitlines())
    return {f"{group} {last}" for group, _, words in groups for last in words.split()}


def test_nothing_that_users_can_name_is_lost() -> None:
    """A loss is mended, or gets a line with its reason in gone.txt and in the changelog."""
    command = [sys.executable, str(ROOT / "benchmarks" / "inventory.py"), str(ROOT), str(BEFORE)]
    done = subprocess.run([*command, "--compact"], capture_output=True, text=True, check=True)
    lost = items(BEFORE.read_text(encoding="utf-8")) - items(done.stdout)
    lines = [line.partition(": ") for line in GONE.read_text(encoding="utf-8").splitlines()]
    assert all(reason.strip() for _, _, reason in lines)
    unread = [line for line in done.stdout.splitlines() if line.startswith("unread")]
    assert not unread
    assert not sorted(i for i in lost if not any(fnmatchcase(i, name) for name, *_ in lines))
    assert not [n for n, *_ in lines if not any(fnmatchcase(i, n) for i in lost)]  # no stale line
