"""What a federated method is: pure functions, cut where messages cross the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar

from torch import Tensor

from fedshift.arguments import called, check_kind, members
from fedshift.client.local import Local
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params, Parts

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Algorithm(Protocol):
    """One federated method. A frozen dataclass; every method of it is pure.

    Contract
    1. Outputs depend on the arguments only; argument tensors are never written to; no global
       random generator, no input or output.
    2. `client_update` sees its message, its own state, its data and its plans, nothing else. The
       update that it returns is everything that leaves the client.
    3. Only parts that changed are returned; the caller merges (`state | changed`).
    4. Shapes are fixed and `client_update` has no Python that depends on tensor values.
    5. `updates` arrive stacked, leaves [C, ...], in ascending client id, with the server's own part
       "cohort": id [C], weight [C] (float64, on the simplex) and cap [], the largest weight that
       a client may have in this round (weights from replies must keep to it); see
       `Capabilities.sums`.
    6. Branch on hyper-parameters; do not multiply by zero.
    7. Everything optional is declared by the methods of `Capabilities`, each with a default.
    8. "delta" has the names of the "params" that were sent, without those of `model.fixed`.

    `server` and `state` are always `Parts`; the server's part "table" holds what clients registered
    before round 1 (n [N], labels [N, K]), and weights come from it, never from a reply.
    """

    @property
    def model(self) -> Model:
        """The network that the method trains."""

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        """The server's state before round 1."""

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """What stays on a client before its first round; full length for per-example entries."""

    def phases(self) -> Mapping[str, Local]:
        """The local phases to draw plans for, by name."""

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        """Weights [C] of a cohort, before any client trains; ids [C] ascending."""

    def trains(self, weights: Tensor) -> Tensor:
        """Which of the cohort must be contacted, [C] bool; the others change nothing."""

    def broadcast(self, server: Parts, client: int) -> Parts:
        """The message to one client; `server` also has the part "cohort" (id [C], weight [C])."""

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        """(update that leaves the client, changed parts of its state)."""

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        """The changed parts of the server's state."""

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        """(parameters, buffers) that a client with this state would serve.

        `server` is the server's state; where clients evaluate, what one was sent stands in for it.
        """

    def reveals(self) -> Mapping[str, str]:
        """What leaves a client: part of the update (or "register") -> what it is."""

    def at(self, t: int) -> Algorithm:
        """The method of round t; itself unless it has stages."""


class LabelRules(TypedDict):
    """How a method treats label sets: as in an experiment file; tune is "none" without tuning."""

    mode: str
    tune: str
    tune_over: str | None


class Capabilities(Protocol):
    """What a method may declare in addition; the bodies here are the defaults.

    A method that wraps another answers for both, most often with the answer of `inner`:
    `ask(self.inner, Capabilities.sums, server, cohort)`. The object from `at(t)` answers for
    round t.
    """

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Parts of the update of which the server needs only the sum over clients.

        Part -> weights w [C]; `server` as before the round, cohort id, weight [C]. Such a part may
        reach `server_update` as sum_i w_i v_i, leaves [...], summed as replies arrive;
        `fedshift.server.combine.total` reads both forms. By default every reply is kept.
        """
        return {}

    def trains_router(self) -> bool:
        """Whether the server's model learns to predict client ids; False by default.

        If so, the network's "client_logits" need a column per client.
        """
        return False

    def moves_server(self) -> bool:
        """Whether clients receive the server's model and reply with its change; True by default."""
        return True

    def trained_model(self: Any) -> Model | None:
        """The network trained this round, None where no model is sent; `model` by default.

        A stage that trains another network, such as FedDisk's density, returns that one.
        """
        model: Model = self.model
        return model

    def is_elementwise(self) -> bool:
        """Whether all that `client_update` does besides training is done entry by entry.

        Then several clients may be given to it at once, all leaves [C, ...], plans included, where
        one phase is trained so; its answers are stacked likewise. By default not.
        """
        return False

    def needs_classes(self) -> bool:
        """Whether it reads outputs as class logits, or labels as classes, beside its objective.

        If so, no number can be predicted with it; False by default.
        """
        return False

    def mixes_counts(self) -> bool:
        """Whether a round depends on counts of clients that are not in it; False by default.

        If so, it cannot begin before all clients have registered theirs.
        """
        return False

    def label_weights(self, server: Parts, ids: Tensor, weights: Tensor) -> Tensor | None:
        """How often clients count an example of each label in their loss, w [C, K] float64.

        For the clients `ids` with these weights [C]; None, the default, means once.
        """
        return None

    def most_sent(self, params: Params) -> int:
        """Bytes of the largest update whose form is not the model's; 0, the default, without one.

        The bound on replies is in times the model's bytes (`Gate.max_reply`), and is looked at
        before round 1 by this number.
        """
        return 0

    def label_shares(self) -> tuple[float, ...] | None:
        """[K] to which the server fits the model; None, the default: to those of its clients."""
        return None

    def label_rules(self) -> LabelRules | None:
        """How label sets are treated; None, the default, means that there are none."""
        return None


