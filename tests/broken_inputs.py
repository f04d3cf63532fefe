"""Fifty inputs that a user could get wrong: what is given, the exit code, the message.

`{file}` stands for the file's path. A case with `toml` runs `fedshift run`, one with `counts` and
`target` runs `fedshift diagnose`; `args` are added at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

GOOD = """\
name = "good"
[data]
name = "fashion-mnist-mini"
[shift]
kind = "sparsity"
labels_per_client = 3
[method]
name = "fedavg"
[training]
rounds = 1
"""
COUNTS = "client,cat,dog,owl\na,10,20,0\nb,0,5,5\n"
TARGET = "cat,dog,owl\n0.2,0.6,0.2\n"


@dataclass(frozen=True)
class Broken:
    """One wrong input."""

    name: str
    code: int
    message: str
    toml: str | None = None
    counts: str | bytes = COUNTS
    target: str = TARGET
    args: tuple[str, ...] = ()


def config(name: str, old: str, new: str, message: str, code: int = 2) -> Broken:
    """GOOD with one piece replaced."""
    assert old in GOOD
    return Broken(name, code, message, toml=GOOD.replace(old, new))


def option(name: str, setting: str, message: str, code: int = 2) -> Broken:
    """GOOD with one `-c` option."""
    return Broken(name, code, message, toml=GOOD, args=("-c", setting))
