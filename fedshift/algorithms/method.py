"""What a federated method is: pure functions, cut where messages cross the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypedDict

from torch import Tensor

from fedshift.arguments import called
from fedshift.client.local import Local
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.tree import Params, Parts


class LabelRules(TypedDict):
    """How a method treats label sets, in the words of an experiment file; "none" if not tuned."""

    mode: str
    tune: str
    tune_over: str | None


class Method:
    """One federated method. A frozen dataclass with a field `model`; every method of it is pure.

    Contract
    1. Outputs depend on the arguments only; argument tensors are never written to; no global
       random generator, no input or output.
    2. `client_update` sees its message, its own state, its data and its plans, nothing else. The
       update that it returns is everything that leaves the client.
    3. Only parts that changed are returned; the caller merges (`state | changed`).
    4. Shapes are fixed and `client_update` has no Python that depends on tensor values.
    5. `updates` arrive stacked, leaves [C, ...], in ascending client id, with the server's own part
       "cohort": id [C], weight [C] (float64, on the simplex) and cap [], the largest weight that
       a client may have in this round (weights from replies must keep to it); see `sums`.
    6. Branch on hyper-parameters; do not multiply by zero.
    7. The functions of `REQUIRED` are what a method must say; everything else has a default.
    8. "delta" has the names of the "params" that were sent, without those of `model.fixed`.

    `server` and `state` are always `Parts`. The server's part "table" has what clients registered
    before round 1 (n [N], labels [N, K]). Weights come from it, never from a reply. The object from
    `at(t)` answers for round t.
    """

    model: Model

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        """The server's state before round 1."""
        raise NotImplementedError

    def phases(self) -> Mapping[str, Local]:
        """The local phases to draw plans for, by name."""
        raise NotImplementedError

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        """Weights [C] of a cohort, called before any client trains; ids [C] ascending."""
        raise NotImplementedError

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        """(update that leaves the client, changed parts of its state)."""
        raise NotImplementedError

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        """The changed parts of the server's state."""
        raise NotImplementedError

    def reveals(self) -> Mapping[str, str]:
        """What leaves a client: part of the update (or "register") -> what it is."""
        raise NotImplementedError

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        """A client's state before its first round; per-example entries have their full length."""
        return {}

    def trains(self, weights: Tensor) -> Tensor:
        """Which clients of the cohort to contact, [C] bool; the others would change nothing."""
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        """The message to one client; `server` also has the part "cohort" (id [C], weight [C])."""
        return {"params": server["params"], "buffers": server["buffers"]}

    def model_for(self, server: Parts, state: Parts) -> tuple[Params, Params]:
        """(parameters, buffers) that a client with this state would serve.

        `server` is the server's state or, if clients evaluate, the message that this one received.
        """
        return server["params"], server["buffers"]

    def at(self, t: int) -> Method:
        """The method of round t; itself unless it has stages."""
        return self

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """Parts of the update of which the server needs only a weighted sum: part -> weights [C].

        `server` is the state before the round; cohort has id and weight [C]. Such a part may reach
        `server_update` as sum_i w_i v_i, leaves [...], added up while replies arrive;
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

    def trained_model(self) -> Model | None:
        """The network trained in this round, None if no model is sent; `model` by default.

        A stage that trains another network, such as FedDisk's density, returns that one.
        """
        return self.model

    def is_elementwise(self) -> bool:
        """Whether everything that `client_update` does besides training is done entry by entry.

        Then a backend that trains clients together may call it once for several clients, with all
        leaves [C, ...], plans included; what it returns is stacked in the same way. False by
        default.
        """
        return False

    def needs_classes(self) -> bool:
        """Whether the method, apart from its objective, works only with classes; False by default.

        If so, it cannot be used to predict numbers.
        """
        return False

    def mixes_counts(self) -> bool:
        """Whether a round depends on counts of clients that are not in it; False by default.

        If so, the run cannot begin before all clients have registered theirs.
        """
        return False

    def label_weights(self, server: Parts, ids: Tensor, weights: Tensor) -> Tensor | None:
        """How many times clients count an example of each label in their loss, w [C, K] float64.

        For the clients `ids`, which have these weights [C]. None, the default, means once.
        """
        return None

    def most_sent(self, params: Params) -> int:
        """Bytes of the largest update that does not have the model's form; 0 (default) for none.

        Replies are limited to a multiple of the model's bytes (`Gate.max_reply`). With this number
        the engine checks before round 1 that the limit allows the method's updates.
        """
        return 0

    def label_rules(self) -> LabelRules | None:
        """How label sets are treated; None, the default, means that there are none."""
        return None


REQUIRED = ("init", "phases", "weigh", "client_update", "server_update", "reveals")
# What a wrapper does not pass on unseen: which stage it wraps, and how its own update works.
OWN = ("at", "is_elementwise")
FORWARDED = tuple(k for k in vars(Method) if not k.startswith("_") and k not in OWN)


@dataclass(frozen=True)
class Wrapper(Method):
    """A method that wraps another: everything that it does not define is `inner`'s.

    All functions of `Method` are passed on in one place, below the class. A wrapper that forgot one
    would hide, for example, that its inner method trains a router.
    """

    inner: Method

    @property
    def model(self) -> Model:  # type: ignore[override]
        """The network of `inner`."""
        return self.inner.model

    def at(self, t: int) -> Method:
        stage = self.inner.at(t)
        if not stage.moves_server():
            return stage  # in this round `inner` trains no model that could be wrapped
        return self if stage is self.inner else replace(self, inner=stage)

    def is_elementwise(self) -> bool:
        """Whether `inner` is; not asked of a wrapper with a `client_update` of its own."""
        return is_elementwise(self.inner.client_update)


def _passed_on(name: str) -> Callable[..., Any]:
    @wraps(getattr(Method, name))
    def ask_inner(self: Wrapper, *args: Any) -> Any:
        return getattr(self.inner, name)(*args)

    return ask_inner


for _name in FORWARDED:
    setattr(Wrapper, _name, _passed_on(_name))


def check_method(algorithm: Any) -> None:
    """Raise InputError unless the object is a `Method` whose model is a `Model`."""
    if isinstance(algorithm, type) and issubclass(algorithm, Method):
        raise InputError(
            f"algorithm is {called(algorithm)}; give an object of it, {algorithm.__name__}(model)"
        )
    if not isinstance(algorithm, Method):
        own = hasattr(algorithm, "client_update") and not isinstance(algorithm, type)
        inherit = "let its class inherit fedshift.algorithms.method.Method"
        cure = inherit if own else "give a method, as FedAvg(model)"
        raise InputError(f"algorithm is {called(algorithm)}; {cure}")
    if missing := [k for k in REQUIRED if getattr(type(algorithm), k) is getattr(Method, k)]:
        raise InputError(f"algorithm is {called(algorithm)}, which lacks {missing[0]}; define it")
    if not isinstance(getattr(algorithm, "model", None), Model):
        found = called(getattr(algorithm, "model", None))
        raise InputError(f"the algorithm's model must be a Model, got {found}; give Model(net)")


def is_elementwise(client_update: Callable[..., Any]) -> bool:
    """Whether this `client_update` may be called for several clients at once.

    Its method must define `is_elementwise` in the same class as `client_update`: a subclass may
    have overridden one alone. And its phases must train as `Local` does, since only `Local` passes
    stacked clients on to a `Trainer`.
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
    """Name the phases `train0`, `train1`, ...; `personal0`, ... if the model stays on the client.

    All methods use these names, which are keys of the random streams: so a client sees the same
    batches in the same round with every method.
    """
    phases = local if isinstance(local, tuple) else (local,)
    return {f"{name}{i}": phase for i, phase in enumerate(phases)}
