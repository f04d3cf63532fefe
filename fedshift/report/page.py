"""The report: one or several runs as a self-contained HTML page, without scripts or downloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedshift.errors import InputError
from fedshift.record.folder import RunResult
from fedshift.report import (
    by_round,
    confusion,
    differences,
    drop_outs,
    label_sets,
    numbers,
    routing,
    sections,
    selection,
    serving,
)
from fedshift.report.charts import shortened
from fedshift.report.folding import folded
from fedshift.report.layout import html_page, items, note, why
from fedshift.report.pools import Pool, Run, dataset_of, firsts, name_of, pools
from fedshift.report.repeating import repeating
from fedshift.report.shapes import escape

# Longer names would fill the page, since tables and charts repeat each name a dozen times.
LONGEST, LONGEST_SENTENCE = 60, 2_000
Section = Callable[[Sequence[Pool]], str]


def page(runs: Sequence[Run], *, title: str | None = None) -> str:
    """The report on one or several runs, as the text of an HTML file.

    Runs that differ only in their seed are one line. Raises `InputError` if there are no runs, or
    if two have different classes, since their accuracies cannot be compared then.
    """
    _check_comparable(runs)
    lines = pools([with_short_names(run) for run in runs])
    parts = [_lead(runs, lines), _why(lines), *_sections(lines), repeating(lines)]
    return html_page(title or _title(runs), parts)


def with_short_names(run: Run) -> Run:
    """The run with names of clients and classes shortened to what a page has room for."""
    if not isinstance(run, RunResult):
        return run
    clients = tuple(replace(c, name=shortened(c.name, LONGEST)) for c in run.clients)
    s = run.summary
    classes, why = (
        tuple(shortened(text, most) for text in of)
        for of, most in ((s.classes, LONGEST), (s.why, LONGEST_SENTENCE))
    )
    looks = {
        name: replace(part, looks=tuple(shortened(look, LONGEST) for look in part.looks))
        for name in ("serving", "differences")
        if (part := getattr(s, name)) is not None and part.looks
    }
    return replace(run, clients=clients, summary=replace(s, classes=classes, why=why, **looks))


def _sections(lines: Sequence[Pool]) -> list[str]:
    """All sections of a page, in order; each gets the lines that it applies to."""
    complete = [line for line in lines if line.runs]
    served = [line for line in complete if line.first.summary.serving]
    single = [line for line in complete if line not in served]
    errors = [line for line in single if line.first.summary.kind == "regression"]
    right = [line for line in single if line not in errors]
    begun = [line for line in lines if line.begun]
    # Served models often have weights that all equal n / N: a chart of these would say nothing.
    weighted = [p for p in complete if p in single or any(map(sections.weighs, p.runs))]
    plan: tuple[tuple[Section, Sequence[Pool]], ...] = (
        (sections.results, right),
        (numbers.results, errors),
        (serving.answers, served),
        (sections.other_metrics, complete),
        (by_round.accuracy, [*right, *(p for p in begun if not by_round.of_numbers(p))]),
        (by_round.accuracy, [*errors, *filter(by_round.of_numbers, begun)]),
        (serving.curves, served),
        (by_round.loss, lines),
        (confusion.confusion, [p for p in complete if p.first.summary.kind is None]),
        (sections.per_class, right),
        (serving.per_class, served),
        (sections.client_spread, right),
        (_of_first(numbers.clients), errors),
        (_of_first(serving.clients), served),
        (_of_first(sections.weights), weighted),
        (_of_first(sections.label_shift), complete),
        (_of_first(sections.curves), single),
        (_of_first(differences.differences), complete),
        (_of_first(differences.importance), complete),
        (_of_first(serving.served_models), served),
        (_of_first(routing.routing), served),
        (_of_first(label_sets.label_sets), complete),
        (_of_first(selection.selection), complete),
        (drop_outs.drop_outs, lines),
        (by_round.time, lines),
    )
    return [draw(of) for draw, of in plan if of]


def _of_first(draw: Callable[[Sequence[RunResult], Sequence[str]], str]) -> Section:
    """A section that shows the first run of each line only, since its other seeds look alike."""
    return lambda lines: draw(*firsts(lines))


def _check_comparable(runs: Sequence[Run]) -> None:
    if not runs:
        raise InputError("no runs to report on; give at least one run folder")
    complete = [run for run in runs if isinstance(run, RunResult)]
    for other in complete[1:]:
        ours, theirs = complete[0].summary.classes, other.summary.classes
        kinds = {complete[0].summary.kind, other.summary.kind}
        # In regression, classes are bins that depend on the split seed. Errors do not need them.
        if theirs != ours and kinds != {"regression"}:
            raise InputError(
                f"cannot compare {other.folder} ({len(theirs)} classes: {_some(theirs)}) with "
                f"{complete[0].folder} ({len(ours)} classes: {_some(ours)}): runs on one page must "
                "have the same classes in the same order; report on them one by one"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _title(runs: Sequence[Run]) -> str:
    """The name that all runs have, or else that of the folder that they are in."""
    names = list(dict.fromkeys(name_of(run) for run in runs))
    above = list(dict.fromkeys(run.folder.absolute().parent.name for run in runs))
    if len(names) == 1:
        return names[0]
    return above[0] if len(above) == 1 and above[0] not in ("runs", "") else f"{len(runs)} runs"


def _lead(runs: Sequence[Run], lines: Sequence[Pool]) -> str:
    data = ", ".join(dict.fromkeys(dataset_of(run) for run in runs))
    complete = [run.summary for run in runs if isinstance(run, RunResult)]
    facts = []
    if complete:
        first = complete[0]
        bins = {"regression": "bins of numbers", "multilabel": "sets of labels"}
        facts.append(f"{len(first.classes)} {bins.get(first.kind or '', 'classes')}")
        facts.append(f"{' or '.join(map(str, sorted({len(s.weights) for s in complete})))} clients")
    facts.append(f"{len(runs)} run{'s' * (len(runs) > 1)}")
    text = f"{data}: {', '.join(facts)}."
    if len({_target(run) for run in runs if isinstance(run, RunResult)}) > 1:
        text += (
            " The runs have different targets, so their target accuracies are about different "
            "populations."
        )
    targets = list(dict.fromkeys(str(run.fit["target"]) for run in runs if "target" in run.fit))
    if len(targets) == 1:
        text += f" Target: {targets[0]}."
    if len(lines) < len(runs):
        text += (
            " Runs that differ in the seed alone are one line: the mean over its seeds, ± the "
            "standard deviation. What is shown of one run is that of the line's first seed."
        )
    return note(text)


def _target(run: RunResult) -> object:
    """A value that tells targets apart; in regression a text, since bins depend on the split."""
    s = run.summary
    return run.fit.get("target") if s.kind == "regression" else s.target


def _why(lines: Sequence[Pool]) -> str:
    """The sentences of every line's first seed, each once; those that all lines have come first.

    Other seeds have the same sentences with other numbers: these are folded away.
    """
    said_by: dict[str, dict[str, None]] = {}
    others: list[str] = []
    for line in lines:
        first = line.first.summary.why if line.runs else _states(line)
        for text in first:
            said_by.setdefault(text, {})[line.label] = None
        for name, run in list(zip(line.names, line.runs, strict=False))[1:]:
            others += [f"{name}: {text}" for text in run.summary.why if text not in first]
    blocks: dict[str, list[str]] = {}
    for text, labels in said_by.items():
        of_all = len(labels) == len(lines)
        blocks.setdefault("" if of_all else ", ".join(labels), []).append(text)
    shown = [
        (f"<h3>{escape(name)}</h3>" if name else "") + items(texts)
        for name, texts in sorted(blocks.items(), key=lambda block: block[0] != "")
    ]
    shown += [folded(f"{len(others)} more of other seeds", items(others))] if others else []
    return why("".join(shown)) if shown else ""


def _states(line: Pool) -> list[str]:
    """How far the runs of a line have got that are not complete."""
    several = len(line.begun) > 1
    states = zip(line.seeds, line.begun, strict=True)
    return [f"{f'seed {seed}: ' * several}{run.state}." for seed, run in states]
