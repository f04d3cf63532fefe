"""Data of clients' own in a deployed federation: the server's half, which gets no row."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedshift.data import Examples
from fedshift.errors import InputError, shown
from fedshift.evaluation.scores import Score
from fedshift.experiments.asking_sites import Sites
from fedshift.experiments.at_sites import (
    Chosen,
    Common,
    Counts,
    Deviations,
    Scores,
    Setup,
    built_of,
)
from fedshift.experiments.config import Config
from fedshift.experiments.config_data import Data
from fedshift.experiments.custom import Custom
from fedshift.experiments.custom_data import about, prepare_built
from fedshift.experiments.declared import categories_of
from fedshift.experiments.elsewhere import Elsewhere, client_elsewhere, stand_in
from fedshift.experiments.prepared import Prepared
from fedshift.experiments.python_names import TABLES
from fedshift.experiments.section import Section
from fedshift.experiments.site_sums import Survey, Taken, Totals, columns_of, means
from fedshift.experiments.wording import in_file_words
from fedshift.flower.records import to_records
from fedshift.holdout import held_out_counts
from fedshift.recipes import recipe
from fedshift.record.folder import FIT
from fedshift.seeds import numpy_generator
from fedshift.shifts.target import resample_to
from fedshift.tasks.encoding import Column, Encoding
from fedshift.tasks.names import Coded, Ints, coded, text_of, with_classes
from fedshift.tasks.rows import Columns
from fedshift.tasks.tables import labelled, read_table
from fedshift.tasks.target import target_of
from fedshift.tree import Params

LOG = logging.getLogger("fedshift.flower")
Floats = NDArray[np.float64]


def gather(grid: Grid, config: Config, patience: float) -> Prepared:
    """Wait for all sites, agree with them on the encoding and the cut; what a run needs of that.

    patience: seconds to wait for the sites, and for their answers. Raises InputError for data that
    do not fit, by the site's name and column, and for sites that are not there.
    """
    data, seed = config.data, config.seeds.resolved().split
    sites = Sites(grid, data.clients or (), patience)
    table = _target_table(data)  # first: a mistake in the server's own file needs no site
    surveys = sites.surveys()
    classes = tuple(map(text_of, data.classes or ()))
    counts = np.array([one.labels for one in surveys])
    _check_surveys(surveys, sites.names, len(classes))
    tests = held_out_counts(counts, 0.0 if table else data.test)
    validation = held_out_counts(counts - tests, data.validation)
    trains = counts - tests - validation
    taken = [
        Taken(tests=tuple(a), validation=tuple(b))
        for a, b in zip(tests.tolist(), validation.tolist(), strict=True)
    ]
    columns, notes = _columns(sites, data, surveys, taken, int(trains.sum()))
    encoding = Encoding(
        classes, columns=columns, shape=data.input, pixels=surveys[0].pixels,
        missing=data.missing or "mean",
    )  # fmt: skip
    T = marginal(data, classes, table[1].counts()[None] if table else counts)
    setups = [Setup(encoding=encoding.to_json(), target=tuple(T.tolist()), taken=t) for t in taken]
    sites.ask("prepare", Section, setups)
    chosen = [np.zeros(0, np.int64)] * len(tests)
    if table is None:
        chosen = _chosen(classes, tests, T, seed)
    scores = RemoteScores(sites, chosen, validation, tests)
    shape = data.input or (sum(column.width for column in encoding.columns),)
    test = scores.test(shape) if table is None else _encoded(*table, encoding)
    return _prepared(config, encoding, T, trains, scores, test, notes)


def check_sites(config: Config) -> None:
    """Raise InputError for what cannot be trained where the server has no row."""
    data = config.data
    if recipe(config.method.name).traits.follows_target:
        raise InputError(
            f'method.name = "{config.method.name}" draws clients from all rows, and with '
            'data.source = "sites" they stay with the clients; simulate it'
        )
    classes = [*map(text_of, data.classes or ())]
    marginal(data, classes, np.ones((1, len(classes)), np.int64))  # for its errors


def _prepared(
    config: Config, encoding: Encoding, T: Floats, trains: Ints, scores: RemoteScores,
    test: Examples, notes: list[str],
) -> Prepared:  # fmt: skip
    shape = test.x.shape[1:]
    clients = [client_elsewhere(row, shape, i) for i, row in enumerate(trains.tolist())]
    facts = [encoding.to_json(), T.tolist(), trains.tolist(), scores.validation.tolist()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    held_out = scores.held_out(shape)
    made = built_of(config, encoding, torch.from_numpy(T), clients, held_out, test, digest, notes)
    custom = Custom(texts={FIT: about(made, notes)}, notes=tuple(notes))
    return prepare_built(config, made, custom=custom)


def _check_surveys(surveys: Sequence[Survey], names: Sequence[str], classes: int) -> None:
    for name, one in zip(names, surveys, strict=True):
        if len(one.labels) != classes or not sum(one.labels):
            raise InputError(f'"{shown(name)}" has labels of another number of classes, or none')
        if one.pixels != surveys[0].pixels:
            raise InputError(
                f'examples of "{shown(name)}" are bytes and those of "{shown(names[0])}" not, or '
                "the other way round; bring all to one type"
            )


def _columns(
    sites: Sites, data: Data, surveys: Sequence[Survey], taken: Sequence[Taken], rows: int
) -> tuple[tuple[Column, ...], list[str]]:
    if data.columns is None:
        return (), []
    sums = sites.ask("totals", Totals, taken)
    common = means(surveys, sums, data)
    asked = [Common(taken=one, means=common) for one in taken]
    deviations = [one.squares for one in sites.ask("squares", Deviations, asked)]
    return columns_of(data, surveys, sums, common, deviations, rows)


def _target_table(data: Data) -> tuple[Columns, Coded] | None:
    """(the columns, the labels) of the server's own examples of the target, where it has such."""
    if not isinstance(data.target, str) or not data.target.lower().endswith(TABLES):
        return None
    label, texts = str(data.label), categories_of(data.model_dump())

    def columns(path: Path) -> Columns:
        return read_table(path, (label, *(data.columns or ())), names=texts, label=label)[0]

    table, y = labelled(data.target, label, texts, columns)
    return table, with_classes(coded(y), data.classes or ())


