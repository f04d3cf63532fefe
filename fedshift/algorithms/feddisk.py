"""FedDisk: fit densities, then run any method on examples weighted towards the global density.

The server's state has the parts "density" (the global one) and "importance": the clients' sizes
n [N] and the effective sizes of their weights ess [N]. A client's state has "density" (its own) and
"importance", the weights a [n] of its examples.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, Wrapper, numbered
from fedshift.algorithms.weighing import cure_for_unweighed, notes, unweighed
from fedshift.arguments import check_fields
from fedshift.client.importance import (
    Direct,
    Equal,
    Known,
    NegativeLogDensity,
    Ratio,
    bounded,
    effective_size,
    filled,
    live,
)
from fedshift.client.local import Local, train_locally
from fedshift.data import ClientData, Plan
from fedshift.errors import InputError, NeedlessWarning, TrainingError
from fedshift.model import Model
from fedshift.outputs import dry_pass
from fedshift.server.weights import BySize
from fedshift.tree import Params, Parts, add, sub, weighted_sum

# Our choice: a larger share of values outside the range means that the range is wrong. (A third of
# standardised inputs, for example, is outside [-1, 1].)
MOST_OUTSIDE = 0.05
LOCAL = Local(lr=1e-3, epochs=1, batch=100, optimizer="adam")


@dataclass(frozen=True)
class FedDisk(Wrapper):
    """min sum_i (n_i / N) (1/n_i) sum_j a_i(x_ij) loss(x_ij, y_ij),  a_i(x) = p(x) / q_i(x).

    Rounds 1 to `rounds` fit p, the density of all clients' data, by FedAvg with weights n_i / n
    over the cohort. At the same time each client fits its own q_i, which is never sent, with the
    same network, first weights and batches. In the next `weighing` rounds clients weigh their
    examples. All later rounds are `inner`'s, with each client's `w` multiplied by a_i: importance
    weights change the data, so `inner` can be any method. Learning rates continue over the whole
    run.

    density   network with outputs "log_density" [B] and "logits" [B, D], without buffers
    ratio     how log p - log q_i is estimated, `fedshift.client.importance`
    local     one phase of training, for p and for q_i
    most      a_i is in [n_i / N, most], with mean 1 on each client: `importance.bounded`
    least_ess the smallest effective share (sum a)^2 / (n_i sum a^2) that is accepted
    useful    a client whose weights have a smaller effective share keeps a_i = 1
    span      (low, high) of the density's inputs: 95 % of a client's values must be within; None
              does not check
    reach     widens that range: how many times as far from its middle values may be; 1 for a
              density that clips

    A client that is not drawn in a weighing round keeps a_i = 1. So give enough weighing rounds
    (`weighing.rounds_for_all`), or a cohort of all clients; a NeedlessWarning at the end of
    weighing says how many. The server's part "importance" has each client's ess [N] (0 without
    weighing), and "estimated" [N], that of the weights before `useful` was applied.

    Nguyen, Wu and Chang 2024, "Federated learning for distribution skewed data using sample
    weights" (FedDisk), arXiv 2401.02586. The authors' code averages densities uniformly, although
    their masks differ between clients, and uses min-max scaled odds instead of a ratio.

    Raises InputError for settings out of range, from `init` on if there is no density, and for a
    client with more than 5 % of its values outside of `reach` times `span`; TrainingError if a
    client's weights are worth less than least_ess of its examples.
    """

    inner: Method
    density: Model | None
    ratio: Ratio = Direct()
    rounds: int = 20
    weighing: int = 1
    local: Local = LOCAL
    most: float = 10.0
    least_ess: float = 0.15
    span: tuple[float, float] | None = None
    useful: float = 0.0
    reach: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, v in (("rounds", self.rounds), ("weighing", self.weighing)):
            if v < 1:
                raise InputError(f"FedDisk's {name} must be at least 1, got {v}")
        if not 1.0 < self.most < float("inf"):
            raise InputError(
                f"the largest weight must be finite and above 1, got most = {self.most}"
            )
        for name, share in (("least_ess", self.least_ess), ("useful", self.useful)):
            if not 0.0 <= share < 1.0:
                raise InputError(f"{name} is a share in [0, 1), got {share}")
        if self.density is not None and self.density.init()[1]:
            raise InputError("the density has buffers; masks and the like must not be averaged")

    @property
    def rounds_before_inner(self) -> int:
        """Rounds before the inner method's first."""
        return self.rounds + self.weighing

    def network(self) -> Model:
        """The density. Raises InputError without one."""
        if self.density is None:
            raise InputError(
                "FedDisk has no density network: its size is that of the inputs. Give their shape, "
                "Setting(..., shape=(1, 28, 28))"
            )
        return self.density

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        if isinstance(self.ratio, Known):
            self.ratio.required()
        # Clone: `inner` has the same column, and safetensors refuses tensors that share memory.
        n = table["n"]
        sizes = {"n": n.clone(), "ess": torch.zeros_like(n), "estimated": torch.zeros_like(n)}
        rest = {"density": self._first(params), "importance": sizes}
        return self.inner.init(params, buffers, table) | rest

    def init_client(self, params: Params, buffers: Params, data: ClientData) -> Parts:
        self._check_span(data)
        if isinstance(self.ratio, Known):
            self.ratio.of(data)
        first = self._first(params)
        self._check_shape(first, data)
        rest = {"density": first, "importance": {"a": live(data).double()}}
        return self.inner.init_client(params, buffers, data) | rest

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        # Importance weights change the data; the inner method itself need not know of them.
        a = state["importance"]["a"].to(data.w.dtype)
        return self.inner.client_update(message, state, data._replace(w=data.w * a), plans)

    def reveals(self) -> Mapping[str, str]:
        inner = self.inner.reveals()
        density = f"; of a density of inputs in rounds 1 to {self.rounds}"
        ess = "; the effective sample sizes of its importance weights, when it makes them"
        delta = inner.get("delta", "the change of shared parameters")
        return {**inner, "delta": delta + density, "report": inner["report"] + ess}

    def at(self, t: int) -> Method:
        if t <= self.rounds:
            return FitDensities(self)
        if t <= self.rounds_before_inner:
            return WeighExamples(self, t == self.rounds_before_inner)
        # The inner method counts its own rounds from 1; schedules use the round of the whole run.
        inner = self.inner.at(t - self.rounds_before_inner)
        return self if inner is self.inner else replace(self, inner=inner)

    def _check_span(self, data: ClientData) -> None:
        """Raise InputError if too much is clipped for the density to describe the client's data."""
        x = data.x[live(data)]
        if self.span is None or not x.numel():
            return
        low, high = self.span
        more = (self.reach - 1.0) * (high - low) / 2  # exactly 0 if the density clips (reach = 1)
        outside = int(((x < low - more) | (x > high + more)).sum()) / x.numel()
        if outside > MOST_OUTSIDE:
            where, ends = "outside", "where the density clips them"
            if more:
                where = f"more than {self.reach:g} times as far out as"
                ends = "where the density cannot follow"
            # Do not name the smallest or largest value: with Flower the server receives this text,
            # and values are private.
            raise InputError(
                f"client {int(data.id)}: {100 * outside:.0f} % of its inputs' values lie {where} "
                f"[low, high] = [{low:g}, {high:g}], {ends}; give low "
                "and high that span the inputs of all clients"
            )

    def _check_shape(self, first: Params, data: ClientData) -> None:
        """Raise InputError if the density does not take the client's inputs."""
        if not data.x.numel():
            return
        try:
            dry_pass(self.network(), first, {}, data.x[:2])
        except InputError as e:
            raise InputError(
                f"client {int(data.id)}: FedDisk's density is built for inputs of another shape: "
                f"give Setting(..., shape={tuple(data.x.shape[1:])}), that of one input ({e})"
            ) from e

    def _first(self, like: Params) -> Params:
        """The density's first weights, in the dtype of the model's; the same for all clients."""
        # Inputs have the model's type, and a network's weights must have the type of its inputs.
        kind = next(iter(like.values())).dtype
        return {k: v.to(kind) for k, v in self.network().init()[0].items()}


