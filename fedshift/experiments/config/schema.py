"""The configuration of one experiment: typed, frozen, and the only schema there is."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fedshift.errors import shown
from fedshift.experiments.config.data import Data as Data
from fedshift.experiments.config.data import with_source
from fedshift.experiments.config.named_files import with_paths
from fedshift.experiments.config.python_names import PYTHON as PYTHON
from fedshift.experiments.config.python_names import is_python
from fedshift.experiments.config.section import Count, Positive, Section
from fedshift.experiments.config.shift import Split
from fedshift.seeds import Seeds


class ServerData(Section):
    """[server]: how many training examples the server has itself, before any client gets one.

    unlabeled: inputs without labels, for central tuning. validation: labelled ones, which follow
    the target. Both are drawn in the label proportions of the training file, and of each set as
    many rows are used as can follow T. With data that have clients of their own, rows are drawn
    from all clients, in the label proportions of these. Then all unlabeled rows are used, and of
    the labelled ones as many as can follow T.
    """

    unlabeled: Annotated[int, Field(ge=0)] = 0
    validation: Annotated[int, Field(ge=0)] = 0


NETWORKS = (
    "lenet", "mlp", "mlp-projected", "mlp-moon", "linear", "lenet-moon", "lenet-gn",
    "lenet-gn-small", "resnet18-projected", "resnet18-gn", "resnet18", "resnet50",
)  # fmt: skip
# The networks that take a key of [model].
NETWORKS_WITH = {
    "hidden": ("mlp", "mlp-moon", "mlp-projected"),
    "pretrained": ("resnet18", "resnet50"),
    "weights": ("resnet18", "resnet50"),
    "freeze_norm": ("resnet18", "resnet50"),
    "projection": ("resnet18", "resnet50", "mlp-moon", "lenet-moon"),
    "branches": ("lenet-gn",),
}


def _network_name(name: str) -> str:
    if name in NETWORKS or name == PYTHON or is_python(name):
        return name
    expected = ", ".join([*NETWORKS, "FILE.py:NAME"])
    raise PydanticCustomError("literal_error", "one of {expected}", {"expected": expected})


class Network(Section):
    """[model]: "lenet", "mlp" (with `hidden`), "linear", a ResNet, or yours as "net.py:Net".

    "resnet18-gn" has group normalisation, the other ResNets batch normalisation, which may start
    from ImageNet weights (pretrained, through torchvision, or those in the file `weights`) and keep
    its statistics (freeze_norm; also with a network of your own that has BatchNorm).
    projection: width of a linear layer between such a body and the classifier (none if left out).
    "lenet-gn", "lenet-gn-small", "resnet18-projected" and "mlp-projected" (with `hidden`) are for
    FedDRM and what it is compared with; `branches` says where its branches part in "lenet-gn".
    "mlp-moon" (with `hidden`) and "lenet-moon" have MOON's projection head, two layers with a ReLU
    between, before the classifier; there `projection` is its width (256 if left out).
    classifier: "etf" is the fixed one of `fedshift.models.etf`, for any of these; if left out, what
    the method needs. temperature: its first one (0.1 if left out). "python" stands for a network
    that a program gave.
    """

    name: Annotated[str, AfterValidator(_network_name)] = "lenet"
    branches: Literal["deep", "mid", "shallow", "none"] | None = None
    hidden: tuple[Count, ...] = (200,)
    pretrained: bool = False
    weights: Annotated[str, Field(min_length=1)] | None = None
    freeze_norm: bool = False
    projection: Count | None = None
    classifier: Literal["linear", "etf"] | None = None
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _takes(self) -> Network:
        yours = self.name == PYTHON or is_python(self.name)
        if yours and self.classifier == "etf":
            raise ValueError(
                "classifier is for the library's networks; in yours, let EtfHead of "
                "fedshift.models.etf be the last layer"
            )
        for key, names in NETWORKS_WITH.items():
            # Run folders record every key: a default is no choice of the user's.
            if (
                self.name not in names
                and not (yours and key == "freeze_norm")
                and getattr(self, key) != type(self).model_fields[key].default
            ):
                *others, last = (f'"{name}"' for name in names)
                allowed = f"{', '.join(others)} and {last}" if others else last
                given = "a network of your own" if yours else f'"{self.name}"'
                raise ValueError(f"{key} is for {allowed}, not for {given}")
        return self


class Method(Section):
    """[method]: a recipe's name, or yours as "mine.py:make"; its options are the other keys.

    "python" stands for a method that a program gave.
    """

    # Any key is allowed here: which options a method has is known to its recipe alone.
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
    prior: how that model is moved to the target's labels, see
    `fedshift.experiments.measures.correcting`.
    on_bad_reply and the five that follow: see `fedshift.engine.checks.gate.Gate`. deadline:
    seconds for a round on Flower, after which clients that have not answered drop out. retries: how
    often a client is asked again on Flower that says it failed.
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
    max_weight: Annotated[float, Field(gt=0, le=1)] | None = None
    max_reply: Positive = 8.0
    prior: Literal["none", "target", "calibrated"] = "none"
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


class OwnMetrics(Section):
    """[metrics]: your functions as "m.py:auc", of (probabilities [n, K], labels [n])."""

    extra: tuple[str, ...] = ()

    @field_validator("extra")
    @classmethod
    def _named(cls, extra: tuple[str, ...]) -> tuple[str, ...]:
        for text in extra:
            if not is_python(text):
                raise ValueError(f'"{shown(text)}": write it as FILE.py:NAME, as in m.py:auc')
        names = [text.rpartition(":")[2] for text in extra]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'two functions are named "{twice}"; rename one of them')
        return extra


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

    # A folder gets this name: no separators, and not "." or "..".
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
    metrics: OwnMetrics = OwnMetrics()
    seeds: SeedTable = SeedTable()

    @property
    def clients(self) -> int:
        """How many clients train, according to the file."""
        return self.shift.clients if self.data.clients is None else len(self.data.clients)

    @property
    def identity(self) -> str:
        """A hash of the keys that differ from their defaults, without `name`: it tells runs apart.

        A key that a later version adds changes nothing as long as it has its default. Files count
        by their names alone: a project may be moved, and what they hold has checksums elsewhere.
        """
        given = self.model_dump(exclude_defaults=True, exclude={"name"})
        tables = with_paths(given, os.path.basename)
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _used_by_clients(cls, given: Any) -> Any:
        """data.target = "clients", with a source, implies shift.target = "clients"."""
        data = given.get("data") if isinstance(given, dict) else None
        if not isinstance(data, dict) or data.get("target") != "clients":
            return given
        if "source" in with_source(data):
            return {**given, "shift": given.get("shift", {"target": "clients"})}
        return given

    @model_validator(mode="after")
    def _comes_with_clients(self) -> Config:
        if self.data.source in (None, PYTHON):
            return self
        if self.shift not in (Split(), Split(target="clients")):
            raise ValueError(
                "[shift] deals the sets of `fedshift datasets` to clients; data of your own have "
                "theirs, and data.target says where the model is used. Leave [shift] out"
            )
        if self.server != ServerData() and self.data.at_sites:
            raise ValueError(
                "[server] takes rows of clients, and these stay with the clients; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _servers_share(self) -> Config:
        server, shift = self.server, self.shift
        if (
            self.data.source is None
            and server != ServerData()
            and (shift.kind == "natural" or shift.target == "clients")
        ):
            raise ValueError(
                "[server] takes its examples from a training file that is dealt to clients: not "
                'with shift.kind = "natural" or shift.target = "clients". Leave [server] out'
            )
        if self.data.source is None and server.validation and shift.target == "drawn":
            raise ValueError(
                'server.validation: with shift.target = "drawn" the part that is drawn for the '
                "target validates; leave it out"
            )
        return self
