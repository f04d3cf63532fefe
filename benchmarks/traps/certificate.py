"""Wrong or unusual numbers given to the FedPALS weights: right, refused, or silently wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from fedshift import pals_weights
from fedshift.diagnose import diagnose
from fedshift.errors import FedshiftError
from fedshift.server.pals import effective_sample_size

COUNTS = [[40, 10], [10, 40]]
HALF = [0.5, 0.5]


def outcome(use: Callable[[], str]) -> str:
    """The verdict that `use` returns (right or silent), or how it was refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return use()
    except FedshiftError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"


def taken(what: str, given: Any, **setting: Any) -> str:
    """Refused, or taken for numbers without a word."""

    def use() -> str:
        pals_weights(given, HALF, **({"lam": 1.0} | setting))
        return f"silent: {what}"

    return outcome(use)


def certified(counts: list[list[int]], target: list[float], best: list[float], **how: Any) -> str:
    """Right where weights off by more than 1e-6 (L1, from exact arithmetic) are not certified."""

    def use() -> str:
        solved = pals_weights(counts, target, **how)
        off = float(np.abs(solved.weights - np.array(best)).sum())
        wrong = solved.certified and off > 1e-6
        return f"silent: certified weights are off by {off:.1g}" if wrong else "right"

    return outcome(use)


def trap_nearly_equal_clients_under_a_cap() -> str:
    """Two clients whose shares are 1e-7 apart, a cap, and lambda = 0."""
    counts, target = [[4876086, 14573557], [4876086, 14573559]], [0.2507030885707618]
    return certified(counts, [*target, 1 - target[0]], [0.49995, 0.50005], lam=0.0, cap=0.50005)


def trap_a_near_tie() -> str:
    """One client has 1e-14 of a label, two have none of it, at lambda = 0."""
    counts = [
        [876827722, 795223463044, 69122716015221], [1, 65257272649448, 4661543656539],
        [0, 11623637289256, 58295179016732], [0, 13030386725712, 56888429580276],
        [83384458, 68597021906091, 1321711015439],
    ]  # fmt: skip
    target, cap = [0.32931804126686764, 0.2804557112578814, 0.39022624747525103], 0.2938919212705731
    best = [cap, 0.11048007187062739, cap, 0.007844164317653253, cap]
    return certified(counts, target, best, lam=0.0, cap=cap)


def trap_a_target_beside_an_edge() -> str:
    """Four clients on a line but for 1e-12, the target the rounded middle of two of them."""
    counts = [
        [169298783160, 101593714082, 19763130559], [159189624444, 130083012970, 1382990386],
        [993194082149, 693501495045, 67410042651], [1033386272913, 743921156477, 59010629917],
    ]  # fmt: skip
    target = [0.5743415842632189, 0.3724459811260842, 0.053212434610696885]
    best = [0.500003676608229, 3.2282143162304244e-06, 0.49999309517745477, 0.0]
    return certified(counts, target, best, lam=0.0)


def trap_lambda_true() -> str:
    """`lam=True`."""
    return taken("True was taken for lambda = 1", COUNTS, lam=True)


def trap_cap_true() -> str:
    """`cap=True`, meant as "with a cap"."""
    return taken("True was taken for a cap of 1, which is none", COUNTS, cap=True)


def trap_who_holds_what() -> str:
    """A table of True and False, for the labels that clients hold, as label counts."""
    return taken("True was taken for one example", [[True, False], [True, True]])


def trap_masked_counts() -> str:
    """A masked array as label counts."""
    given = np.ma.array([[1, 900], [3, 4]], mask=[[0, 1], [0, 0]])
    return taken("a masked entry was counted", given)


def trap_complex_counts() -> str:
    """A complex array as label counts."""
    return taken("imaginary parts were dropped", np.array([[1 + 5j, 2], [3, 4]]))


def trap_dates_as_counts() -> str:
    """Dates as label counts, a wrong column of a table."""
    return taken("dates were counted as days", np.full((2, 2), "2020-01-01", "datetime64[D]"))


def trap_normalise_in_words() -> str:
    """`normalise_target="no"`."""
    return taken('"no" was taken for yes', COUNTS, normalise_target="no")


def trap_a_large_target_to_normalise() -> str:
    """A target whose sum overflows, with normalise_target."""

    def use() -> str:
        off = pals_weights(COUNTS, [1e308, 1e308], lam=0.0, normalise_target=True).distance
        return f"silent: the target became zeros, {off:.2f} away" if off > 1e-6 else "right"

    return outcome(use)


def trap_negative_weights() -> str:
    """Negative weights given to effective_sample_size."""

    def use() -> str:
        return f"silent: they were left out, ESS {effective_sample_size([1.5, -0.5], [9, 9]):g}"

    return outcome(use)


def trap_labels_as_one_text() -> str:
    """`classes="ab"` given to diagnose."""

    def use() -> str:
        named = [x.name for x in diagnose(COUNTS, HALF, classes="ab").labels]
        return f"silent: the labels are called {named}"

    return outcome(use)
