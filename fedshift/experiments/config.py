"""The configuration of one experiment: typed, frozen, and the only schema there is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fedshift import shifts
from fedshift.datasets import known
from fedshift.errors import unknown
from fedshift.seeds import Seeds

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the TOML file: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Data(Section):
    """[data]: which data set, and the share of each client's examples kept for validation.

    For shift.target = "clients", training and test file are one pool, of which `limit` examples are
    drawn (all if left out), and each client keeps the share `test` of its examples for testing.
    size: pixels a side that pacs and iwildcam are decoded to (96 if left out). augment: "photos"
    changes training images at random, see `fedshift.datasets.augment`.
    """

    name: str = "fashion-mnist-mini"
    size: Count | None = None
    augment: Literal["none", "photos"] = "none"
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.2
    test: Annotated[float, Field(gt=0, lt=1)] = 0.3
    limit: Count | None = None

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        names = [one.name for one in known()]
        if name not in names:
            raise unknown("data set", name, names)
        return name

    @model_validator(mode="after")
    def _decoded(self) -> Data:
        if self.size is not None and self.name not in ("pacs", "iwildcam"):
            raise ValueError(f'size is for "pacs" and "iwildcam", not for "{self.name}"')
        return self


class Split(Section):
    """[shift]: how examples are dealt to the training clients, and what the target is.

    target: "drawn" (by the same machinery, as one client more), "uniform", K numbers, or "clients":
    the model is used on the clients' own kind of data, and every client keeps a test set.
    transform, intensity: what each client's images go through (`fedshift.shifts.covariate`).
    target_noise: the server is told normalise(T + target_noise * max(eps, 0)), eps ~ N(0, I_K);
    test and validation examples follow T all the same.
    Kind "natural" takes the data set's own clients and target. Other keys depend on `kind`; see
    `fedshift.shifts`.
    """

    kind: Literal[
        "sparsity",
        "dirichlet-per-client",
        "dirichlet-per-class",
        "shards",
        "iid",
        "quantity",
        "natural",
    ] = "sparsity"
    clients: Count = 9
    target: Literal["drawn", "uniform", "clients"] | tuple[float, ...] = "drawn"
    transform: Literal["none", "bits", "wide", "fashion"] = "none"
    intensity: Literal["low", "mid", "high"] | None = None
    normalise_target: bool = False
    target_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    labels_per_client: Count | None = None
    beta: Positive | None = None
    shards_per_client: Count | None = None
    min_size: Annotated[int, Field(ge=0)] | None = None
    capacity: bool | None = None
    rule: Literal["exact", "fill"] | None = None
    delta: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _options_of_kind(self) -> Split:
        options = self._given()
        if self.kind != "natural":
            _KINDS[self.kind][0](**options)
        elif self.target not in ("drawn", "clients"):
            raise ValueError('kind "natural" has its own target; leave target out')
        if self.transform != "none" and self.target != "clients":
            raise ValueError('transform needs target = "clients"')
        if self.intensity is not None and self.transform != "bits":
            raise ValueError('intensity is for transform = "bits"')
        return self

    def shift(self) -> shifts.Shift:
        """The shift that `kind` and its options name. Raises ValueError for kind "natural"."""
        if self.kind == "natural":
            raise ValueError('kind "natural" deals nothing: the data set has its own clients')
        return _KINDS[self.kind][0](**self._given())  # type: ignore[no-any-return]

    def _given(self) -> dict[str, Any]:
        """The options of `kind` under their names there. Raises ValueError for a foreign one."""
        names = _KINDS[self.kind][1]
        given = {k: getattr(self, k) for k in _OPTIONS if getattr(self, k) is not None}
        for key in given:
            if key not in names:
                allowed = ", ".join(names) or "none"
                raise ValueError(f'"{key}" is not an option of kind "{self.kind}" ({allowed})')
        if "labels_per_client" in names:
            given.setdefault("labels_per_client", 3)
        if "beta" in names and "beta" not in given:
            raise ValueError(f'kind "{self.kind}" needs beta')
        return {names[k]: v for k, v in given.items()}


_OPTIONS = (
    "labels_per_client",
    "beta",
    "shards_per_client",
    "min_size",
    "capacity",
    "rule",
    "delta",
)
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
    "natural": (None, {"delta": "delta"}),
}


class Network(Section):
    """[model]: "lenet", "mlp" (with `hidden`), "linear", or a ResNet.

    "resnet18-gn" has group normalisation, the other ResNets batch normalisation, which may start
    from ImageNet weights (pretrained, through torchvision) and keep its statistics (freeze_norm).
    projection: width of a linear layer between such a body and the classifier (none if left out).
    "lenet-gn", "lenet-gn-small", "resnet18-projected" and "mlp-projected" (with `hidden`) are for
    FedDRM and what it is compared with; `branches` says where its branches part in "lenet-gn".
    """

    name: Literal[
        "lenet",
        "mlp",
        "mlp-projected",
        "linear",
        "lenet-gn",
        "lenet-gn-small",
        "resnet18-projected",
        "resnet18-gn",
        "resnet18",
        "resnet50",
    ] = "lenet"
    branches: Literal["deep", "mid", "shallow", "none"] | None = None
    hidden: tuple[Count, ...] = (200,)
    pretrained: bool = False
    freeze_norm: bool = False
    projection: Count | None = None

    @model_validator(mode="after")
    def _batch_norm(self) -> Network:
        for key in ("pretrained", "freeze_norm", "projection"):
            if getattr(self, key) and self.name not in ("resnet18", "resnet50"):
                raise ValueError(f'{key} is for "resnet18" and "resnet50", not for "{self.name}"')
        if self.branches is not None and self.name != "lenet-gn":
            raise ValueError(f'branches is for "lenet-gn", not for "{self.name}"')
        return self


class Method(Section):
    """[method]: a recipe's name; the recipe's options are the other keys."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str = "fedavg"

    @property
    def options(self) -> dict[str, Any]:
        """The recipe's options as given."""
        return dict(self.model_extra or {})