def ask(
    method: object,
    capability: Callable[Concatenate[Any, Arguments], Answer],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> Answer:
    """A method's answer for one of `Capabilities`, or the default if it does not define it.

    Example: `ask(algorithm, Capabilities.trains_router)`. Methods need not inherit from anything.
    """
    # By name, because users' methods inherit from nothing.
    defined: Callable[Arguments, Answer] | None = getattr(method, capability.__name__, None)
    return capability(method, *args, **kwargs) if defined is None else defined(*args, **kwargs)


def check_method(algorithm: Any) -> None:
    """Raise InputError unless the object has every member of `Algorithm`, and a `Model`."""
    # More than two missing members: most likely no method at all, so naming one would not help.
    missing = [name for name in members(Algorithm) if not hasattr(algorithm, name)]
    if isinstance(algorithm, type):
        raise InputError(
            f"algorithm is {called(algorithm)}; give an object of it, {algorithm.__name__}(model)"
        )
    if isinstance(algorithm, Model) or len(missing) > 2:
        raise InputError(f"algorithm is {called(algorithm)}; give a method, as FedAvg(model)")
    if missing:
        raise InputError(
            f"algorithm is {called(algorithm)}, which lacks {missing[0]}; a method has all that "
            "fedshift.algorithms.base.Algorithm names"
        )
    check_kind("the algorithm's model", algorithm.model, Model, "give Model(net)")


def is_elementwise(client_update: Callable[..., Any]) -> bool:
    """Whether a method says `Capabilities.is_elementwise` of this `client_update`.

    It must say so in the class that defines the function, since a subclass may have changed one
    alone; and its phases must train as `Local` does, which leaves several clients to a `Trainer`.
    """
    method: Any = getattr(client_update, "__self__", None)
    # The most derived class that defines `client_update`, as Python would look it up.
    kinds = (kind for kind in type(method).__mro__ if "client_update" in vars(kind))
    if "is_elementwise" not in vars(next(kinds, object)) or not method.is_elementwise():
        return False
    return all(type(phase).__call__ is Local.__call__ for phase in method.phases().values())


def rows(server: Parts, ids: Tensor) -> Params:
    """The server's table for the clients `ids`."""
    return {k: v[ids] for k, v in server["table"].items()}


def numbered(local: Local | tuple[Local, ...], name: str = "train") -> dict[str, Local]:
    """Phase names `train0`, `train1`, ... for all methods: names are keys of the random streams.

    In every method a phase that trains a model which stays on the client is called `personal0`, ...
    The same client then sees the same batches in the same round, whichever method it is.
    """
    phases = local if isinstance(local, tuple) else (local,)
    return {f"{name}{i}": phase for i, phase in enumerate(phases)}
