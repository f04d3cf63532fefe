"""summary.json: the schema by which it is written, read and checked.

Fields are in the order of the file. Those with a default may be missing. A number that is not
finite is null (NaN) or the text "inf".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from fedshift.files import clean
from fedshift.record.rounds import Metrics

Number = Annotated[float, Field(allow_inf_nan=False)] | Literal["inf", "-inf"]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Lambda = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["inf"] | None
# The bound is a little above 1, since some portions are sums of fractions.
Portion = Annotated[float, Field(ge=0, le=1 + 1e-9, allow_inf_nan=False)]
Mass = Annotated[float, Field(ge=0, le=1 + 1e-6, allow_inf_nan=False)]
# Sentences on what a correction does to the logits, by `Corrected.form`.
CORRECTED = {
    "target": "Corrected: the same model with log T - log p added to its logits, p being the label "
    "shares that it was trained on; this takes no training and no message.",
    "calibrated": "Corrected: the same model, calibrated on the clients' validation examples, with "
    "log T - log p added to its logits, p being the label shares of these examples.",
}
Matrix = tuple[tuple[Portion | None, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """The last model's logits z, moved to the target's labels: scale z + bias; see docs.

    form        "target": log T - log p, p being `trained_on`; "calibrated": by a calibrator
    trained_on  [K] label shares of the mixture that the model was trained on
    bias        [K], for the target of this run; correctable [K]: False where a label keeps log T
                alone, since the model hardly saw it
    calibrator_bias, prior, counts  [K], of the clients' validation examples. With them and `scale`
                a correction for another target needs no training and no message
    """

    form: Literal["target", "calibrated"]
    trained_on: tuple[Portion, ...]
    scale: Share
    bias: tuple[Number, ...]
    correctable: tuple[bool, ...]
    calibrator_bias: tuple[Number, ...] | None = None
    prior: tuple[Portion, ...] | None = None
    counts: tuple[Count, ...] | None = None


@dataclass(frozen=True)
class Cohorts:
    """The number of clients that a round draws, and of rounds that the weights are means over."""

    clients: Positive
    rounds: Positive


@dataclass(frozen=True)
class CurvePoint:
    """One lambda: the ESS it reaches and how far its mixture is from the target (L2 and L1)."""

    lam: Lambda
    ess_fraction: Share
    distance: Share
    l1: Share


@dataclass(frozen=True, kw_only=True)
class Final:
    """The last evaluation: target and estimate, recall per class [K], accuracy per client [M].

    others          numbers that only some runs have: accuracies of served models and refitted
                    routers, "sets_..." on absent labels, the user's metrics, and metrics of tasks
                    without classes. In the file they are entries of "final" itself
    client_metrics  metrics of tasks without classes, for each client: on its own test examples if
                    it has any, else on its validation examples
    bytes_*         of the tensors of the last round's messages, as a mean over clients, and of the
                    whole model
    *_corrected     with the logits moved to the target's labels, see `Corrected`; estimates only
                    if `training.prior` is not "none"
    """

    round: Positive
    target_accuracy: Share | None
    target_loss: Number | None
    target_macro_f1: Share | None = None
    target_recall: tuple[Share | None, ...]
    recall_estimate: tuple[Share | None, ...]
    estimated_accuracy: Share | None
    estimated_se: Number | None
    validation_accuracy: Number | None = None
    validation_loss: Number | None = None
    source_accuracy: Share | None = None
    target_accuracy_corrected: Share | None = None
    target_loss_corrected: Number | None = None
    estimated_accuracy_corrected: Share | None = None
    estimated_se_corrected: Number | None = None
    others: Mapping[str, Number | None] = field(default_factory=dict, metadata={"spread": True})
    bytes_down: Count | None = None
    bytes_up: Count | None = None
    bytes_model: Count | None = None
    client_accuracy: tuple[Share | None, ...]
    client_metrics: Mapping[str, tuple[Number | None, ...]] = field(
        default_factory=dict, metadata={"if any": True}
    )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One ESS that a selection rule could choose, with the numbers that the rules compare.

    losses: in regression, in place of accuracies; the smaller the better.
    """

    label: str
    ess_fraction: Share | None
    estimated_accuracy: Share | None
    estimated_se: Number | None
    validation_accuracy: Share | None
    source_accuracy: Share | None = None
    target_accuracy: Share | None
    target_accuracy_corrected: Share | None = field(default=None, metadata={"if any": True})
    losses: Mapping[str, Number | None] = field(default_factory=dict, metadata={"if any": True})


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The candidate that was used, the rule that picked it, and the picks of all rules."""

    rule: str
    chosen: str | int | None
    picks: dict[str, str] | None = None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class RouterDetails:
    """How well a router does on all test examples: sent, auc [M][M], coverage and risk [P].

    sent[i][j] is the share of client i's queries that are sent to client j.
    """

    sent: Matrix
    auc: Matrix
    coverage: tuple[Portion, ...]
    risk: tuple[Portion, ...]
    aurc: Portion
    ece: Portion
    brier: Share


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Clients' own models on their own test examples: class_accuracy [M][K], client_accuracy [M].

    looks [M] says what sets each client's inputs apart. Early versions did not write looks and
    client_accuracy.
    """

    looks: tuple[str, ...] | None = None
    client_accuracy: tuple[Portion | None, ...] | None = None
    class_accuracy: Matrix
    router: RouterDetails | None


