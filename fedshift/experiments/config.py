"""The configuration of one experiment: typed, frozen, and the only schema there is."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from fedshift.datasets import entry
from fedshift.datasets.registry import sized
from fedshift.experiments.config_shift import Split
from fedshift.experiments.section import Count, Positive, Section
from fedshift.seeds import Seeds

# The source of data, and the name of a network or method, that a program gave.
PYTHON = "python"


class Data(Section):
    """[data]: which data set, and the share of each client's examples kept for validation.

    For shift.target = "clients", training and test file are one pool, of which `limit` examples are
    drawn (all if left out), and each client keeps the share `test` of its examples for testing.
    size: pixels a side, for sets that are decoded to a size of choice (96 if left out). augment:
    "photos" changes training images at random, see `fedshift.datasets.augment`. source: where data
    of your own come from, "python" for data that a program gave; name is then what results call
    them.
    """

    source: Annotated[str, Field(min_length=1)] | None = None
    name: str = "fashion-mnist-mini"
    size: Count | None = None
    augment: Literal["none", "photos"] = "none"
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.2
    test: Annotated[float, Field(gt=0, lt=1)] = 0.3
    limit: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _called(cls, given: Any) -> Any:
        """Data of one's own that are given no name are called by their source."""
        if isinstance(given, dict) and given.get("source") is not None:
            return {"name": given["source"], **given}
        return given

    @field_validator("name")
    @classmethod
    def _known(cls, name: str, others: ValidationInfo) -> str:
        return entry(name).name if others.data.get("source") is None else name

    @model_validator(mode="after")
    def _decoded(self) -> Data:
        if self.size is not None and (self.source is not None or not entry(self.name).sized):
            names = " and ".join(f'"{name}"' for name in sized())
            raise ValueError(f'size is for {names}, not for "{self.name}"')
        return self


class ServerData(Section):
    """[server]: how many training examples the server has itself, before any client gets one.

    unlabeled: inputs without labels, for central tuning. validation: labelled ones, which follow
    the target. Both are drawn in the label proportions of the training file; of these as many are
    used as T allows.
    """

    unlabeled: Annotated[int, Field(ge=0)] = 0
    validation: Annotated[int, Field(ge=0)] = 0


# The networks that take a key of [model].
NETWORKS_WITH = {
    "hidden": ("mlp", "mlp-moon", "mlp-projected"),
    "pretrained": ("resnet18", "resnet50"),
    "freeze_norm": ("resnet18", "resnet50"),
    "projection": ("resnet18", "resnet50", "mlp-moon", "lenet-moon"),
    "branches": ("lenet-gn",),
}


class Network(Section):
    """[model]: "lenet", "mlp" (with `hidden`), "linear", or a ResNet.

    "resnet18-gn" has group normalisation, the other ResNets batch normalisation, which may start
    from ImageNet weights (pretrained, through torchvision) and keep its statistics (freeze_norm).
    projection: width of a linear layer between such a body and the classifier (none if left out).
    "lenet-gn", "lenet-gn-small", "resnet18-projected" and "mlp-projected" (with `hidden`) are for
    FedDRM and what it is compared with; `branches` says where its branches part in "lenet-gn".
    "mlp-moon" (with `hidden`) and "lenet-moon" have MOON's projection head, two layers with a ReLU
    between, before the classifier; there `projection` is its width (256 if left out). "python"
    stands for a network that a program gave.
    """

    name: Literal[
        "lenet",
        "mlp",
        "mlp-projected",
        "mlp-moon",
        "linear",
        "lenet-moon",
        "lenet-gn",
        "lenet-gn-small",
        "resnet18-projected",
        "resnet18-gn",
        "resnet18",
        "resnet50",
        "python",
    ] = "lenet"
    branches: Literal["deep", "mid", "shallow", "none"] | None = None
    hidden: tuple[Count, ...] = (200,)
    pretrained: bool = False
    freeze_norm: bool = False
    projection: Count | None = None

    @model_validator(mode="after")
    def _takes(self) -> Network:
        for key, names in NETWORKS_WITH.items():
            # Run folders record every key: a default is no choice of the user's.
            if (
                self.name not in names
                and getattr(self, key) != type(self).model_fields[key].default
            ):
                *others, last = (f'"{name}"' for name in names)
                allowed = f"{', '.join(others)} and {last}" if others else last
                raise ValueError(f'{key} is for {allowed}, not for "{self.name}"')
        return self


