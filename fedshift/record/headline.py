"""The main number of a run in words: the accuracy at the target, or the error of numbers."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedshift.record.summary import Summary

NOTHING = "–"
# Pooled over the rows: each client's own model on its own test rows.
OWN = "oracle_routed"
OWN_MODELS = "accuracy of the clients' own models"


# Targets, in a task's words, without rows of their own: they are shares, counts or a mixture.
_WITHOUT_ROWS = ("the given label shares", "the given counts of", "the clients' labels together")


class Headline(NamedTuple):
    """The main number's name, its value, and its estimate from clients alone with its error."""

    name: str
    value: str
    estimate: str


def headline(summary: Summary) -> Headline:
    """Of numbers the root mean squared error, in their units; else the accuracy, in percent.

    Where clients serve models of their own, the accuracy is theirs, see `main_accuracy`.
    """
    final = summary.final
    if summary.kind == "regression":
        others = final.others
        value, near = (_finite(others.get(k)) for k in ("rmse", "estimated_rmse"))
        loss_se = _finite(others.get("estimated_loss_se"))
        # The error of a root is that of the square, by its derivative.
        error = loss_se / (2 * near) if near else math.nan
        return Headline("target RMSE", digits(value), _with_error(digits(near), digits(error)))
    name = "subset accuracy" if summary.kind == "multilabel" else "target accuracy"
    if serves_own(summary):
        name = OWN_MODELS
    estimate = _with_error(percent(final.estimated_accuracy), percent(final.estimated_se))
    return Headline(name, percent(main_accuracy(summary)), estimate)


def main_accuracy(summary: Summary) -> float | None:
    """At the target; of clients that are tested on their own rows, each by the model it serves.

    The estimate and `compare` measure the same models. What all models say together of any
    client's rows is `system_accuracy`.
    """
    final = summary.final
    value = final.others.get(OWN, final.target_accuracy)
    return None if value is None else float(value)


def serves_own(summary: Summary) -> bool:
    """Whether clients serve models that differ, on rows of their own."""
    others = summary.final.others
    # Of one model for all, these three are the same count of the same rows.
    return (
        OWN in others
        and len({others.get(k) for k in (OWN, "vote_accuracy", "global_accuracy")}) > 1
    )


def without_rows(target: str) -> bool:
    """Whether the clients' test rows stand for the target, drawn so that labels have its shares.

    target: as fit.json says it; "" for one of the library's data sets.
    """
    return target.startswith(_WITHOUT_ROWS)


def target_words(fit: Mapping[str, Any], config: str) -> str:
    """Where the model will be used, in words; "" where these say nothing.

    fit: fit.json, of what `fedshift.fit` trained. config: the run's TOML, whose data.target shares
    of labels may stand for a target without rows.
    """
    if "target" in fit:
        return str(fit["target"])
    data = tomllib.loads(config).get("data", {})
    given = data.get("target") if "source" in data else None
    if isinstance(given, dict | list):
        return "the given label shares"
    return "the clients' labels together" if given == "pooled" else ""


def measured_on(targets: Iterable[str]) -> str:
    """The rows that an accuracy or error at these targets was measured on, in words."""
    kinds = {without_rows(target) for target in targets}
    of_its, of_clients = (
        "the target's own labelled test data",
        "the clients' test rows, drawn again so that their labels have the target's shares (no "
        "row is from the target)",
    )
    if kinds == {True}:
        return of_clients
    return f"{of_its} or, where it has none, on {of_clients}" if True in kinds else of_its


def validated_by(deployed: Iterable[Mapping[str, Any]]) -> str:
    """Who scored the clients' validation examples of these runs, in a sentence; see `DEPLOYED`.

    Only clients on machines of their own have any that are not here.
    """
    runs = list(deployed)
    apart = [run for run in runs if run]
    words = []
    if any(run.get("measured_by") == "clients" for run in apart):
        words.append(
            "the clients scored the model on their own validation examples and sent sums by label"
        )
    if len(apart) < len(runs):
        words.append(
            "the process of the run scored the clients' validation examples, which it has itself"
        )
    text = "; elsewhere ".join(words)
    tests = {
        "server": "The server scored the test examples, which it has itself.",
        "clients": "Each client tested the model that it serves on its own test examples.",
    }
    tested = [tests[who] for who in tests if any(run.get("tested_by") == who for run in apart)]
    return " ".join([f"{text[:1].upper()}{text[1:]}." * bool(text), *tested]).strip()


def percent(share: float | str | None, places: int = 1) -> str:
    """A fraction as percent; a dash for none."""
    if not isinstance(share, float | int) or math.isnan(share):
        return NOTHING
    return f"{100 * share:.{places}f} %"


def digits(value: float | None) -> str:
    """Four digits of a number; a dash for none."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.4g}"


def _finite(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _with_error(value: str, error: str) -> str:
    return NOTHING if value == NOTHING else f"{value} ± {error}"
