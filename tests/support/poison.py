"""Unpicklers that raise: with FEDSHIFT_POISON=1 no test may read a pickle, but for named uses.

Put in place before anything else is imported (conftest), since `from pickle import loads` keeps
the function of that moment. Tests that start other processes leave those unguarded.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

VARIABLE = "FEDSHIFT_POISON"
# Who may: the reader of CIFAR's files, which admits no object; processes of one machine that talk
# to each other (workers, Ray); torch's own copies of values; tests that make and look at pickles.
OWN = (
    "fedshift.datasets.safe_pickle", "multiprocessing.",
    "concurrent.", "ray.", "cloudpickle.",
    "torch.multiprocessing", "hypothesis.", "test_datasets_cifar", "test_stateless",
    "test_no_pickle",
)  # fmt: skip
load, loads, Unpickler = pickle.load, pickle.loads, pickle.Unpickler


class PoisonedError(AssertionError):
    """Bytes were about to be unpickled."""


def _check(frame: Any) -> None:
    """Raise unless a caller may unpickle: tensors of a pickled model are pickles, too."""
    name = str(frame.f_globals.get("__name__", "?"))
    if name.startswith(OWN):
        return
    while frame := frame.f_back:
        if frame.f_code in (_load.__code__, _loads.__code__):
            return
    raise PoisonedError(f"{name} unpickles bytes; see tests/support/poison.py")


class Guarded(Unpickler):
    """The standard unpickler for callers that may use it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check(sys._getframe(1))
        super().__init__(*args, **kwargs)


class GuardedSlow(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """The same of the unpickler that is written in Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check(sys._getframe(1))
        super().__init__(*args, **kwargs)


def _load(*args: Any, **kwargs: Any) -> Any:
    _check(sys._getframe(1))
    return load(*args, **kwargs)


def _loads(*args: Any, **kwargs: Any) -> Any:
    _check(sys._getframe(1))
    return loads(*args, **kwargs)


def asked() -> bool:
    """Whether this process is to be poisoned."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def poison() -> None:
    """Replace the unpicklers of this process."""
    pickle.load, pickle.loads, pickle.Unpickler = _load, _loads, Guarded  # type: ignore[misc]
    pickle._Unpickler = GuardedSlow  # type: ignore[attr-defined]


if asked():
    poison()
