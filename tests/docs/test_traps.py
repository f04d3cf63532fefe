"""Uses that once failed silently: each is answered rightly now, or refused in a sentence."""

from __future__ import annotations

import pytest

from support.benchmark_files import load_benchmark

run = load_benchmark("traps/run.py")
TRAPS = list(run.traps())


@pytest.mark.few(3)
@pytest.mark.parametrize("trap", TRAPS, ids=lambda t: f"{t.area}-{t.name}")
def test_nothing_passes_in_silence(trap: object) -> None:
    result = run.outcome(trap)
    assert result.partition(":")[0] in ("right", "refused"), result


def test_the_outcomes_can_be_bad() -> None:
    """A control: silence, another kind of error and a trap without an answer are distinguished."""

    def fails() -> str:
        raise KeyError("x")

    for try_it, kind in (
        (lambda: "silent: wrong", "silent"),
        (fails, "raw"),
        (lambda: "well", "raw"),
    ):
        assert run.outcome(run.Trap("area", "trap_x", "a use", try_it)).startswith(kind)