@dataclass(frozen=True)
class Early(Wrapper):
    """A round before the inner method's first: the model does not change, the density is sent."""

    inner: FedDisk

    def weigh(self, server: Parts, ids: Tensor) -> Tensor:
        return BySize()({"n": server["importance"]["n"][ids]})

    def trains(self, weights: Tensor) -> Tensor:
        return weights > 0

    def broadcast(self, server: Parts, client: int) -> Parts:
        return {"params": server["density"]}

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """None: every client's reply is needed."""
        return {}

    def moves_server(self) -> bool:
        """False: only the density is sent."""
        return False

    def at(self, t: int) -> Method:
        return self.inner.at(t)


@dataclass(frozen=True)
class FitDensities(Early):
    """p <- p + sum_i a_i (p_i - p) and q_i <- local training from q_i, on the same batches.

    q_i, too, is updated by adding a rounded difference, so that in a federation of equal clients,
    or of one, p = q_i to the last bit.
    """

    def trained_model(self) -> Model:
        """The density."""
        return self.inner.network()

    def phases(self) -> Mapping[str, Local]:
        return numbered(self.inner.local, "density")

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        density = self.inner.network()

        def trained(start: Params) -> tuple[Params, Tensor]:
            """The change of a density by training from `start`, and its mean loss."""
            phases, term = self.phases(), NegativeLogDensity()
            end = train_locally(density, term, phases, start, {}, {}, data, plans)
            return sub(density.trainable(end.params), density.trainable(start)), end.loss

        old = state["density"]
        delta, loss = trained(message["params"])
        density_change, _ = trained(old)
        # Only p's change is sent; q_i stays on the client.
        update = {"delta": delta, "report": {"id": data.id, "loss": loss}}
        return update, {"density": old | add({k: old[k] for k in density_change}, density_change)}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        delta = weighted_sum(updates["cohort"]["weight"], updates["delta"])
        old = server["density"]
        return {"density": old | add({k: old[k] for k in delta}, delta)}


