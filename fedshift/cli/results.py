"""The output of `demo`, `run` and `deploy server` after the work is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.cli.console import percent, put, say, show_table
from fedshift.experiments.folder.outcome import Candidate, Choice, Experiment
from fedshift.experiments.folder.run_folder import summary_of
from fedshift.experiments.measures.correcting import Prior
from fedshift.files import check_page, clean, write
from fedshift.recipes import traits_of
from fedshift.record.folder import CONFIG, PROFILE, REPORT, deployed_of, fit_of, read_run
from fedshift.record.headline import digits, measured_on, target_words, validated_by, without_rows
from fedshift.record.summary import corrected_by
from fedshift.report.page import page
from fedshift.report.ways import WAYS, over_rounds

Done = Sequence[tuple[Path, Experiment]]
WHY_CORRECTED = (
    "A model that was trained on other label shares answers as if the target had them, too. "
    "Correcting its answers takes no training and often helps, but can hurt a model that was "
    'trained too little: see the column "corrected". Judge weights by what they add to it.',
)


def draw(folders: Sequence[Path], out: Path) -> Path:
    """Write the page of complete run folders into a folder."""
    target = out / REPORT
    check_page(target)
    write(target, page([read_run(folder) for folder in folders]))
    return target


def comparison(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each run: accuracies, ESS and hull distance."""
    measured = (
        "target_accuracy", "target_accuracy_corrected", "estimated_accuracy", "estimated_se",
        "estimated_accuracy_corrected", "estimated_se_corrected",
    )  # fmt: skip
    others = ("rmse", "estimated_rmse")
    weights = ("ess", "ess_fraction", "distance", "hull_distance")
    return [
        {
            "method": whole["method"],
            **{key: whole["final"][key] for key in measured},
            "form": (whole.get("corrected") or {}).get("form"),
            **{key: whole["final"][key] for key in others if whole.get("kind") == "regression"},
            **{key: whole[key] for key in weights},
            "folder": str(folder),
        }
        for folder, whole in zip(folders, map(summary_of, folders), strict=True)
    ]


def show_comparison(title: str, folders: Sequence[Path]) -> None:
    """Print the table of `comparison`, and an explanation of its columns."""
    done = comparison(folders)
    of_numbers = any("rmse" in r for r in done)
    main = ("target RMSE", "estimated") if of_numbers else ("target %", "estimated %")
    moved = any(r["form"] for r in done)
    numbers = (main[0], *["corrected %"] * moved, main[1])
    header = ("method", *numbers, "ESS %", "gap to T", "hull dist.")
    rows = [
        (
            traits_of(r["method"]).title or r["method"],
            *_main_numbers(r, moved),
            percent(r["ess_fraction"], 0),
            f"{r['distance']:.3f}",
            f"{r['hull_distance']:.3f}",
        )
        for r in done
    ]
    show_table(title, header, rows)
    say(
        "gap to T: L2 distance of the label mix that the weights train on to the target's; "
        "hull dist.: the smallest that any weights could reach. Estimated: from the clients' "
        "validation examples, without target examples"
        f"{'' if of_numbers else ', ± one standard error'}.",
        indent=0,
    )
    for sentence in (*corrected_by(r["form"] for r in done), *_kept(done)):
        say(sentence, indent=0)
    say(validated_by(map(deployed_of, folders)), indent=0)
    configs = [(folder / CONFIG).read_text(encoding="utf-8") for folder in folders]
    pairs = zip(folders, configs, strict=True)
    targets = [target_words(fit_of(folder), config) for folder, config in pairs]
    if any(map(without_rows, targets)):
        say(f"{main[0]}: measured on {measured_on(targets)}.", indent=0)
    if sampling := [cohorts for f in folders if (cohorts := summary_of(f)["cohorts"])]:
        say(
            f"A round draws {sampling[0]['clients']} clients and weighs them anew: ESS, ESS % (of "
            "their examples) and gap are the means over the rounds that were played; metrics.csv "
            "has those of single rounds.",
            indent=0,
        )


