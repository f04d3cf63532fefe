"""The result of `fit`: a run folder, and the network that was trained."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fedshift.calls import called_as
from fedshift.errors import InputError
from fedshift.experiments.folder.run_folder import check_unused
from fedshift.experiments.folder.run_models import RunModels
from fedshift.files import check_page, write
from fedshift.fitting.correcting import correction_for, target_shares
from fedshift.fitting.keys import in_python_words
from fedshift.fitting.predicting import Numbers, Prediction
from fedshift.fitting.predictor import CorrectionOf, Predictor
from fedshift.fitting.showing import Facts, facts_of, headline_of, html_of, text_of
from fedshift.record.folder import RunResult
from fedshift.record.headline import main_accuracy
from fedshift.record.rounds import other_columns
from fedshift.record.summary import Summary
from fedshift.report.page import page
from fedshift.tasks.encoding import Encoding


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """A trained model, all that was measured, and how raw rows become its inputs.

    `print(result)` shows the main numbers. `summary` has all of them, by their names in
    summary.json, and `notes` has sentences on the data and the network.

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> result = fs.fit(task, "linear", rounds=2)
    >>> sorted(result.accuracies)
    ['coast', 'east', 'south', 'west']
    """

    run: RunResult
    models: RunModels
    encoding: Encoding | None
    about: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder with the files of the run."""
        return self.run.folder

    @property
    def summary(self) -> Summary:
        """All numbers of the run."""
        return self.run.summary

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the data and the network."""
        return tuple(self.about.get("notes", ()))

    @property
    def target(self) -> str:
        """What the model is for, in words."""
        return str(self.about.get("target", "the data set's test examples"))

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, as the task has them."""
        return tuple(client.name for client in self.run.clients)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names."""
        return self.summary.classes

    @property
    def accuracy(self) -> float:
        """Accuracy on the target's test rows, of classes or whole sets of labels; NaN for numbers.

        It is that of the model that `predict` uses, which is corrected for the target (`prior` of
        `fit`). `summary.final.target_accuracy` is that of the model as it was trained. With
        target="clients", each client's own model answers its own test rows, and all rows count
        together.
        """
        if self.models.corrected is not None:
            return _number(self.summary.final.target_accuracy_corrected)
        return _number(main_accuracy(self.summary))

    @property
    def estimate(self) -> tuple[float, float]:
        """(target accuracy estimated from the clients' validation counts, its standard error).

        It is that of the model that `predict` uses. With target="clients", each client's own model
        answers. For numbers it is the mean squared error.
        """
        final, others = self.summary.final, self.summary.final.others
        if self.summary.kind == "regression":
            return _number(others["estimated_loss"]), _number(others["estimated_loss_se"])
        if self.models.corrected is not None:
            moved = final.estimated_accuracy_corrected, final.estimated_se_corrected
            return _number(moved[0]), _number(moved[1])
        return _number(final.estimated_accuracy), _number(final.estimated_se)

    @property
    def metrics(self) -> dict[str, float]:
        """The user's own metrics on the target's test rows, and those of tasks without classes."""
        others = self.summary.final.others
        return {k: _number(others[k]) for k in other_columns(self.run.rounds, others)}

    @property
    def accuracies(self) -> dict[str, float]:
        """Each client's accuracy by name: of its own model, if clients serve models of their own.

        It is measured on the client's test rows if it has any, or else on its validation rows.
        """
        serving = self.summary.serving
        served = serving.client_accuracy if serving and serving.client_accuracy else None
        given = self.summary.final.client_metrics.get("accuracy")
        return self._by_client(served or given or self.summary.final.client_accuracy)

    @property
    def client_metrics(self) -> dict[str, dict[str, float]]:
        """Other numbers of each client, for tasks without classes: {"rmse": {"north": 1.2}}."""
        each = self.summary.final.client_metrics
        return {name: self._by_client(values) for name, values in each.items()}

    def _by_client(self, values: Sequence[Any]) -> dict[str, float]:
        return {c: _number(v) for c, v in zip(self.clients, values, strict=True)}

    @property
    def rounds(self) -> list[dict[str, float]]:
        """The numbers of every evaluated round, as in metrics.csv."""
        return [
            {"round": r.round} | {k: _number(v) for k, v in r.values.items()}
            for r in self.run.rounds
        ]

    @property
    def serving(self) -> Predictor:
        """The predictor that `module`, `predict` and `export` use."""
        done = self.models.corrected
        # If the last layer could take the correction, the model has it already.
        beside = None if done is None or done.before else done.correction
        return self._predictor(self.models, self.target, lambda place: beside)

    @called_as('result.for_target({"ill": 0.2, "well": 0.8})')
    def for_target(self, target: Any) -> Predictor:
        """The same models, corrected for other label shares: `predict`, `module` and `export`.

        target: shares or counts, as a dict by class or a number for each class. Nothing is trained,
        so one run serves any number of targets. A client's own model was trained under that
        client's label shares, the server's under a mixture: each is corrected from these.

        >>> columns = {"client": "hospital", "label": "outcome"}
        >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
        >>> result = fs.fit(task, "linear", rounds=2)
        >>> result.for_target({"benign": 0.5, "malignant": 0.5})
        Predictor(fedavg for the label shares benign 0.5, malignant 0.5)

        Raises InputError if these are no shares of the classes, or if no classes are predicted.
        """
        goal = target_shares(target, self.summary)
        # From the model as it was trained: two corrections would add up.
        models = replace(self.models, shared=self.models.uncorrected, corrected=None)
        correction = correction_for(self.summary, models, goal.shares)
        named = zip(self.classes, goal.shares, strict=True)
        words = ", ".join(f"{name} {share:.3g}" for name, share in named if share)
        return self._predictor(models, f"the label shares {words}", correction)

    def _predictor(self, models: RunModels, target: str, correction: CorrectionOf) -> Predictor:
        names, method = self.clients, self.summary.method
        facts = (self.encoding, self.about, names, self.classes, method, target)
        return Predictor(models, *facts, correction)

    def module(self, client: str | int | None = None, *, server: bool = False) -> nn.Module:
        """A copy of the trained network in evaluation mode; client: that of this client.

        server: the server's network, if each client serves one of its own. Raises InputError for an
        unknown client, and if neither is given although clients' networks differ, or there is no
        single model for all.
        """
        return self.serving.module(client, server=server)

    @called_as('result.predict(rows, client="south")')
    def predict(self, rows: Any, *, client: str | int | None = None) -> Prediction | Numbers:
        """Names and probabilities for raw rows, in the form that the task was made of.

        With several labels per row, a name is the set of labels above 1/2. For numbers the answer
        has `values`. client: use the model of this client. For a data set of the library, rows are
        inputs x [n, ...] as in training.

        Raises InputError for rows that lack a column or do not have the task's form, and if client=
        is missing although each client serves a model of its own.
        """
        return self.serving.predict(rows, client=client)

    def report(self, path: str | Path) -> Path:
        """Write the report, one HTML page without scripts."""
        place = Path(path)
        check_page(place)
        write(place, page([self.run]))
        return place

    def save(self, folder: str | Path) -> Path:
        """Copy the run folder to a new or empty folder, from which `fedshift.load` reads it.

        Raises InputError for a folder that is not empty.
        """
        place = Path(folder)
        with in_python_words():
            check_unused(place)
        try:
            shutil.copytree(self.folder, place, dirs_exist_ok=True)
        except (OSError, shutil.Error) as e:
            raise InputError(f"{place}: cannot be written: {e}") from None
        return place

    @called_as('result.export("model.pt", client="south")')
    def export(
        self, path: str | Path, *, client: str | int | None = None, server: bool = False
    ) -> Path:
        """Write the network for other programs: .pt (state_dict), .ts (TorchScript) or .onnx.

        client, server: as in `module`. Raises InputError for another ending, and if this format
        cannot express the network.
        """
        return self.serving.export(path, client=client, server=server)

    def _facts(self) -> Facts:
        one = self.clients[0]
        each = f'Every client serves a model of its own: module(client="{one}"), and so predict.'
        notes = (*([each] if self.models.personal else []), *self.notes)
        moved = self.models.corrected is not None
        return facts_of(self.summary, self.target, self.metrics, notes, corrected=moved)

    def __str__(self) -> str:
        return text_of(self._facts())

    def __repr__(self) -> str:
        main = headline_of(self.summary, corrected=self.models.corrected is not None)
        return (
            f"Result({self.summary.method} on {self.summary.dataset}, round "
            f"{self.summary.final.round}: {main.name} {main.value}, estimated {main.estimate})"
        )

    def _repr_html_(self) -> str:
        return html_of(self._facts())


def _number(value: Any) -> float:
    """A number of a file; NaN for null."""
    return math.nan if value is None else float(value)