def _of_rounds(last: dict[str, Any]) -> dict[str, Any]:
    for name in ("round", "rounds"):
        if not isinstance(last.get(name), int | float):
            raise ValueError(f'a number "{name}" is needed')
    # None if the clients' models stayed at their sites: then they cannot answer as a system.
    if not isinstance(last.get("system_accuracy", ""), int | float | None):
        raise ValueError('a number "system_accuracy" is needed')
    return last


# Means over the last rounds by name, and deviations under the name with "_sd".
Last = Annotated[dict[str, Number | None], AfterValidator(_of_rounds)]


@dataclass(frozen=True)
class Optima:
    """Accuracies on the server's labelled examples: of the aggregate, and of each loss's optimum.

    gain_se  the standard error of each optimum's gain over the aggregate, paired by example
    """

    aggregate: Portion
    mse: Portion
    pairwise: Portion
    kl: Portion
    gain_se: dict[str, Portion] | None = field(default=None, metadata={"if any": True})

    @property
    def gains(self) -> dict[str, float]:
        """By loss, the accuracy of its optimum minus the aggregate's."""
        return {k: getattr(self, k) - self.aggregate for k in ("mse", "pairwise", "kl")}

    def gain_text(self, loss: str) -> str:
        """A gain in points, and its standard error; one of 0 without a gain is no certainty."""
        gain, error = 100 * self.gains[loss], (self.gain_se or {}).get(loss)
        if error is None:
            return f"{gain:+.1f}"
        return f"{gain:+.1f} ± {100 * error:.1f}" if error or gain else "+0.0 (no example changed)"


@dataclass(frozen=True)
class SetRound:
    """Label sets after one evaluated round; None for numbers that the method does not have.

    absent      labels that no client of this round's cohort has
    loss_*      central tuning's loss before and after its steps
    outside_*   mean mass that the model then gives to the absent labels, on the server's inputs
    optima      where each loss would lead, if the server has labelled examples
    """

    round: Whole
    absent: Whole
    loss_before: Share | None = None
    loss_after: Share | None = None
    outside_before: Mass | None = None
    outside_after: Mass | None = None
    optima: Optima | None = field(default=None, metadata={"if any": True})


@dataclass(frozen=True, kw_only=True)
class LabelSets:
    """How many clients hold each label, and in how many rounds it was absent, both [K].

    mode, tune, tune_over are the method's options; None in folders of early versions.
    labelled: examples of the server on which optima are measured, if it has some.
    single: clients that hold one label alone.
    """

    mode: str | None = None
    tune: str | None = None
    tune_over: Literal["all", "union"] | None = None
    labelled: Whole | None = field(default=None, metadata={"if any": True})
    holders: tuple[Whole, ...]
    absent_rounds: tuple[Whole, ...]
    single: tuple[Whole, ...] = field(default=(), metadata={"if any": True})
    rounds: tuple[SetRound, ...]

    @property
    def rows_move(self) -> bool | None:
        """Whether an absent label's row of the head changes in that round; None if unknown."""
        if self.mode is None or self.tune is None:
            return None
        return self.mode == "public" or self.tune_over == "all"


