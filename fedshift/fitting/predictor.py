"""A run's models for one target: from raw rows to names and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedshift.errors import InputError, unknown
from fedshift.evaluation.corrected import Shifted, head_of, written
from fedshift.examples import check_finite
from fedshift.experiments.folder.model_file import Pair
from fedshift.experiments.folder.run_models import RunModels
from fedshift.experiments.measures.custom_metrics import answers
from fedshift.fitting.export import export
from fedshift.fitting.networks import inner
from fedshift.fitting.predicting import Numbers, Prediction, label_sets, prediction
from fedshift.server.prior import Correction
from fedshift.tasks.encoding import Encoding
from fedshift.tasks.names import text_of as name_of

# A function: place of a client -> the correction of its model; None -> that of the server's model.
CorrectionOf = Callable[[int | None], Correction | None]


@dataclass(frozen=True, eq=False, repr=False)
class Predictor:
    """`module`, `predict` and `export` of a run's models for `target` (in words).

    correction: a function of a client's place, or of None for the server's model.

    If possible, the correction is written into the last layer, and `module` is an ordinary network.
    Otherwise, for example without a bias in that layer, `module` adds it to the logits.

    >>> columns = {"client": "hospital", "label": "outcome"}
    >>> task = fs.Task.from_csv("patients.csv", **columns, target="north")
    >>> result = fs.fit(task, "linear", rounds=2)
    >>> result.for_target([0.5, 0.5])
    Predictor(fedavg for the label shares benign 0.5, malignant 0.5)
    """

    models: RunModels
    encoding: Encoding | None
    about: Mapping[str, Any]
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    method: str
    target: str
    correction: CorrectionOf

    def module(self, client: str | int | None = None, *, server: bool = False) -> nn.Module:
        """A copy of the network in evaluation mode; as `Result.module`."""
        pair, beside = self._served(client, server)
        net = inner(self.models.model.loaded(*pair))
        return net if beside is None else Shifted(net, beside).eval()

    def predict(self, rows: Any, *, client: str | int | None = None) -> Prediction | Numbers:
        """Names and probabilities for raw rows; as `Result.predict`."""
        pair, beside = self._served(client)
        if self.encoding is not None:
            x, kind = self.encoding.apply(rows), self.encoding.kind
        elif isinstance(rows, torch.Tensor | np.ndarray):
            x, kind = torch.as_tensor(rows), "classification"
        else:
            raise InputError("this run has no encoding; give a tensor or array x [n, ...]")
        check_finite(x, "x", "predicting")
        given = answers(self.models.model, *pair, x, kind, beside).numpy()
        if kind == "regression":
            return Numbers(given)
        outputs = () if self.encoding is None else self.encoding.outputs
        return label_sets(given, outputs) if outputs else prediction(given, self.classes)

    def export(
        self, path: str | Path, *, client: str | int | None = None, server: bool = False
    ) -> Path:
        """Write the network for other programs; as `Result.export`."""
        layout = None if self.encoding is None else self.encoding.layout
        x = torch.zeros(2, *self.about.get("x", ()))
        example = x if layout is None else layout.unpack(x)
        return export(self.module(client, server=server), example, Path(path))

    def _served(
        self, client: str | int | None, server: bool = False
    ) -> tuple[Pair, Correction | None]:
        """(the model, the correction that its last layer cannot take, or None).

        If the last layer can take the correction, it is in the model already.
        """
        pair, place = self._pair(client, server)
        correction = self.correction(place)
        if correction is None:
            return pair, None
        head = head_of(self.models.model, *pair, tuple(self.about["x"]))
        if head is None:
            return pair, correction
        return (written(pair[0], head, correction), pair[1]), None

    def _pair(self, client: str | int | None, server: bool) -> tuple[Pair, int | None]:
        models, names = self.models, ", ".join(self.clients)
        complete = models.shared[0].keys() == models.model.init()[0].keys()
        if models.on_sites and (client is not None or not (complete and server)):
            raise InputError(
                "each client's model stayed at its site, in that client's folder"
                + "; module(server=True) is the server's" * complete
            )
        if client is not None and server:
            raise InputError(f'client="{client}" and server=True are two models; give one of them')
        if client is None:
            if not complete:
                raise InputError(
                    f"{self.method} leaves no model for all; give client= one of {names}"
                )
            if models.personal and not server:
                raise InputError(
                    f"with {self.method} every client serves a model of its own; give "
                    f"client= one of {names} (module and export: or server=True, the server's)"
                )
            return models.shared, None
        # A client that is called 101 is "client 101" on pages and in errors: both are understood.
        name = name_of(client)
        name = name if name in self.clients else name.removeprefix("client ")
        if name not in self.clients:
            raise unknown("client", str(client), self.clients)
        if not models.served:
            raise InputError(
                f'client="{client}": this run kept the model for all alone, since its target is '
                f'{self.target}; with target="clients" each client\'s model is kept'
            )
        place = self.clients.index(name)
        return models.served[place], place

    def __repr__(self) -> str:
        return f"Predictor({self.method} for {self.target})"