def _kept(done: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on runs whose saved model is the corrected one."""
    moved = [r["estimated_accuracy_corrected"] is not None for r in done]
    if not any(moved):
        return []
    some = "" if all(moved) else " of runs with training.prior"
    return [f"model.safetensors{some} has the corrected model; the estimate is of that one."]


def _main_numbers(row: dict[str, Any], moved: bool) -> tuple[str, ...]:
    """The number at the target, the corrected one if runs have it, and the estimate, as text."""
    if "rmse" in row:
        return digits(row["rmse"]), digits(row["estimated_rmse"])
    # Unless prior is "none", the model that is saved is the corrected one.
    which = "" if row["estimated_accuracy_corrected"] is None else "_corrected"
    near, error = (row[f"estimated_{name}{which}"] for name in ("accuracy", "se"))
    estimate = f"{percent(near)} ± {percent(error)}"
    corrected = [percent(row["target_accuracy_corrected"])] * moved
    return percent(row["target_accuracy"]), *corrected, estimate


def show_choice(choice: Choice | None) -> None:
    """Print the candidates of `ess = "auto"` and which selector picks which."""
    if choice is None:
        return
    picked: dict[str, list[str]] = {}
    for rule, label in choice.picks.items():
        name = "oracle (cheating)" if rule == "oracle" else rule
        picked.setdefault(label, []).append(name + (" *" if rule == choice.rule else ""))
    rows = [
        (
            c.label,
            percent(c.ess_fraction, 0),
            *_tried(c, choice.prior),
            ", ".join(picked.get(c.label, [])),
        )
        for c in choice.candidates
    ]
    header = ("candidate", "ESS %", "estim.", "valid.", "source", "target", "picked by")
    show_table("How much sample size to give up: one model per candidate", header, rows)
    put("* the rule in use.")


def _tried(candidate: Candidate, prior: Prior) -> tuple[str, str, str, str]:
    """Estimate, validation, source and target: accuracies in %, or mean squared errors.

    Unless prior is "none", all but source are of the corrected model.
    """
    final = candidate.outcome.final
    if "estimated_loss" in final.others:
        near, error = (digits(final.others[f"estimated_{k}"]) for k in ("loss", "loss_se"))
        estimate = f"{near} ± {error}"
        return estimate, "–", digits(final.others["source_loss"]), digits(final.target_loss)
    of = candidate.estimates(prior)
    moved = candidate.corrected_accuracy(prior)
    return (
        f"{percent(of['estimated_accuracy'])} ± {percent(of['estimated_se'])}",
        percent(of["validation_accuracy"]),
        percent(final.source_accuracy),
        percent(final.target_accuracy if moved is None else moved),
    )


def show_demo(done: Done, page_path: Path) -> None:
    """Print the demo's table, the selectors, sentences on why, and where the page is."""
    task = done[0][1].prepared.task
    put(f"{len(task.clients)} clients, {len(task.classes)} labels, {len(task.test)} target images")
    show_comparison("Accuracy where the model will be used", [f for f, _ in done])
    # FedAvg, the configured method, the oracle. Only the second one makes a choice.
    _, (folder, configured), _ = done
    show_choice(configured.choice)
    for sentence in summary_of(folder)["why"]:
        say(f"Why: {sentence}", indent=5)
    for sentence in WHY_CORRECTED:
        say(f"Why: {sentence}", indent=5)
    put(f"Report: {page_path}")


def show_served(title: str, last: dict[str, Any]) -> None:
    """Print the accuracy of every way to answer a query that the method has."""
    rows = []
    for way in WAYS:
        value, sd = last.get(way.key), last.get(f"{way.key}_sd")
        if value is not None:
            rows.append((way.label, percent(value, 2), "" if sd is None else percent(sd, 2)))
    header = ("how a query is answered", f"%, {over_rounds([last['rounds']])}", "sd over rounds")
    show_table(title, header, rows)


def show_run(folder: Path, page_path: Path, *, choice: Choice | None = None) -> None:
    """Print a run's table, its choice if it made one, sentences on why, and where its files are."""
    whole = summary_of(folder)
    if whole["last"] is None:
        show_comparison(whole["name"], [folder])
    else:
        show_served(f"{whole['name']}: {whole['method']}", whole["last"])
    show_choice(choice)
    for sentence in whole["why"]:
        say(f"Why: {sentence}", indent=5)
    put(f"Run folder: {folder}")
    put(f"Report: {page_path}")


def show_profile(folder: Path) -> None:
    """Print the profile of a run's time, if its folder has one."""
    profile = _profile(folder)
    if profile is not None:
        seconds, shares = profile["seconds"], profile["shares"]
        rows = [(k, f"{s:.2f}", percent(shares.get(k))) for k, s in seconds.items()]
        show_table("What the time went to", ("", "seconds", "%"), rows)


def _profile(folder: Path) -> dict[str, Any] | None:
    path = folder / PROFILE
    if not path.exists():
        return None
    profile: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return profile


def demo_json(done: Done, page_path: Path) -> dict[str, Any]:
    """The demo as one JSON object."""
    _, (folder, _), _ = done
    whole = summary_of(folder)
    rows = {
        "runs": comparison([f for f, _ in done]),
        "selection": whole["selection"],
        "why": whole["why"],
    }
    result: dict[str, Any] = clean(rows | {"report": str(page_path)})
    return result


def run_json(folder: Path, page_path: Path) -> dict[str, Any]:
    """A run's summary with its folder and page, and its profile if it has one."""
    profile = _profile(folder)
    fields = {} if profile is None else {"profile": profile}
    return summary_of(folder) | fields | {"folder": str(folder), "report": str(page_path)}