@dataclass(frozen=True)
class Differences:
    """Distances [d][d] between the d `clients`, null for a pair without a value.

    mean is taken over these pairs, mean_all (without domain_auc) over all pairs of clients. looks
    [M] says what sets each client's inputs apart; null if only their origin does.
    """

    clients: tuple[int, ...]
    examples: int
    domain_auc: Matrix
    js: Matrix
    hellinger: Matrix
    variation: Matrix
    mean: dict[str, Portion | None]
    mean_all: dict[str, Portion | None]
    looks: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Importance:
    """Effective sample sizes under example weights [M], null for clients without weights."""

    ess: tuple[Share | None, ...]
    share: tuple[Portion | None, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`: K classes, M clients; label_counts [M, K], target [K], weights [M].

    kind           if no classes are predicted: classes are then bins of numbers, or sets of labels
    distance, l1_distance  from the target to the mixture that the run trained on
    cohorts        if rounds draw some of the clients
    last, serving  if clients serve models of their own; None otherwise
    label_sets     for methods with label sets
    differences    if the clients' inputs differ
    importance     for methods that weigh examples
    why            sentences on the results
    """

    fedshift: str | None
    name: str
    method: str
    dataset: str
    kind: Literal["regression", "multilabel"] | None = field(
        default=None, metadata={"if any": True}
    )
    classes: tuple[str, ...]
    target: tuple[Share, ...]
    label_counts: tuple[tuple[Whole, ...], ...]
    weights: tuple[Share, ...]
    fedavg_weights: tuple[Share, ...]
    lam: Lambda
    ess: Share | None
    ess_fraction: Share | None
    distance: Share | None
    l1_distance: Share | None
    certified: bool | None
    hull_distance: Share | None = None
    cohorts: Cohorts | None = None
    curve: tuple[CurvePoint, ...]
    unmeasured_mass: Share | None = None
    final: Final
    best: Metrics | None = None
    corrected: Corrected | None = None
    last: Last | None = None
    serving: Serving | None = None
    label_sets: LabelSets | None = None
    differences: Differences | None = None
    importance: Importance | None = None
    missing: dict[str, Whole] | None = None
    selection: Selection | None
    why: tuple[str, ...]


def corrected_by(forms: Iterable[str | None]) -> list[str]:
    """Sentences on the corrections of runs' models, by their forms."""
    return [CORRECTED[form] for form in sorted({form for form in forms if form})]


_SUMMARY = TypeAdapter(Summary)


def written(summary: Summary) -> str:
    """The text of summary.json."""
    return json.dumps(clean(_plain(summary)), indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, in the order of their fields."""
    if is_dataclass(value):
        plain: dict[str, Any] = {}
        for one in fields(value):
            entry = _plain(getattr(value, one.name))
            if one.metadata.get("if any") and not entry:
                continue
            plain |= entry if one.metadata.get("spread") else {one.name: entry}
        return plain
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def parsed(text: str | bytes) -> Summary:
    """The inverse of `written`. Raises ValueError, in one line with the key, for other texts."""
    try:
        summary = _SUMMARY.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(first_error(error)) from error
    # pydantic has checked types. Lengths are checked here, since they depend on other fields.
    for name, has, needed in _lengths(summary):
        if has != needed:
            raise ValueError(f'"{name}" has {has} entries, {needed} are needed')
    # In the file, `others` are keys beside the fields.
    final, named = json.loads(text)["final"], {one.name for one in fields(Final)}
    others = {k: v for k, v in final.items() if k not in named}
    return replace(summary, final=replace(summary.final, others=others))


def first_error(error: ValidationError) -> str:
    """The first mistake, and where it is, in one line."""
    # One is enough: in a file of another version, a hundred fields are wrong at once.
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f'"{place}": {first["msg"]}{more}' if place else f"{first['msg']}{more}"


def _lengths(summary: Summary) -> Iterator[tuple[str, int, int]]:
    """(name, number of entries, number needed) of every list."""
    K, M, final = len(summary.classes), len(summary.label_counts), summary.final
    yield "classes", min(K, 1), 1
    yield "label_counts", min(M, 1), 1
    yield "target", len(summary.target), K
    if sets := summary.label_sets:
        yield "label_sets.holders", len(sets.holders), K
        yield "label_sets.absent_rounds", len(sets.absent_rounds), K
    yield "final.target_recall", len(final.target_recall), K
    yield "final.recall_estimate", len(final.recall_estimate), K
    yield from _table("label_counts", summary.label_counts, M, K)
    yield "weights", len(summary.weights), M
    yield "fedavg_weights", len(summary.fedavg_weights), M
    yield "final.client_accuracy", len(final.client_accuracy), M
    for name, values in final.client_metrics.items():
        yield f"final.client_metrics.{name}", len(values), M
    if serving := summary.serving:
        yield from _table("serving.class_accuracy", serving.class_accuracy, M, K)
        yield from _each("serving", serving, ("client_accuracy", "looks"), M)
        if router := serving.router:
            yield from _table("serving.router.sent", router.sent, M, M)
            yield from _table("serving.router.auc", router.auc, M, M)
            yield "serving.router.risk", len(router.risk), len(router.coverage)
    if moved := summary.corrected:
        lists = ("trained_on", "bias", "correctable", "calibrator_bias", "prior", "counts")
        yield from _each("corrected", moved, lists, K)
    if weights := summary.importance:
        yield from _each("importance", weights, ("ess", "share"), M)
    if apart := summary.differences:
        for name in ("domain_auc", "js", "hellinger", "variation"):
            d = len(apart.clients)
            yield from _table(f"differences.{name}", getattr(apart, name), d, d)
        yield from _each("differences", apart, ("looks",), M)


def _each(
    name: str, value: object, keys: Sequence[str], count: int
) -> Iterator[tuple[str, int, int]]:
    lists = {key: getattr(value, key) for key in keys}
    yield from ((f"{name}.{key}", len(v), count) for key, v in lists.items() if v is not None)


def _table(
    name: str, rows: Sequence[Sequence[Any]], count: int, width: int
) -> Iterator[tuple[str, int, int]]:
    yield name, len(rows), count
    yield from ((f"{name}.{i}", len(row), width) for i, row in enumerate(rows))
