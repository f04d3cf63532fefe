"""How the server prepares a run on data that stay at the clients: it gets sums, and no row."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedshift.data import Examples, client_data
from fedshift.errors import InputError, shown
from fedshift.evaluation.scores import Score
from fedshift.experiments.config.custom import Custom
from fedshift.experiments.config.data import Data
from fedshift.experiments.config.python_names import TABLES
from fedshift.experiments.config.schema import Config
from fedshift.experiments.config.section import Section
from fedshift.experiments.config.sites import categories_of
from fedshift.experiments.config.wording import in_file_words
from fedshift.experiments.measures.correcting import Prior
from fedshift.experiments.task.custom_data import facts_on, prepare_built
from fedshift.experiments.task.prepared import Prepared
from fedshift.flower.records import to_records
from fedshift.flower.scoring import score_in
from fedshift.flower.waiting import Tell
from fedshift.holdout import held_out_counts
from fedshift.recipes import recipe
from fedshift.record.folder import FIT
from fedshift.seeds import numpy_generator
from fedshift.shifts.target import resample_to
from fedshift.tasks.building import Built
from fedshift.tasks.encoding import Column, Encoding
from fedshift.tasks.names import Coded, Ints, coded, text_of, with_classes
from fedshift.tasks.rows import Columns
from fedshift.tasks.tables import labelled, read_table
from fedshift.tasks.target import target_of
from fedshift.tree import Params
from fedshift_deploy.sites.answering import (
    Chosen,
    Common,
    Deviations,
    Setup,
    built_of,
    client_elsewhere,
    stand_in,
)  # fmt: skip
from fedshift_deploy.sites.asking import Sites
from fedshift_deploy.sites.sums import (
    MOST_ROWS,
    Survey,
    Taken,
    Totals,
    are_of_rows,
    are_squares,
    columns_of,
    means,
)

LOG = logging.getLogger("fedshift.flower")
Floats = NDArray[np.float64]
# Rows of each class that an imagined site has, see `imagined`.
ROWS = 50


def gather(grid: Grid, config: Config, waits: Mapping[str, float], tell: Tell) -> Prepared:
    """Wait for all sites and agree with them on the encoding and the cut; the prepared experiment.

    waits: seconds to wait for the sites and their answers (`patience`), and for scores (`timeout`).
    tell: gets events that name the sites that are missing. Raises InputError for data that do not
    fit, with the site's name and the column, and for sites that did not come.
    """
    data, seed = config.data, config.seeds.resolved().split
    sites = Sites(grid, data.clients or (), waits["patience"], waits["timeout"], tell)
    table = _target_table(data)  # first, since a mistake in it can be reported at once
    surveys = sites.surveys()
    classes = tuple(map(text_of, data.classes or ()))
    _check_surveys(surveys, sites.names, len(classes))
    counts = np.array([one.labels for one in surveys])
    # With a table of the target, nothing is tested on the sites' rows, so all of them can train.
    tests = held_out_counts(counts, 0.0 if table else data.test)
    validation = held_out_counts(counts - tests, data.validation)
    trains = counts - tests - validation
    pairs = zip(tests.tolist(), validation.tolist(), strict=True)
    taken = [Taken(tests=tuple(a), validation=tuple(b)) for a, b in pairs]
    columns, notes = _columns(sites, data, surveys, taken, int(trains.sum()))
    encoding = Encoding(
        classes, columns=columns, shape=data.input, pixels=surveys[0].pixels,
        missing=data.missing or "mean",
    )  # fmt: skip
    at_clients = data.target == "clients"
    labels = table[1].counts()[None] if table else tests if at_clients else counts
    T = marginal(data, classes, labels)
    setups = [Setup(encoding=encoding.to_json(), target=tuple(T.tolist()), taken=t) for t in taken]
    sites.ask("prepare", Section, setups)
    examples = None if table is None else _encoded(*table, encoding)
    scores = RemoteScores(sites, (), validation, tests if at_clients else np.zeros_like(tests))
    if table is None and not at_clients:
        scores.choose(classes, tests, T, seed)
    built = _built(data, encoding, T, trains, scores, examples, notes)
    custom = Custom(texts={FIT: facts_on(built, notes)}, notes=tuple(notes))
    return prepare_built(config, built, custom=custom)


def _built(
    data: Data, encoding: Encoding, T: Floats, trains: Ints, scores: RemoteScores,
    test: Examples | None, notes: list[str],
) -> Built:  # fmt: skip
    """The task as the server sees it; test: the server's own examples of the target, if any."""
    shape = encoding.shape or (sum(column.width for column in encoding.columns),)
    everyone = range(len(trains))
    each = [scores.examples("tests", [i], shape) for i in everyone]
    tests = each if data.target == "clients" else []
    test = scores.examples("tests", everyone, shape) if test is None else test
    clients = [client_elsewhere(row, shape, i) for i, row in enumerate(trains)]
    held_out = [scores.examples("validation", [i], shape) for i in everyone]
    facts = [encoding.to_json(), T.tolist(), trains.tolist(), scores.validation.tolist()]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    target = torch.from_numpy(T)
    return built_of(data, encoding, target, clients, held_out, test, tests, digest, notes)


