"""Weights and corrected priors on natural clients: `benchmarks/natural_targets.py [--write]`.

Each client of a table is the target once: it trains nothing, and its rows test. FedAvg, FedPALS
(ESS chosen by the estimate) and weights of examples are set side by side, each with its model as
trained and corrected for the target. An oracle trains on the target's rows alone, in five folds, so
that every row is tested by a model that has not seen it. Differences are paired by target.

Runs are kept in `--folder`, and the same command goes on from there. Before a table's runs its time
is forecast from those of two targets. `--write` writes results/natural_targets.md, and a drawing
for each table, if none of `--tables` is absent; docs/datasets.md says how to get them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from page import table as lines_of

import fedshift as fs
from fedshift.errors import FedshiftError
from fedshift.files import write
from fedshift.report.charts import Axis, SideBars
from fedshift.report.intervals import moments
from fedshift.report.svg import svg
from fedshift.sweeps.texts import difference, spread

OUT = Path(__file__).parents[1] / "results" / "natural_targets.md"
TABLES = ("penguins", "mail", "bird-strikes", "chem97")
METHODS = {
    "FedAvg": "fedavg",
    "FedPALS": fs.method("fedpals", ess="auto"),
    "IW-ERM": "iwerm",
    "FedPALS joint": "fedpals_joint",
}
SETTINGS: dict[str, Any] = {
    "rounds": 30,
    "lr": 0.1,
    "batch": 32,
    "evaluate_every": 30,
    "progress": False,
}
ACCURACY, LOSS = "target_accuracy", "target_loss"
MOVED = "_corrected"
FOLDS, PILOT = 5, 2
HEADER = ["table", "targets", "method", "accuracy, %", "corrected, %", "its worst tenth, %"]
HEADER += ["log loss", "corrected"]
ADDED = ["table", "what is added", "targets", "accuracy, points", "log loss, nats"]
Values = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Measured:
    """Of one table: by method and number, the value at each target.

    mixed  the targets with two labels or more: one label alone is all that corrected models say
    """

    name: str
    values: Mapping[str, Values]
    mixed: frozenset[str]

    @property
    def targets(self) -> list[str]:
        return list(self.values["FedAvg"][ACCURACY])

    def paired(self, method: str, number: str, of: str) -> dict[str, float]:
        """method's number minus FedAvg's number `of`, by target, where both have one."""
        one, other = self.values[method][number], self.values["FedAvg"][of]
        both = {t: one[t] - other[t] for t in one if t in other}
        return {t: v for t, v in both.items() if math.isfinite(v)}


def measured(name: str, folder: Path, jobs: int, only: Sequence[str] | None) -> Measured:
    """Every method at every target of one table."""
    task = fs.Task.from_name(name, target="pooled")
    wanted = only or task.labelled
    how = {"vary": "target", "backend": "dense", "jobs": jobs, **SETTINGS}
    began = time.monotonic()
    fs.compare(task, "linear", METHODS, targets=wanted[:PILOT], folder=folder / name, **how)
    seconds = (time.monotonic() - began) / min(PILOT, len(wanted)) * len(wanted)
    print(f"{name}: {len(wanted)} targets, about {seconds / 60:.0f} min", flush=True)
    table = fs.compare(task, "linear", METHODS, targets=wanted, folder=folder / name, **how)
    values: dict[str, Values] = {}
    for row in table.rows:
        names = row.targets
        values[row.label] = {
            number: {names[place]: v for place, v in row.values(number).items()}
            for number in (ACCURACY, ACCURACY + MOVED, LOSS, LOSS + MOVED)
        }
    values["Oracle"] = oracle(task, wanted, folder / f"{name}-oracle", jobs)
    return Measured(name, values, mixed_of(task, wanted))


def mixed_of(task: fs.Task, names: Sequence[str]) -> frozenset[str]:
    """The clients whose rows have two labels or more."""
    pairs = {(int(i), int(y)) for i, y in zip(task.places.codes, task.labels.codes, strict=True)}
    labels = Counter(task.places.names[i] for i, y in pairs if i >= 0 and y >= 0)
    return frozenset(name for name in names if labels[name] > 1)


def oracle(task: fs.Task, targets: Sequence[str], folder: Path, jobs: int) -> Values:
    """FedAvg on the target's rows alone: trained on four fifths, tested on the last, five times."""
    values: Values = {ACCURACY: {}, LOSS: {}}
    for name in targets:
        built = task.held_out(name).build().task
        x, y = built.test.x.numpy(), built.test.y.numpy()
        if len(np.unique(y)) < 2 or len(y) < 2 * FOLDS:
            continue
        folds = np.arange(len(y)) % FOLDS
        target_task = fs.Task.from_arrays(
            x, y, client=[f"fold {f}" for f in folds], target="pooled", validation=0.0,
            classes=range(len(task.classes)),
        )  # fmt: skip
        with_folds = {"vary": "target", "backend": "dense", "jobs": jobs}
        table = fs.compare(
            target_task, "linear", ["fedavg"], folder=folder / f"{targets.index(name)}",
            prior="none", **with_folds, **SETTINGS,
        )  # fmt: skip
        sizes = np.bincount(folds, minlength=FOLDS)
        for number, of in values.items():
            by_fold = table.rows[0].values(number)
            weights = {place: sizes[place] for place in by_fold}
            total = sum(weights.values())
            of[name] = sum(v * weights[place] for place, v in by_fold.items()) / total
    return values


