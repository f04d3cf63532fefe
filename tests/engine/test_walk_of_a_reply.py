"""The files that a reply passes from a worker to the sums, compared with ARCHITECTURE.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedshift
from fedshift import recipes
from fedshift.engine.backends import Backend
from fedshift.engine.device import on
from fedshift.engine.processes.pool import workers
from fedshift.engine.run import run
from fedshift.recipes import Setting
from support.federations import make_federation

ROOT = Path(fedshift.__file__).parent
PAGE = Path(__file__).parents[2] / "ARCHITECTURE.md"
MOST = 8
# What begins and what ends a walk: an event, in a function, of a file.
Event = tuple[str, str, str]
WORKER = (
    ("return", "client_update", "algorithms/fedavg.py"),
    ("call", "_write", "processes/pipe.py"),
)
MAIN = ("call", "receive", "processes/pipe.py"), ("return", "accumulate", "tree.py")
# These do not see the reply: what the method had sent, the next job, and the checks that training
# wrote into none of its arguments and
# drew no unforeseen random numbers.
ASIDE = {
    ("message", "engine/round.py"),
    ("jobs_of", "engine/round.py"),
    ("_check_unwritten", "engine/backends.py"),
}
ASIDE_FILES = {"repeating.py", "randomness.py"}

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers are forked")


class Walk:
    """A profiler that records the package's files whose functions are called between two events."""

    def __init__(self, first: Event, last: Event, out: Path) -> None:
        self.first, self.last, self.out = first, last, out
        self.files: list[str] = []
        self.aside, self.began = set[int](), False

    def __call__(self, frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(ROOT):
            return
        function, file = frame.f_code.co_name, str(path.relative_to(ROOT))
        if self.began and ((function, file) in ASIDE or file in ASIDE_FILES):
            (self.aside.add if event == "call" else self.aside.discard)(id(frame))
        here = event, function, file.removeprefix("engine/")
        self.began = self.began or here == self.first
        if self.began and event == "call" and not self.aside and file not in self.files:
            self.files.append(file)
        if self.began and here == self.last:
            self.out.write_text("\n".join(self.files))
            sys.setprofile(None)


@contextmanager
def noted(walk: tuple[Event, Event], out: Path) -> Iterator[None]:
    """Record the walk in this thread, and in processes forked from it."""
    sys.setprofile(Walk(*walk, out))
    try:
        yield
    finally:
        sys.setprofile(None)


def written() -> list[str]:
    """The files of the list in ARCHITECTURE.md."""
    text = PAGE.read_text().partition("**A reply's way to the sums")[2]
    return re.findall(r"^\d\. `([\w/.]+)`", text, re.MULTILINE)


def walked(
    setting: Setting, folder: Path, by: Callable[[Backend], Backend] = lambda team: team
) -> list[str]:
    """The walk of a round of one client, trained in another process; `by` may wrap the backend."""
    federation, algorithm = make_federation(setting.model), recipes.fedavg(setting)
    list(run(algorithm, federation, 1, cohort=1))  # what is asked of a network once is known
    with noted(WORKER, folder / "worker"), workers(federation.clients, 1) as team:
        sys.setprofile(None)
        rounds = run(algorithm, federation, 1, cohort=1, backend=by(team))
        with noted(MAIN, folder / "main"):
            next(rounds)
    return [file for part in ("worker", "main") for file in (folder / part).read_text().split()]


def test_a_reply_goes_as_written(setting: Setting, tmp_path: Path) -> None:
    """In the worker from the end of training to the write, in this process from read to sum."""
    files = [*dict.fromkeys(walked(setting, tmp_path))]
    assert files == written()
    assert len(files) <= MOST


def test_a_detour_is_seen(setting: Setting, tmp_path: Path) -> None:
    """The control: what brings replies back from a device is a file more."""
    detour = walked(setting, tmp_path, partial(on, "cpu"))
    assert "engine/device.py" in set(detour) - set(written())
