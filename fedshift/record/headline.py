"""The main number of a run in words: the accuracy at the target, or the error of numbers."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fedshift.record.summary import Summary

NOTHING = "–"
# The metric of clients' own models on their own test rows, over all rows together.
OWN = "oracle_routed"
OWN_MODELS = "accuracy of the clients' own models"


# How targets without rows of their own begin, in a task's words.
_WITHOUT_ROWS = ("the given label shares", "the given counts of", "the clients' labels together")


class Headline(NamedTuple):
    """The main number: name, value, and its estimate from the clients alone, with an error."""

    name: str
    value: str
    estimate: str


def headline(summary: Summary) -> Headline:
    """The main number of a run: in regression the RMSE in units of y, else the accuracy in percent.

    If clients serve models of their own, it is the accuracy of these, see `main_accuracy`.
    """
    final = summary.final
    if summary.kind == "regression":
        others = final.others
        value, near = (_finite(others.get(k)) for k in ("rmse", "estimated_rmse"))
        loss_se = _finite(others.get("estimated_loss_se"))
        # The standard error of a square root, by the delta method.
        error = loss_se / (2 * near) if near else math.nan
        return Headline("target RMSE", digits(value), _with_error(digits(near), digits(error)))
    name = "subset accuracy" if summary.kind == "multilabel" else "target accuracy"
    if serves_own(summary):
        name = OWN_MODELS
    estimate = _with_error(percent(final.estimated_accuracy), percent(final.estimated_se))
    return Headline(name, percent(main_accuracy(summary)), estimate)


def main_accuracy(summary: Summary) -> float | None:
    """The accuracy at the target; if clients serve models of their own, of each on its own rows.

    The estimate and `compare` measure the same models. (`system_accuracy` is that of all models
    together, on the rows of all clients.)
    """
    final = summary.final
    value = final.others.get(OWN, final.target_accuracy)
    return None if value is None else float(value)


def serves_own(summary: Summary) -> bool:
    """Whether clients serve different models, each on rows of its own."""
    others = summary.final.others
    # With one model for all, these three accuracies are the same number.
    return (
        OWN in others
        and len({others.get(k) for k in (OWN, "vote_accuracy", "global_accuracy")}) > 1
    )


def without_rows(target: str) -> bool:
    """Whether the target has no rows of its own, so that clients' test rows stand for it.

    target: in the words of fit.json; "" for one of the library's data sets.
    """
    return target.startswith(_WITHOUT_ROWS)


def target_words(fit: Mapping[str, Any], config: str) -> str:
    """Where the model will be used, in words; "" if it is not recorded.

    fit: fit.json of a run of `fedshift.fit`. config: the run's TOML, whose data.target may be label
    shares.
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
    """A sentence on where the validation examples of these runs were scored; see `DEPLOYED`.

    They may have been scored by the clients, if these are on machines of their own.
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
    """A fraction as percent; a dash for None and NaN."""
    if not isinstance(share, float | int) or math.isnan(share):
        return NOTHING
    return f"{100 * share:.{places}f} %"


def digits(value: float | None) -> str:
    """A number with four digits; a dash for None and NaN."""
    return NOTHING if value is None or math.isnan(value) else f"{value:.4g}"


def _finite(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _with_error(value: str, error: str) -> str:
    return NOTHING if value == NOTHING else f"{value} ± {error}"