def rows(of: Measured) -> Iterator[list[str]]:
    """A line per method: means and standard deviations over the targets."""
    for method, values in of.values.items():
        shown = []
        for number, scale in ((ACCURACY, 100.0), (LOSS, 1.0)):
            for name in (number, number + MOVED):
                numbers = [scale * v for v in values.get(name, {}).values() if math.isfinite(v)]
                shown.append(spread(moments(numbers) if numbers else None, 1 if scale > 1 else 3))
        low = sorted(values.get(ACCURACY + MOVED, values[ACCURACY]).values())
        tenth = low[: math.ceil(len(low) / 10)]
        shown.insert(2, f"{100 * math.fsum(tenth) / len(tenth):.1f}")
        yield [of.name, str(len(values[ACCURACY])), method, *shown]


def gains(of: Measured) -> Iterator[list[str]]:
    """What the correction adds, and what weights add before and after it, in points and nats."""
    pairs = [("correction, FedAvg", "FedAvg", MOVED, "")]
    for method in list(METHODS)[1:]:
        pairs += [(f"{method}, uncorrected", method, "", "")]
        pairs += [(f"{method}, both corrected", method, MOVED, MOVED)]
    pairs += [("oracle, FedAvg corrected", "Oracle", "", MOVED)]
    several = len(of.mixed) < len(of.targets)
    for what, method, moved, base_moved in pairs:
        for only in (None, of.mixed) if several and method != "Oracle" else (None,):
            yield _gain(of, what, method, moved, base_moved, only)


def _gain(
    of: Measured, what: str, method: str, moved: str, base: str, only: frozenset[str] | None
) -> list[str]:
    cells, count = [], 0
    for number, scale, digits in ((ACCURACY, 100.0, 1), (LOSS, 1.0, 3)):
        values = of.paired(method, number + moved, number + base)
        selected = [scale * v for t, v in values.items() if only is None or t in only]
        cells.append(difference(moments(selected) if selected else None, digits, "target"))
        count = max(count, len(selected))
    name = of.name if only is None else f"{of.name}, two labels or more"
    return [name, what, str(count), *cells]


def sentence(of: Measured) -> str:
    """What weights add once both models are corrected, on targets with two labels or more."""
    parts = []
    for method in list(METHODS)[1:]:
        values = of.paired(method, ACCURACY + MOVED, ACCURACY + MOVED)
        gain = moments([100 * v for t, v in values.items() if t in of.mixed])
        if gain.low is None or gain.high is None:
            verb = "nothing that so few targets could show"
        elif gain.low <= 0 <= gain.high:
            verb = "nothing that shows"
        else:
            verb = "a gain" if gain.low > 0 else "a loss"
        parts.append(f"{method} {difference(gain, 1, 'target')}, {verb}")
    return f"- `{of.name}`, {len(of.mixed)} targets: {'; '.join(parts)}."


def drawing(of: Measured) -> str:
    """Mean accuracies, as trained and corrected, as SVG."""
    bars = {
        f"{method}{', corrected' * bool(moved)}": math.fsum(numbers.values()) / len(numbers)
        for method, values in of.values.items()
        for moved in ("", MOVED)
        if (numbers := values.get(ACCURACY + moved))
    }
    title = f"{of.name}: mean accuracy over {len(of.targets)} targets"
    axis = Axis("accuracy at the target", percent=True)
    return svg(SideBars(title, tuple(bars), tuple(bars.values()), axis))


def page(all_: Sequence[Measured]) -> str:
    """The page for results."""
    first = "\n".join(lines_of(HEADER, [row for one in all_ for row in rows(one)]))
    second = "\n".join(lines_of(ADDED, [row for one in all_ for row in gains(one)]))
    honest = "\n".join(map(sentence, all_))
    drawn = "\n".join(f"![{one.name}]({OUT.stem}/{one.name}.svg)" for one in all_)
    names = ",".join(one.name for one in all_)
    some = "" if names == ",".join(TABLES) else f" --tables {names}"
    return PAGE.format(
        means=first, gains=second, honest=honest, drawn=drawn, tables=some, **SETTINGS
    )


PAGE = """# Every client as the target, on natural clients

`python benchmarks/natural_targets.py{tables} --write`.

A linear model, {rounds} rounds of one local epoch, learning rate {lr}, batches of {batch}. Each
client of a table is held out in turn. Corrected: the same model, calibrated on the clients'
validation rows and moved to the target's label shares. FedPALS chooses its ESS by the estimate of
the corrected model. The oracle trains on the target's rows alone, in five folds; targets with fewer
than ten rows or with one label have none.

The target's label shares are those of its test rows, without error. Of a target with one label they
say all, and a corrected model is right there by that alone. Where a table has such targets, lines
"two labels or more" leave them out.

## What weights add once both models are corrected

Accuracy minus FedAvg's, both corrected, in points, on targets with two labels or more:

{honest}

## All numbers

Mean ± standard deviation over the targets; the worst tenth is of the corrected models' accuracies:

{means}

Minus FedAvg, paired by target, with 95 % t-intervals (none below three targets):

{gains}

{drawn}
"""


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into results/")
    parser.add_argument("--folder", type=Path, default=Path("natural-targets"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--first", type=int, help="only so many targets of each, as a trial")
    options = parser.parse_args()
    done = []
    for name in options.tables.split(","):
        try:
            task = fs.Task.from_name(name, target="pooled")
        except FedshiftError as e:
            print(f"{name} is left out: {e}")
            continue
        only = task.labelled[: options.first] if options.first else None
        done.append(measured(name, options.folder, options.jobs, only))
        print("\n".join(lines_of(HEADER, list(rows(done[-1])))), flush=True)
    text = page(done)
    print(text)
    if options.write and len(done) == len(options.tables.split(",")) and not options.first:
        write(OUT, text)
        for one in done:
            write(OUT.with_suffix("") / f"{one.name}.svg", drawing(one) + "\n")


if __name__ == "__main__":
    main()