@dataclass(frozen=True)
class WeighExamples(Early):
    """a_i(x_j) from the two densities, computed once; their effective size is reported.

    last  whether this is the last of the weighing rounds
    """

    last: bool = False

    def trained_model(self) -> None:
        """None: the density is as it is."""

    def phases(self) -> Mapping[str, Local]:
        return self.inner.ratio.phases()

    def broadcast(self, server: Parts, client: int) -> Parts:
        n = server["importance"]["n"]
        return super().broadcast(server, client) | {"share": {"least": n[client] / n.sum()}}

    def client_update(
        self, message: Parts, state: Parts, data: ClientData, plans: Mapping[str, Plan]
    ) -> tuple[Parts, Parts]:
        disk, pair = self.inner, (message["params"], state["density"])
        # Pad to whole blocks: a row's weight must not depend on how many rows follow it.
        whole = filled(data)
        log_ratio, loss = disk.ratio(disk.network(), pair, whole, plans)
        # `least` is n_i / N. The mixture p contains q_i with this share, so p / q_i is at least it.
        a = bounded(log_ratio, live(whole), message["share"]["least"], disk.most)
        estimated = effective_size(a)
        a = torch.where(estimated < disk.useful * live(whole).sum(), live(whole).to(a), a)
        report = {"id": data.id, "loss": loss, "ess": effective_size(a), "estimated": estimated}
        return {"report": report}, {"importance": {"a": a[: len(data.x)]}}

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        importance, ids = server["importance"], updates["cohort"]["id"]
        sizes = {
            name: importance[name].index_copy(0, ids, updates["report"][name].to(importance[name]))
            for name in ("ess", "estimated")
        }
        n = importance["n"]
        # Check on the server, because only it knows all sizes.
        for i in ids.tolist():
            self._check(i, float(sizes["ess"][i]), float(n[i]), float(n.sum()))
        weighed = importance | sizes
        control = isinstance(self.inner.ratio, Equal)
        for text in () if control else self._warnings(weighed, ids):
            warnings.warn(text, NeedlessWarning, stacklevel=2)
        return {"importance": weighed}

    def _warnings(self, weighed: Params, ids: Tensor) -> list[str]:
        texts, left = notes(weighed, ids.tolist()), len(unweighed(weighed))
        if not (self.last and left):
            return texts
        able = int((weighed["n"] > 0).sum())
        # Take the number of clients that replied for the number that a round draws.
        cure = cure_for_unweighed(self.inner.weighing, left, len(ids) / able)
        return [
            *texts,
            f"{left} of {able} clients were in no weighing round, and all their examples count "
            f"alike; {cure}",
        ]

    def _check(self, client: int, ess: float, n: float, total: float) -> None:
        if ess < self.inner.least_ess * n:
            raise TrainingError(
                f"client {client}: the importance weights of its {n:.0f} examples, each from "
                f"{n / total:.3g} to {self.inner.most:g}, are worth {ess:.1f} "
                f"({100 * ess / n:.0f} %), less than least_ess = {self.inner.least_ess:g} allows. "
                "Fit its density for more rounds (density_rounds), lower least_ess if such weights "
                "are wanted, or in feddisk lower temper or most for weights that differ less"
            )
