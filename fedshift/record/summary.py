"""summary.json: the one schema by which it is written, read and checked.

Fields stand in the order of the file. Those with a default are missing in files of earlier
versions; a number that is not finite is null (NaN) or the text "inf".
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
# A little over 1: some are sums of fractions.
Portion = Annotated[float, Field(ge=0, le=1 + 1e-9, allow_inf_nan=False)]
Mass = Annotated[float, Field(ge=0, le=1 + 1e-6, allow_inf_nan=False)]
# What was done to a model's logits, by `Corrected.form`.
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
    """How many clients a round draws, and over how many rounds the weights are means."""

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

    others: what only some runs have, as entries of its own: accuracies of served models and of
    refitted routers, what became of absent labels ("sets_..."), metrics of the user's and of tasks
    without classes. client_metrics: of these tasks, by name, one per client: on its own test
    examples where it has some, else on its validation examples. bytes_* are of the tensors of
    the last round, the mean over its clients, and of the whole model. "..._corrected": with the
    logits moved to the target's labels, see `Corrected`; estimates where `training.prior` is set.
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
    """One ESS that a selection rule could choose, with what each rule would look at.

    losses: in the place of accuracies where numbers are predicted; smaller is better.
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
    """Which candidate was used, by what rule, and what every rule would have picked."""

    rule: str
    chosen: str | int | None
    picks: dict[str, str] | None = None
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class RouterDetails:
    """How a router does on all test examples: sent, auc [M][M], coverage and risk [P].

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
    """Own models on own test examples: class_accuracy [M][K], client_accuracy [M].

    looks [M] says what each client's inputs go through. Folders of the first versions lack looks
    and client_accuracy.
    """

    looks: tuple[str, ...] | None = None
    client_accuracy: tuple[Portion | None, ...] | None = None
    class_accuracy: Matrix
    router: RouterDetails | None


def _of_rounds(last: dict[str, Any]) -> dict[str, Any]:
    for name in ("round", "rounds"):
        if not isinstance(last.get(name), int | float):
            raise ValueError(f'a number "{name}" is needed')
    # None where the clients' models stayed at their sites: nothing answers for all of them.
    if not isinstance(last.get("system_accuracy", ""), int | float | None):
        raise ValueError('a number "system_accuracy" is needed')
    return last


# Means over the last rounds by name, and their deviations by name and "_sd".
Last = Annotated[dict[str, Number | None], AfterValidator(_of_rounds)]


@dataclass(frozen=True)
class Optima:
    """Accuracies on the server's labelled examples: the aggregate's, and each loss's optimum's.

    gain_se  the standard error of each optimum minus the aggregate, paired by example
    """

    aggregate: Portion
    mse: Portion
    pairwise: Portion
    kl: Portion
    gain_se: dict[str, Portion] | None = field(default=None, metadata={"if any": True})

    @property
    def gains(self) -> dict[str, float]:
        """Optimum minus aggregate, by loss."""
        return {k: getattr(self, k) - self.aggregate for k in ("mse", "pairwise", "kl")}

    def gain_text(self, loss: str) -> str:
        """A gain in points, and its standard error; one of 0 without a gain is no certainty."""
        gain, error = 100 * self.gains[loss], (self.gain_se or {}).get(loss)
        if error is None:
            return f"{gain:+.1f}"
        return f"{gain:+.1f} ± {100 * error:.1f}" if error or gain else "+0.0 (no example changed)"


@dataclass(frozen=True)
class SetRound:
    """Label sets after one evaluated round; None for what the method does not have.

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
    """`summary.json`: clients that hold each label, rounds in which it was absent, both [K].

    mode, tune, tune_over are the method's; None in folders of versions that did not say them.
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
        """Whether an absent label's rows of the head change in that round; None if unknown."""
        if self.mode is None or self.tune is None:
            return None
        return self.mode == "public" or self.tune_over == "all"


@dataclass(frozen=True)
class Differences:
    """`summary.json`: [d][d] for the d `clients`, null where a pair has no value.

    mean is over these pairs; mean_all, without domain_auc, over all pairs of clients. looks [M]
    says what each client's inputs go through; null where only their origins differ.
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
    """`summary.json`: effective sizes of the example weights [M], null for clients without any."""

    ess: tuple[Share | None, ...]
    share: tuple[Portion | None, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`summary.json`: K classes, M clients; label_counts [M, K], target [K], weights [M].

    kind: what is predicted where this is no class; classes are then bins of the numbers, or sets
    of labels. distance and l1_distance are those of the target to the mixture that the run
    trained on.
    last, serving: where clients serve models of their own; None elsewhere, and in old folders.
    label_sets, importance: for methods with label sets, and that weigh examples.
    differences: where the clients' inputs differ. cohorts: where rounds draw some clients.
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

    @property
    def hull(self) -> float | None:
        """How far the target is from every mixture: as given, else from the curve's lambda = 0."""
        if self.hull_distance is not None:
            return self.hull_distance
        # Folders of the first versions lack the field.
        return next((p.distance for p in self.curve if p.lam == 0.0), None)


def corrected_by(forms: Iterable[str | None]) -> list[str]:
    """What was done to the models of runs, by the forms of their corrections."""
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
    """The inverse of `written`; ValueError, in one line with the key, for what no run writes."""
    try:
        summary = _SUMMARY.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(first_error(error)) from error
    # Types are pydantic's to check; lengths depend on other fields.
    for name, has, needed in _lengths(summary):
        if has != needed:
            raise ValueError(f'"{name}" has {has} entries, {needed} are needed')
    # Keys that only some methods write stand beside the fields in the file (`others`).
    final, named = json.loads(text)["final"], {one.name for one in fields(Final)}
    others = {k: v for k, v in final.items() if k not in named}
    return replace(summary, final=replace(summary.final, others=others))


def first_error(error: ValidationError) -> str:
    """The first thing that is wrong, and where, in one line."""
    # One is enough: where a file is of another version, a hundred fields are wrong at once.
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f'"{place}": {first["msg"]}{more}' if place else f"{first['msg']}{more}"


def _lengths(summary: Summary) -> Iterator[tuple[str, int, int]]:
    """(name, its entries, entries needed) of every list."""
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
