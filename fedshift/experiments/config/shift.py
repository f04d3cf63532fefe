"""[shift] of an experiment file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedshift import shifts
from fedshift.experiments.config.section import Count, Positive, Section
from fedshift.experiments.config.wording import in_file_words

# Entries of the pools that `transform` names.
LOOKS = {"bits": 8, "fashion": 8, "wide": 54}
_WIDER = ', or shift.transform = "wide", which has 54'


class Split(Section):
    """[shift]: how examples are dealt to the training clients, and what the target is.

    target: "drawn" (by the same machinery, as one client more), "uniform", "union" (uniform over
    the labels that some client holds), "test" (the labels of the test file, all of which is the
    test set), K numbers, or "clients": the model is used on the clients' own kind of data, and
    every client keeps a test set.
    transform, intensity: what each client's images go through (`fedshift.shifts.covariate`).
    noise: sigma, the images of client i = 1, ..., M have Gaussian noise of standard deviation
    sigma i / M; noisy_test: test images have that of clients dealt at random, else none.
    target_noise: the server gets normalise(T + target_noise * max(eps, 0)), eps ~ N(0, I_K);
    test and validation examples follow T all the same.
    Kind "natural" takes the data set's own clients and target, "writers" deals whole writers, as
    many to each client (`shifts.group_shares`). Other keys depend on `kind`; see
    `fedshift.shifts`.
    """

    kind: Literal[
        "sparsity",
        "dirichlet-per-client",
        "dirichlet-per-class",
        "shards",
        "iid",
        "quantity",
        "label-sets",
        "writers",
        "natural",
    ] = "sparsity"
    clients: Count = 9
    target: Literal["drawn", "uniform", "union", "test", "clients"] | tuple[float, ...] = "drawn"
    transform: Literal["none", "bits", "wide", "fashion"] = "none"
    intensity: Literal["low", "mid", "high"] | None = None
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    noisy_test: bool = False
    normalise_target: bool = False
    target_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    labels_per_client: Count | None = None
    samples: Count | None = None
    common_labels: Annotated[int, Field(ge=0)] | None = None
    cover: bool | None = None
    reach: Annotated[int, Field(ge=0)] | None = None
    beta: Positive | None = None
    shards_per_client: Count | None = None
    min_size: Annotated[int, Field(ge=0)] | None = None
    capacity: bool | None = None
    rule: Literal["exact", "fill"] | None = None
    delta: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _options_of_kind(self) -> Split:
        options = self._arguments()
        if self.kind == "writers":
            if self.target == "drawn":
                raise ValueError(
                    'kind "writers" deals all writers to clients and draws no target; set target '
                    'to "test", "uniform", "union", "clients" or K numbers'
                )
        elif self.kind != "natural":
            # The shift is made only for its own checks of ranges: errors come before any data are
            # read.
            with in_file_words("shift", self.arguments()):
                _KINDS[self.kind][0](**options)
        elif self.target not in ("drawn", "clients"):
            raise ValueError('kind "natural" has its own target; leave target out')
        if self.transform != "none" and self.target != "clients":
            raise ValueError('transform needs target = "clients"')
        if self.transform != "none" and self.clients > LOOKS[self.transform]:
            raise ValueError(
                f'transform = "{self.transform}" has looks for {LOOKS[self.transform]} clients, '
                f"and shift.clients = {self.clients}; set shift.clients = "
                f"{LOOKS[self.transform]} or fewer{_WIDER * (self.transform != 'wide')}"
            )
        if self.intensity is not None and self.transform != "bits":
            raise ValueError('intensity is for transform = "bits"')
        # Both would compete for the one change that a client's images go through.
        if self.noise and self.transform != "none":
            raise ValueError("noise and transform both change images; give one of them")
        if self.noisy_test and (not self.noise or self.target == "clients"):
            raise ValueError(
                'noisy_test needs noise, and a target other than "clients", whose test images have '
                "their clients' noise anyway"
            )
        return self

    def shift(self) -> shifts.Shift:
        """The shift by labels that `kind` names. Raises ValueError for "natural" and "writers"."""
        if self.kind in ("natural", "writers"):
            raise ValueError(f'kind "{self.kind}" deals nothing by labels')
        return _KINDS[self.kind][0](**self._arguments())  # type: ignore[no-any-return]

    def arguments(self) -> dict[str, str]:
        """What the shift's arguments are called here: argument -> key of [shift]."""
        return {"clients": "clients"} | {v: k for k, v in _KINDS[self.kind][1].items()}

    def _arguments(self) -> dict[str, Any]:
        """The options of `kind` under their names there. Raises ValueError for a foreign one."""
        names = _KINDS[self.kind][1]
        given = {k: getattr(self, k) for k in _OPTIONS if getattr(self, k) is not None}
        for key in given:
            if key not in names:
                allowed = ", ".join(names) or "none"
                raise ValueError(f'"{key}" is not an option of kind "{self.kind}" ({allowed})')
        if "labels_per_client" in names:
            # C = 3 of the FedPALS paper's Table 1; the other options have no default.
            given.setdefault("labels_per_client", 3)
        if "beta" in names and "beta" not in given:
            raise ValueError(f'kind "{self.kind}" needs beta')
        return {names[k]: v for k, v in given.items()}


# Keys that only some kinds have; each is None unless the file sets it.
_OPTIONS = (
    "labels_per_client",
    "samples",
    "common_labels",
    "cover",
    "reach",
    "beta",
    "shards_per_client",
    "min_size",
    "capacity",
    "rule",
    "delta",
)
# kind -> its class, None where nothing is dealt by labels, and key of [shift] -> its argument.
_KINDS: dict[str, tuple[Any, dict[str, str]]] = {
    "sparsity": (shifts.Sparsity, {"labels_per_client": "labels_per_client"}),
    "dirichlet-per-client": (
        shifts.DirichletPerClient,
        {"beta": "beta", "min_size": "min_size", "rule": "rule"},
    ),
    "dirichlet-per-class": (
        shifts.DirichletPerClass,
        {"beta": "beta", "min_size": "min_size", "capacity": "capacity"},
    ),
    "shards": (shifts.Shards, {"shards_per_client": "per_client"}),
    "iid": (shifts.Iid, {}),
    "quantity": (shifts.QuantitySkew, {"beta": "beta", "min_size": "min_size"}),
    "label-sets": (
        shifts.LabelSetSplit,
        {
            "labels_per_client": "labels_per_client",
            "samples": "samples",
            "common_labels": "common",
            "cover": "cover",
            "reach": "reach",
        },
    ),
    "writers": (None, {}),
    "natural": (None, {"delta": "delta"}),
}
