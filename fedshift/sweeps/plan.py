"""The plan of a comparison: methods, the settings of each, and the run of each setting and seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from fedshift.errors import InputError, shown, unknown
from fedshift.experiments.config.schema import Config, SeedTable
from fedshift.experiments.measures.served import serving_metrics
from fedshift.record.rounds import Metrics
from fedshift.record.summary import Final
from fedshift.sweeps.store import Run

VARY = ("training", "split", "target")


@dataclass(frozen=True)
class Point:
    """One setting of a method and its run by seed; the label is "" if there is one setting."""

    label: str
    runs: Mapping[int, Run]


@dataclass(frozen=True)
class Contender:
    """A method, by its name in the table, and the settings among which validation chooses."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plan:
    """All that is compared, and how.

    vary     what differs between seeds. "training": first weights, cohorts and batches; "split":
             the cut into clients as well; "target": one client after the other is the target
    base     the method to which the others' differences are taken
    metric   a number of a run's summary; None for the accuracy at the target
    rule     what a setting is chosen by, as in [selection]
    targets  names of the clients held out in turn; a run's seed is then its place among them
    about    sentences on the targets
    """

    title: str
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    vary: str = "training"
    base: str = ""
    metric: str | None = None
    rule: str = "estimate"
    targets: tuple[str, ...] = ()
    about: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        labels = [c.label for c in self.contenders]
        if not labels:
            raise InputError("methods is empty; name at least one, as in fedavg")
        if not self.seeds:
            raise InputError("seeds is empty; give at least one")
        if double := next((name for name in labels if labels.count(name) > 1), None):
            raise InputError(f'"{double}" is there twice; give each method once, or another name')
        if self.base and self.base not in labels:
            raise unknown("method to compare with", self.base, labels)
        if not self.base:
            object.__setattr__(self, "base", labels[0])

    @property
    def runs(self) -> dict[str, Run]:
        """Every run by name, seed by seed; equal runs of several settings are one run."""
        pairs = (p.runs[s] for s in self.seeds for p in self.points)
        return {run.name: run for run in pairs}

    @property
    def points(self) -> Iterator[Point]:
        """The settings of all methods."""
        return (point for contender in self.contenders for point in contender.points)

    @property
    def has_grid(self) -> bool:
        """Whether any method has several settings."""
        return any(len(contender.points) > 1 for contender in self.contenders)

    @property
    def varied(self) -> str:
        """A sentence on what differs between seeds, or targets, and what stays the same."""
        if self.targets:
            return (
                f"{len(self.targets)} targets: each of these clients is held out in turn. It "
                "trains nothing, and its rows test; all else stays the same."
            )
        seeds = seeds_in_words(self.seeds)
        if self.vary == "split":
            return (
                f"{seeds}: each cuts the data into clients and target anew; first weights, cohorts "
                "and batches differ as well."
            )
        return (
            f"{seeds}: first weights, cohorts and batches differ; clients, validation and target "
            "stay the same."
        )


def units_in_words(units: Sequence[int], targets: Sequence[str] = ()) -> str:
    """Seeds, or places among the targets, in words: "seeds 0 and 2", 'target "north"'."""
    if not targets:
        return seeds_in_words(units).lower()
    names = [f'"{shown(targets[i])}"' for i in units]
    return f"target {names[0]}" if len(names) == 1 else f"targets {', '.join(names)}"


def seeds_in_words(seeds: Sequence[int]) -> str:
    """ "Seed 3", "Seeds 0 and 2", "Seeds 0 to 4"."""
    if len(seeds) == 1:
        return f"Seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    if whole and len(seeds) > 2:
        return f"Seeds {seeds[0]} to {seeds[-1]}"
    return f"Seeds {', '.join(map(str, seeds[:-1]))} and {seeds[-1]}"


def seeded(seeds: SeedTable, seed: int, vary: str) -> SeedTable:
    """[seeds] for one seed of the comparison. Raises InputError if it leaves nothing to vary."""
    check_vary(vary)
    if vary == "split" and seeds.split is not None:
        raise InputError(
            f'seeds.split = {seeds.split} is set, and vary = "split" draws the cut anew for every '
            "seed; leave one of them out"
        )
    if vary == "training" and None not in (seeds.init, seeds.cohort, seeds.batch):
        raise InputError(
            "seeds.init, seeds.cohort and seeds.batch are all set, so that every seed would train "
            "alike; leave out those that are to vary"
        )
    split = seeds.resolved().split if vary == "training" else None
    return seeds.model_copy(update={"run": seed, "split": split})


def check_metric(metric: str | None, added: Iterable[str]) -> None:
    """Raise InputError for a metric that no run can have; added: names of the user's metrics."""
    corrected = {one.name for one in fields(Final) if one.name.endswith("_corrected")}
    names = {one.name for one in fields(Metrics)} | corrected
    names |= {*serving_metrics(), *added, "ess", "distance"}
    if metric is not None and metric not in names - {"others"}:
        raise unknown("metric", metric, names - {"round", "clients_trained", "others"})


def check_vary(vary: str) -> None:
    """Raise InputError for anything but "training", "split" and "target"."""
    if vary not in VARY:
        raise unknown("thing to vary", vary, VARY)


def check_choosing(config: Config) -> None:
    """Raise InputError if an experiment file has nothing to choose a setting by."""
    rule, held_out = config.selection.rule, config.data.validation > 0
    if rule == "validation" and config.shift.target == "clients" and config.server.validation:
        raise InputError(
            'a grid is chosen by selection.rule = "validation" where the server\'s model is used; '
            'with target = "clients" each client serves its own, and its validation examples '
            'choose. Set selection.rule = "estimate"'
        )
    drawn = config.data.source is None and config.shift.target == "drawn"
    check_choice(rule, held_out, drawn or config.server.validation > 0)


def check_choice(rule: str, held_out: bool, follows: bool) -> None:
    """Raise InputError if no validation rows could choose among several settings.

    held_out: whether clients hold validation rows out; follows: whether any follow the target
    """
    if rule == "validation" and not follows:
        raise InputError(
            'a grid is chosen by selection.rule = "validation", and no examples that follow the '
            'target are kept for it; use "estimate", or keep some with shift.target = "drawn" or '
            "server.validation"
        )
    if rule == "estimate" and not held_out:
        raise InputError(
            "a grid is chosen by the clients' validation examples, and there are none; set "
            "data.validation to 0.2, or give every key one value"
        )