def marginal(data: Data, classes: Sequence[str], counts: Ints) -> Floats:
    """T [K]: the shares that are declared, else those of all labelled rows counts [M, K]."""
    if data.target in (None, "pooled") or isinstance(data.target, str):
        return np.asarray(counts.sum(0) / counts.sum())
    with in_file_words("data", {"target": "target"}):
        return np.array(target_of(data.target, (), classes).shares)


def _chosen(classes: Sequence[str], tests: Ints, T: Floats, seed: int) -> list[Ints]:
    """Places among each client's test rows, in order of their classes, that together follow T."""
    labels = np.concatenate([np.arange(len(T)).repeat(row) for row in tests])
    for name, share, count in zip(classes, T, tests.sum(0), strict=True):
        if share > 0 and not count:
            raise InputError(
                f'data.target: no row with the label "{shown(name)}" (share {share:.3g}) is left '
                "for testing; set data.test to more, or give a table of examples as data.target"
            )
    rows = resample_to(labels, T, len(T), numpy_generator(seed, "test"))
    starts = np.cumsum([0, *tests.sum(1)])
    return [rows[(rows >= a) & (rows < b)] - a for a, b in pairwise(starts)]


def _encoded(table: Columns, y: Coded, encoding: Encoding) -> Examples:
    rows = np.flatnonzero(y.codes >= 0)
    return Examples(encoding.encoded(table, rows), torch.from_numpy(y.codes[rows]))


class RemoteScores:
    """Scores by the sites, asked for once for each model.

    chosen     places of the test rows of each site, or nothing where the server has its own
    validation, tests  [M, K]: how many examples of each class they are
    """

    def __init__(self, sites: Sites, chosen: Sequence[Ints], validation: Ints, tests: Ints) -> None:
        self.sites, self.chosen, self.validation, self.classes = (
            sites,
            chosen,
            validation,
            tests.shape[1],
        )
        by_class = [np.arange(self.classes).repeat(row) for row in tests]
        self.tests = np.array(
            [
                np.bincount(labels[places], minlength=self.classes)
                for labels, places in zip(by_class, chosen, strict=True)
            ]
        )
        self.last: tuple[Params | None, dict[int, Scores]] = (None, {})

    def held_out(self, shape: Sequence[int]) -> list[Examples]:
        """Each site's validation examples."""
        return [
            Elsewhere(*stand_in(row, shape), score=partial(self._score, "validation", i))
            for i, row in enumerate(self.validation.tolist())
        ]

    def test(self, shape: Sequence[int]) -> Examples:
        """The test examples of all sites."""

        def score(pair: tuple[Params, Params]) -> Score:
            each = [self._score("test", i, pair) for i in range(len(self.tests))]
            return sum(each[1:], start=each[0])

        return Elsewhere(*stand_in(self.tests.sum(0).tolist(), shape), score=score)

    def _score(self, what: str, client: int, pair: tuple[Params, Params]) -> Score:
        """Zeros for a site that does not answer: the others' counts are then all there are."""
        if self.last[0] is not pair[0]:
            self.last = pair[0], self._asked(pair)
        if client in self.last[1]:
            return _score_of(getattr(self.last[1][client], what))
        zero = torch.zeros(self.classes, dtype=torch.int64)
        return Score(zero, zero, zero, 0.0)

    def _asked(self, pair: tuple[Params, Params]) -> dict[int, Scores]:
        parts = to_records({"params": pair[0], "buffers": pair[1]})
        given = [Chosen(places=tuple(places.tolist())) for places in self.chosen]
        answers, refused = self.sites.answers("scores", Scores, given, parts)
        for i, one in list(answers.items()):
            totals = (one.validation.total, self.validation[i]), (one.test.total, self.tests[i])
            if any(list(given) != due.tolist() for given, due in totals) or not one.sound():
                refused[i] = "its counts are not those of its examples"
                del answers[i]
        for i, why in sorted(refused.items()):
            LOG.warning("no score of client %d: %s", i, why)
        return answers


def _score_of(counts: Counts) -> Score:
    correct, total, predicted = (
        torch.tensor(row) for row in (counts.correct, counts.total, counts.predicted)
    )
    confused = torch.tensor(counts.confused) if counts.confused else None
    return Score(correct, total, predicted, counts.loss_sum, confused)