def check_sites(data: Data, method: str, prior: Prior) -> None:
    """Raise InputError for methods and corrections that need rows at the server."""
    if recipe(method).traits.follows_target:
        raise InputError(
            f'method.name = "{method}" draws clients from all rows, and with '
            'data.source = "sites" they stay with the clients; simulate it'
        )
    if prior != "none" and data.target != "clients" and not is_table(data.target):
        raise InputError(
            f'training.prior = "{prior}": sites score test rows by the model as it is trained, '
            "and nothing would measure the corrected one. Give a table of the target as "
            "data.target, or leave it out"
        )
    classes = [*map(text_of, data.classes or ())]
    # Its result is not needed: it raises for a target that does not fit the classes.
    marginal(data, classes, np.ones((1, len(classes)), np.int64))


def imagined(data: Data) -> Built:
    """A task as if each site had ROWS rows of each class, to test whether a run could start."""
    encoding = _imagined_encoding(data)
    classes = encoding.classes
    counts = np.full((len(data.clients or ()), len(classes)), ROWS)
    width = sum(column.width for column in encoding.columns)
    x, y = stand_in(counts[0], encoding.shape or (width,))
    clients = [client_data(x, y, i) for i in range(len(counts))]
    some = [Examples(x, y)] * len(counts)
    T = torch.from_numpy(marginal(data, classes, counts))
    tests = some if data.target == "clients" else []
    return built_of(data, encoding, T, clients, some, some[0], tests, "", [])


def _imagined_encoding(data: Data) -> Encoding:
    """An encoding that needs no row: numbers as they are, and declared categories, or one."""
    classes, texts = tuple(map(text_of, data.classes or ())), categories_of(data.model_dump())
    columns = tuple(
        Column(name, categories=(data.values or {}).get(name, ("any",)) if name in texts else None)
        for name in data.columns or ()
    )
    return Encoding(classes, columns=columns, shape=data.input, missing=data.missing or "mean")


def _check_surveys(surveys: Sequence[Survey], names: Sequence[str], classes: int) -> None:
    for name, one in zip(names, surveys, strict=True):
        if len(one.labels) != classes or not 0 < sum(one.labels) <= MOST_ROWS:
            raise InputError(
                f'"{shown(name)}" has {sum(one.labels):,} rows with a label, of '
                f"{len(one.labels)} classes; 1 to {MOST_ROWS:,} of {classes} classes are due"
            )
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
    sums, texts = sites.ask("totals", Totals, taken), {*categories_of(data.model_dump())}
    for name, one, survey, cut in zip(sites.names, sums, surveys, taken, strict=True):
        if {*one.names} != texts or {*one.numbers} != {*data.columns} - texts:
            raise InputError(f'"{shown(name)}" answers about other columns than the experiment has')
        most = sum(survey.labels) - sum(cut.tests) - sum(cut.validation)
        for column, total in one.numbers.items():
            if total.count > most or not are_of_rows(total, survey.spans.get(column)):
                raise InputError(_NO_ROWS.format(shown(name), shown(column)))
    common = means(surveys, sums, data)
    asked = [Common(taken=one, means=common) for one in taken]
    deviations = [one.squares for one in sites.ask("squares", Deviations, asked)]
    for name, one, squares in zip(sites.names, sums, deviations, strict=True):
        for column, of in common.items():
            # A site without a value in this column sends 0, so a sum that is missing is refused.
            square = squares.get(column, math.inf)
            if not are_squares(square, one.numbers[column], of.mean):
                raise InputError(_NO_ROWS.format(shown(name), shown(column)))
    return columns_of(data, surveys, sums, common, deviations, rows)


_NO_ROWS = '"{}" sent sums of column "{}" that no rows have, or values beyond 1e150'


def check_target(data: Data) -> None:
    """Raise InputError for a table of the target that cannot be read or encoded."""
    if table := _target_table(data):
        with _naming(data.target):
            _encoded(*table, _imagined_encoding(data))