class Training(Section):
    """[training]: rounds, local SGD (or Adam) and the server's step.

    schedule: the local learning rate is lr throughout, or lr/2 (1 + cos(pi (t-1)/rounds)).
    cohort: clients drawn per round (all if left out). Metrics are taken every `evaluate_every`
    rounds, in each of the last `evaluate_last`, and after the last.
    """

    rounds: Count = 150
    epochs: Count | None = None
    steps: Count | None = None
    batch: Count = 32
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    server_lr: Positive = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    cohort: Count | None = None
    evaluate_every: Count = 5
    evaluate_last: Annotated[int, Field(ge=0)] = 0
    threads: Count = 1

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError('momentum is SGD\'s; leave it out with optimizer = "adam"')
        return self

    def evaluates(self, t: int) -> bool:
        """Whether metrics are taken after round t."""
        return t % self.evaluate_every == 0 or t > self.rounds - max(self.evaluate_last, 1)

    @property
    def local_epochs(self) -> int | None:
        """Epochs per round: 1 unless steps are given."""
        return self.epochs if self.epochs is not None else (None if self.steps else 1)


class Selection(Section):
    """[selection]: how `ess = "auto"` chooses among ESS fractions (0 stands for lambda = 0).

    "estimate" needs no target example: sum_y T(y) recall(y) from clients' validation counts.
    "validation" uses examples that follow the target, as the FedPALS paper does.
    """

    rule: Literal["estimate", "validation"] = "estimate"
    grid: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.0, 0.1, 0.25, 0.5, 0.75)

    @model_validator(mode="after")
    def _some(self) -> Selection:
        if not self.grid:
            raise ValueError("grid needs at least one ESS fraction")
        return self


class SeedTable(Section):
    """[seeds]: one run seed, and any of the four streams set apart from it."""

    run: Annotated[int, Field(ge=0)] = 0
    split: Annotated[int, Field(ge=0)] | None = None
    init: Annotated[int, Field(ge=0)] | None = None
    cohort: Annotated[int, Field(ge=0)] | None = None
    batch: Annotated[int, Field(ge=0)] | None = None

    def resolved(self) -> Seeds:
        """The four seeds; those left out are the run seed."""
        one = [self.split, self.init, self.cohort, self.batch]
        return Seeds(*(self.run if s is None else s for s in one))


class Config(Section):
    """One experiment."""

    name: Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\w.+= -]+$")] = "run"
    data: Data = Data()
    shift: Split = Split()
    model: Network = Network()
    method: Method = Method()
    training: Training = Training()
    selection: Selection = Selection()
    seeds: SeedTable = SeedTable()
