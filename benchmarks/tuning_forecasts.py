"""Whether pointwise optima foretell what tuning does: `benchmarks/tuning_forecasts.py [--write]`.

In round 1 a run without tuning has the model that a tuned run of the same seed tunes: its
aggregate. So records of both tell, for each seed, what was foretold (accuracy of the loss's optimum
minus the aggregate's, on the server's labelled examples) and what tuning did (target accuracy with
it minus without). Nothing is trained: the runs are those of `fedshift reproduce labelsets/tuning`,
as `--folder` has them in labelsets*/tuning. `--write` writes results/tuning_forecasts.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from page import table

from fedshift.files import write
from fedshift.sweeps.records import RECORDS, read_records

RESULTS = Path(__file__).parents[1] / "results"
OUT = RESULTS / "tuning_forecasts.md"
LOSSES = {"kl": "KL", "mse": "MSE", "pairwise": "pairwise"}
MODES = ("private", "public")
# Two machines' roundings may move an answer or two of 500.
SAME = 0.005
# Data, labels per client, local epochs and seed: what two runs share that differ in tuning alone.
Setting = tuple[str, int, int, int]


@dataclass(frozen=True)
class First:
    """Round 1 of a run: its accuracies on the target and on labelled examples, and its optima."""

    target: float
    validation: float
    optima: Mapping[str, float]


@dataclass(frozen=True)
class Forecast:
    """Points that were foretold for tuning in round 1, and points that it gained.

    apart: how far the aggregate's accuracy is from that of the run without tuning, on the examples
    on which the optima are measured: 0 but for rounding elsewhere.
    """

    mode: str
    loss: str
    setting: Setting
    foretold: float
    gained: float
    apart: float


def first_rounds(folder: Path) -> dict[tuple[str, str, Setting], First]:
    """(mode, tune, setting) -> round 1, of runs that tune in all rounds or in none.

    Runs of other lengths have the same first round, and count once.
    """
    rounds: dict[tuple[str, str, Setting], First] = {}
    for path in sorted(folder.glob(f"labelsets*/tuning/{RECORDS}")):
        for record in read_records(path).values():
            config = tomllib.loads(record.files["config.resolved.toml"])
            method, shift = config["method"], config["shift"]
            if method.get("tune_rounds", 0):
                continue
            setting = (
                config["data"]["name"], shift["labels_per_client"], config["training"]["epochs"],
                config["seeds"]["run"],
            )  # fmt: skip
            rounds.setdefault((method["mode"], method["tune"], setting), _first(record.files))
    return rounds


def _first(files: Mapping[str, str]) -> First:
    row = next(csv.DictReader(files["metrics.csv"].splitlines()))
    one: dict[str, Any] = json.loads(files["summary.json"])["label_sets"]["rounds"][0]
    if int(row["round"]) != 1 or one["round"] != 1:
        raise SystemExit("a run was not evaluated after round 1: its forecast cannot be compared")
    return First(
        float(row["target_accuracy"]), float(row["validation_accuracy"]), one.get("optima") or {}
    )


def forecasts(folder: Path) -> list[Forecast]:
    """Of every tuned run whose setting has a run without tuning.

    Raises SystemExit where the two are not of one model in round 1.
    """
    rounds, made = first_rounds(folder), list[Forecast]()
    for (mode, tune, setting), tuned in rounds.items():
        plain = rounds.get((mode, "none", setting))
        if tune == "none" or plain is None:
            continue
        apart = abs(tuned.optima["aggregate"] - plain.validation)
        if apart > SAME:
            raise SystemExit(f"{mode} {tune} {setting}: the aggregate is not the untuned model")
        foretold = 100 * (tuned.optima[tune] - tuned.optima["aggregate"])
        gained = 100 * (tuned.target - plain.target)
        made.append(Forecast(mode, tune, setting, foretold, gained, apart))
    return made


@dataclass(frozen=True)
class Score:
    """How well forecasts of one loss said what tuning did."""

    runs: int
    foretold: float
    gained: float
    correlation: float
    agreed: int
    promised: int
    broken: int

    @property
    def agreement(self) -> float:
        return self.agreed / self.runs


def scored(forecasts: Iterable[Forecast], mode: str, loss: str) -> Score:
    """Means in points; runs whose signs agree; runs that were promised a gain, and lost."""
    pairs = [(f.foretold, f.gained) for f in forecasts if (f.mode, f.loss) == (mode, loss)]
    if not pairs:
        raise SystemExit(f"no pair of runs with and without {loss} in mode {mode}")
    foretold, gained = np.array(pairs).T
    spread = len(pairs) > 1 and foretold.std() > 0 and gained.std() > 0
    return Score(
        len(pairs),
        float(foretold.mean()),
        float(gained.mean()),
        float(np.corrcoef(foretold, gained)[0, 1]) if spread else float("nan"),
        int((np.sign(foretold) == np.sign(gained)).sum()),
        int((foretold > 0).sum()),
        int(((foretold > 0) & (gained < 0)).sum()),
    )


def drawn(pairs: Sequence[Forecast]) -> str:
    """The page."""
    settings: dict[tuple[str, int, int], set[int]] = {}
    for f in pairs:
        settings.setdefault(f.setting[:3], set()).add(f.setting[3])
    seeds = "\n".join(
        f"- {data}, C={labels}-E={epochs}: {len(of)}"
        for (data, labels, epochs), of in sorted(settings.items())
    )
    apart = max(f.apart for f in pairs)
    return "\n".join([*_head(seeds, apart), *table(HEADER, list(_rows(pairs))), *_foot()]) + "\n"


HEADER = (
    "mode", "loss", "runs", "foretold, points", "gained, points", "correlation", "signs agree",
    "gain foretold, lost",
)  # fmt: skip


def _rows(pairs: Sequence[Forecast]) -> Iterator[Sequence[str]]:
    for mode in MODES:
        for loss, name in LOSSES.items():
            t = scored(pairs, mode, loss)
            yield (
                mode, name, f"{t.runs}", f"{t.foretold:+.1f}", f"{t.gained:+.1f}",
                f"{t.correlation:.2f}", f"{t.agreed} ({t.agreement:.0%})",
                f"{t.broken} of {t.promised}",
            )  # fmt: skip


def _head(seeds: str, apart: float) -> list[str]:
    return [
        "# What optima foretell of central tuning",
        "",
        "Made by `python benchmarks/tuning_forecasts.py --write` from the records of",
        "`labelsets/tuning`; nothing is trained for it.",
        "",
        'Foretold: "Will tuning pay?" of round 1, the accuracy of the loss\'s pointwise optimum',
        "minus the aggregate's, on the server's labelled examples (500, or 2,000 of the full data",
        "sets). Gained: target accuracy after round 1 with tuning minus without, on the same seed.",
        "The run without tuning then has the very model that the other tunes: on the labelled",
        f"examples their accuracies differ by at most {100 * apart:.1f} points. Means over runs.",
        "",
        "Seeds of labels per client (C) and local epochs (E):",
        "",
        seeds,
        "",
    ]


def _foot() -> list[str]:
    return [
        "",
        "MSE and pairwise move the head alone here, KL the whole model, by 50 steps of Adam at",
        "0.001: a forecast fails, too, where so few steps do not reach the optimum. Runs of one",
        "seed share their clients. Later rounds are not compared: the models differ from then on.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where labelsets*/tuning are")
    parser.add_argument("--write", action="store_true", help="write results/tuning_forecasts.md")
    options = parser.parse_args()
    page = drawn(forecasts(options.folder))
    print(page, end="")
    if options.write:
        write(OUT, page)


if __name__ == "__main__":
    main()