def _target_table(data: Data) -> tuple[Columns, Coded] | None:
    """(columns, labels) of the server's own examples of the target; None if it has none."""
    if not is_table(data.target):
        return None
    label, texts = str(data.label), categories_of(data.model_dump())

    def columns(path: Path) -> Columns:
        return read_table(path, (label, *(data.columns or ())), names=texts, label=label)[0]

    table, y = labelled(data.target, label, texts, columns)
    with _naming(data.target):
        labels = with_classes(coded(y), data.classes or ())
        if not labels.counts().any():
            raise InputError(f'no row has a label in the column "{shown(label)}"')
    return table, labels


@contextlib.contextmanager
def _naming(file: object) -> Iterator[None]:
    """Put the file's name before errors about its content."""
    try:
        yield
    except InputError as e:
        raise InputError(f"{file}: {e}") from e


def is_table(target: object) -> bool:
    """Whether data.target names a table that the server has."""
    return isinstance(target, str) and target.lower().endswith(TABLES)


def marginal(data: Data, classes: Sequence[str], counts: Ints) -> Floats:
    """T [K]: the declared shares, or else those of all labelled rows; counts [M, K]."""
    if data.target in (None, "pooled") or isinstance(data.target, str):
        return np.asarray(counts.sum(0) / counts.sum())
    with in_file_words("data", {"target": "target"}):
        return np.array(target_of(data.target, (), classes).shares)


def _encoded(table: Columns, y: Coded, encoding: Encoding) -> Examples:
    rows = np.flatnonzero(y.codes >= 0)
    return Examples(encoding.encoded(table, rows), torch.from_numpy(y.codes[rows]))


@dataclass
class RemoteScores:
    """Scores that the sites send; the sites are asked once for each model.

    chosen             which of its test rows each site scores; none if the server has its own
    validation, tests  [M, K]: the counts by class that a site's scores must have
    last               the parameters that were scored last, and each site's scores of them
    """

    sites: Sites
    chosen: Sequence[Chosen]
    validation: Ints
    tests: Ints
    last: tuple[Params | None, dict[int, dict[str, Score]]] = (None, {})

    def choose(self, classes: Sequence[str], tests: Ints, T: Floats, seed: int) -> None:
        """Choose among the clients' test rows, counts [M, K], so that the chosen ones follow T."""
        for name, share, count in zip(classes, T, tests.sum(0), strict=True):
            if share > 0 and not count:
                raise InputError(
                    f'data.target: no row with the label "{shown(name)}" (share {share:.3g}) is '
                    "left for testing; set data.test to more, or give a table as data.target"
                )
        each = [np.arange(len(T)).repeat(row) for row in tests]
        rows = resample_to(np.concatenate(each), T, len(T), numpy_generator(seed, "test"))
        starts = np.cumsum([0, *tests.sum(1)])
        places = [rows[(rows >= a) & (rows < b)] - a for a, b in pairwise(starts)]
        self.chosen = [Chosen(places=tuple(at.tolist())) for at in places]
        pairs = zip(each, places, strict=True)
        self.tests = np.array([np.bincount(of[at], minlength=len(T)) for of, at in pairs])

    def examples(self, what: str, clients: Sequence[int], shape: Sequence[int]) -> Examples:
        """Stand-ins for these clients' "validation" or "tests" rows; their sites score them."""
        x, y = stand_in(getattr(self, what)[list(clients)].sum(0), shape)
        return Examples(x, y, scorer=partial(self._score, what, clients))

    def _score(self, what: str, clients: Sequence[int], pair: tuple[Params, Params]) -> Score:
        """The sum of the scores over the sites that answered; events name the others."""
        if self.last[0] is not pair[0]:
            self.last = pair[0], self._asked(pair)
        zero = torch.zeros(self.validation.shape[1], dtype=torch.int64)
        each = [self.last[1][i][what] for i in clients if i in self.last[1]]
        return sum(each[1:], start=each[0]) if each else Score(zero, zero, zero, 0.0)

    def _asked(self, pair: tuple[Params, Params]) -> dict[int, dict[str, Score]]:
        parts = to_records({"params": pair[0], "buffers": pair[1]})
        given = self.chosen or [Chosen(places=())] * len(self.validation)

        def taken(content: RecordDict, client: int) -> dict[str, Score]:
            scores = {}
            for what, due in (("validation", self.validation), ("tests", self.tests)):
                scores[what] = score_in(content, due.shape[1], what)
                if scores[what].total.tolist() != due[client].tolist():
                    raise InputError("its counts are not those of its examples")
            return scores

        answers, missed = self.sites.answers("scores", taken, given, self.sites.timeout, parts)
        for one in missed:
            LOG.warning("no score of client %d: %s", one.client, one.reason)
            self.sites.tell({"event": "unscored", **one._asdict()})
        return answers