class Method(Section):
    """[method]: a recipe's name; the recipe's options are the other keys.

    "python" stands for a method that a program gave.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str = "fedavg"

    @property
    def options(self) -> dict[str, Any]:
        """The recipe's options as given."""
        return dict(self.model_extra or {})


class Training(Section):
    """[training]: rounds, local SGD (or Adam) and the server's step.

    precision: of the layers' products in local training, see `fedshift.client.local.Local`.
    schedule: the local learning rate is lr throughout, or lr/2 (1 + cos(pi (t-1)/rounds)).
    cohort: clients drawn per round (all if left out). Metrics are taken every `evaluate_every`
    rounds, in each of the last `evaluate_last`, and after the last. patience: training ends once
    the target accuracy that the clients' validation examples estimate has not risen for so many
    rounds. keep: the model of the last round, or of the round with the largest such estimate.
    on_bad_reply and the three that follow: see `fedshift.engine.checks.gate.Gate`. deadline:
    seconds for a round, after which clients that have not answered drop out (with --workers and on
    Flower). retries: how often a client is asked again whose process died (--workers), or that says
    it failed (Flower).
    """

    rounds: Count = 150
    epochs: Count | None = None
    steps: Count | None = None
    batch: Count = 32
    optimizer: Literal["sgd", "adam"] = "sgd"
    precision: Literal["float32", "bfloat16"] = "float32"
    lr: Positive = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    server_lr: Positive = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    cohort: Count | None = None
    evaluate_every: Count = 5
    evaluate_last: Annotated[int, Field(ge=0)] = 0
    patience: Count | None = None
    keep: Literal["last", "best"] = "last"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    on_bad_reply: Literal["stop", "drop"] = "stop"
    max_norm: Positive | None = None
    min_clients: Count = 1
    max_gap: Positive | None = None
    deadline: Positive | None = None
    retries: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _late(self) -> Training:
        if self.on_bad_reply == "stop" and self.deadline is not None:
            raise ValueError('deadline says when clients drop out; set on_bad_reply = "drop"')
        return self

    @model_validator(mode="after")
    def _skips(self) -> Training:
        if self.on_bad_reply == "stop" and (self.min_clients > 1 or self.max_gap is not None):
            raise ValueError(
                'min_clients and max_gap say when a round is skipped; set on_bad_reply = "drop"'
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> Training:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, not both")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError('momentum is SGD\'s; leave it out with optimizer = "adam"')
        return self

    def draws(self, clients: int) -> bool:
        """Whether a round has fewer than all of the clients."""
        return self.cohort is not None and self.cohort < clients

    def evaluates(self, t: int) -> bool:
        """Whether metrics are taken after round t."""
        return t % self.evaluate_every == 0 or t > self.rounds - max(self.evaluate_last, 1)


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

    name: Annotated[
        str, Field(min_length=1, max_length=80, pattern=r"^[. ]*[\w+=-][\w.+= -]*$")
    ] = "run"
    data: Data = Data()
    shift: Split = Split()
    server: ServerData = ServerData()
    model: Network = Network()
    method: Method = Method()
    training: Training = Training()
    selection: Selection = Selection()
    seeds: SeedTable = SeedTable()

    @property
    def identity(self) -> str:
        """A hash of the keys that differ from their defaults, but for `name`: one run has one.

        A key that a later version adds changes nothing as long as it has its default.
        """
        given = self.model_dump(exclude_defaults=True, exclude={"name"})
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _servers_share(self) -> Config:
        server, shift = self.server, self.shift
        if (server.unlabeled or server.validation) and (
            shift.kind == "natural" or shift.target == "clients"
        ):
            raise ValueError(
                "[server] takes its examples from a training file that is dealt to clients: not "
                'with shift.kind = "natural" or shift.target = "clients"'
            )
        if server.validation and shift.target == "drawn":
            raise ValueError(
                'server.validation: with shift.target = "drawn" the part that is drawn for the '
                "target validates; leave it out"
            )
        return self
