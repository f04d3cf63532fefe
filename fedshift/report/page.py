"""One or several runs as a self-contained HTML page: no script, no network."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from fedshift.errors import InputError
from fedshift.record.folder import RunResult
from fedshift.report import differences, label_sets, numbers, routing, sections, selection, serving
from fedshift.report.layout import html_page, items, note, table, why
from fedshift.report.shapes import escape
from fedshift.report.tables import Table

Section = Callable[[Sequence[RunResult], Sequence[str]], str]


def page(runs: Sequence[RunResult], *, title: str | None = None) -> str:
    """The report on one or several runs, as the text of an HTML file.

    Raises `InputError` when there are no runs, or when two have different classes: their
    accuracies and label distributions then cannot be compared.
    """
    _check_comparable(runs)
    labels = run_labels(runs)
    heading = title or _title(runs)
    parts = [
        _lead(runs),
        _why(runs, labels),
        *_sections(runs, labels),
        label_sets.label_sets(runs, labels),
        selection.selection(runs, labels),
        _provenance(runs, labels),
    ]
    return html_page(heading, parts)


def _sections(runs: Sequence[RunResult], labels: Sequence[str]) -> list[str]:
    """Sections for runs with one target, and for runs whose clients serve their own models."""
    served = [i for i, r in enumerate(runs) if r.summary.serving]
    single = [i for i in range(len(runs)) if i not in served]
    errors = [i for i in single if runs[i].summary.kind == "regression"]
    right = [i for i in single if i not in errors]
    # A chart of weights that all equal n / N would say nothing.
    weighted = [i for i in range(len(runs)) if i in single or sections.weighs(runs[i])]
    plan: tuple[tuple[Section, Sequence[int]], ...] = (
        (sections.results, right),
        (numbers.results, errors),
        (serving.answers, served),
        (sections.other_metrics, range(len(runs))),
        (sections.label_shift, range(len(runs))),
        (differences.differences, range(len(runs))),
        (differences.importance, range(len(runs))),
        (sections.weights, weighted),
        (sections.curves, single),
        (sections.rounds, right),
        (sections.rounds, errors),
        (serving.curves, served),
        (serving.served_models, served),
        (routing.routing, served),
        (sections.per_class, right),
        (serving.per_class, served),
        (sections.client_spread, right),
        (numbers.clients, errors),
        (serving.clients, served),
    )
    return [
        draw([runs[i] for i in places], [labels[i] for i in places])
        for draw, places in plan
        if places
    ]


def run_labels(runs: Sequence[RunResult]) -> tuple[str, ...]:
    """A short name per run, all different: the method, else with the name, else the folder."""
    methods = [r.summary.method for r in runs]
    both = [f"{r.summary.method} ({r.summary.name})" for r in runs]
    folders = [f"{r.summary.method} ({r.folder})" for r in runs]
    # The shortest names that tell all runs apart.
    for names in (methods, both, folders):
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name} #{i + 1}" for i, name in enumerate(both))


def _check_comparable(runs: Sequence[RunResult]) -> None:
    if not runs:
        raise InputError("no runs to report on; give at least one run folder")
    first = runs[0]
    for other in runs[1:]:
        if other.summary.classes != first.summary.classes:
            ours, theirs = first.summary.classes, other.summary.classes
            raise InputError(
                f"cannot compare {other.folder} ({len(theirs)} classes: {_some(theirs)}) with "
                f"{first.folder} ({len(ours)} classes: {_some(ours)}): runs on one page must have "
                "the same classes in the same order; report on them one by one"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _title(runs: Sequence[RunResult]) -> str:
    names = list(dict.fromkeys(r.summary.name for r in runs))
    return names[0] if len(names) == 1 else f"{len(runs)} runs compared"


def _lead(runs: Sequence[RunResult]) -> str:
    data = ", ".join(dict.fromkeys(r.summary.dataset for r in runs))
    clients = sorted({len(r.summary.weights) for r in runs})
    first = runs[0].summary
    what = {"regression": "bins of numbers", "multilabel": "sets of labels"}.get(first.kind or "")
    text = (
        f"{data}: {len(first.classes)} {what or 'classes'}, "
        f"{' or '.join(map(str, clients))} clients, {len(runs)} run{'s' * (len(runs) > 1)}."
    )
    if len({r.summary.target for r in runs}) > 1:
        text += (
            " The runs have different targets, so their target accuracies are about different "
            "populations."
        )
    return note(text)


def _why(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    """The runs' sentences; runs that say the same share one list."""
    labels_of: dict[tuple[str, ...], list[str]] = {}
    for run, label in zip(runs, labels, strict=True):
        if run.summary.why:
            labels_of.setdefault(run.summary.why, []).append(label)
    blocks = []
    # Without a heading where there is one run: its name is the page's.
    for sentences, same in labels_of.items():
        name = f"<h3>{escape(', '.join(same))}</h3>" if len(runs) > 1 else ""
        blocks.append(name + items(sentences))
    return why("".join(blocks)) if blocks else ""


def _provenance(runs: Sequence[RunResult], labels: Sequence[str]) -> str:
    parts = ['<section id="provenance"><h2>Versions and configuration</h2>']
    for run, label in zip(runs, labels, strict=True):
        rows = tuple(_flat(run.lock))
        lock = Table(("Key", "Value"), (("fedshift", run.summary.fedshift), *rows), ("", ""))
        parts.append(
            f"<h3>{escape(label)}</h3><p>Folder: {escape(str(run.folder))}</p>"
            f"<details><summary>lock.json</summary>{table(lock)}</details>"
            f"<details><summary>config.resolved.toml</summary><pre>{escape(run.config)}</pre>"
            "</details>"
        )
    return "".join(parts) + "</section>"


def _flat(value: object, prefix: str = "") -> list[tuple[str, str]]:
    """Nested objects as dotted keys, with the names of the file."""
    if isinstance(value, dict):
        return [
            row for k, v in value.items() for row in _flat(v, f"{prefix}.{k}" if prefix else str(k))
        ]
    return [(prefix, value if isinstance(value, str) else json.dumps(value))]
