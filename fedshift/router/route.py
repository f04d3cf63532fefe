"""Send a query to the client whose data it resembles, or to several, or refuse it.

Shapes: B queries, N clients, K classes, e client features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import Algorithm, Capabilities, ask, check_method
from fedshift.arguments import check_kind
from fedshift.client.origin import client_logits
from fedshift.data import ClientData, check_clients
from fedshift.errors import InputError, unknown
from fedshift.model import Model
from fedshift.router.head import ClientHead
from fedshift.router.moments import Gaussians, moments, pooled
from fedshift.router.queries import BLOCK, check_queries, check_thresholds, finite_logits, outputs
from fedshift.router.refit import refit_locally
from fedshift.router.score import Numbers, Prior, log_tilt, posterior, scores
from fedshift.sketch import sketched
from fedshift.tree import Params, Parts

ABSTAIN = -1
Mode = Literal["hard", "mixture"] | int


@sketched
class Routed(NamedTuple):
    """clients [B, k], best first, and their posterior probabilities [B, k] among all clients.

    A refused query has ABSTAIN (-1) in all k places; its probabilities are those that it would
    have had.
    """

    clients: Tensor
    probabilities: Tensor


def best(score: Tensor, k: int) -> Tensor:
    """The k clients of the highest scores [B, N], best first, ties to the smaller id: [B, k]."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :k]


@sketched
@dataclass(frozen=True, eq=False)
class Router:
    """Client models, and the scores that say which of them should answer. Frozen; `of` builds it.

    model     the network; it returns "logits" and "client_logits" (and "client_features" for
              refits and novelty)
    shared    (parameters, buffers) with which client logits are computed
    served    client id -> (parameters, buffers) that this client would answer with
    sizes     n [N]; 0 for clients that cannot be routed to (N in formulas is then the others' sum)
    prior     the rule when a call names none, see `fedshift.router.score.scores`
    head      a refitted client head, used in place of the model's
    gaussians client features' moments, for novelty
    """

    model: Model
    shared: tuple[Params, Params] = field(repr=False)
    served: Mapping[int, tuple[Params, Params]] = field(repr=False)
    sizes: Tensor
    prior: Prior = "posterior"
    head: ClientHead | None = field(default=None, repr=False)
    gaussians: Gaussians | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        server: Parts,
        states: Mapping[int, Parts],
        prior: Prior = "posterior",
        *,
        untrained: bool = False,
    ) -> Router:
        """The router after a round: pass the round's `server` and `states`.

        A client that never took part has no model, and nothing is routed to it; the odds between
        the others do not change by that. Client logits are computed with the server's parameters,
        so everything they depend on must be shared. For a method with stages pass
        `algorithm.at(t)`.

        untrained: take the network of a method that trained no router as well, to refit it; until
        then its routes mean nothing.

        Raises InputError for a method that trains no router, when no client has a model, when
        "router." is not shared, and for a prior that is none.
        """
        check_method(algorithm)
        check_kind("server", server, dict, "give the round's, played.server")
        if not untrained and not ask(algorithm, Capabilities.trains_router):
            raise InputError(
                f"this {type(algorithm).__name__} has trained no router: nothing in its objective "
                "asks which client an example comes from. Train with recipes.feddrm (lam below 1) "
                'on a network that returns "client_logits", or pass untrained=True and refit'
            )
        if not states:
            raise InputError("no client has taken part yet: train for a round, then route")
        served = {i: algorithm.model_for(server, states[i]) for i in sorted(states)}
        params, buffers = served[min(served)]
        own = [k for k in params if k.startswith("router.") and k not in server["params"]]
        if own:
            raise InputError(
                f'"{own[0]}" stays on the clients, so each has a router of its own; share all of '
                '"router." and all that it reads (private parts are for the classifier)'
            )
        held = torch.zeros(len(server["table"]["n"]), dtype=torch.bool)
        held[list(served)] = True
        n = torch.where(held, server["table"]["n"].cpu().double(), 0.0)
        log_tilt(n, prior)
        shared = (params | server["params"], buffers | server["buffers"])
        return cls(algorithm.model, shared, served, n, prior)

    @property
    def clients(self) -> list[int]:
        """Ids that queries can be sent to."""
        return self.sizes.nonzero().flatten().tolist()

    def logits(self, x: Tensor) -> Tensor:
        """Client logits z [B, N], of the refitted head where there is one."""
        if self.head is not None:
            return finite_logits(self.head(self.features(x)))
        out = outputs(self.model, self.shared, x)
        return finite_logits(client_logits(out, len(self.sizes)))

    def features(self, x: Tensor) -> Tensor:
        """Client features h [B, e]; InputError for a model that does not return them."""
        return _client_features(outputs(self.model, self.shared, x))

    def scores(
        self, x: Tensor, prior: Prior | None = None, prices: Numbers | None = None
    ) -> Tensor:
        """z - log(n/N) + log q - mu [B, N] float64; minus infinity for who cannot be routed to."""
        return scores(self.logits(x), self.sizes, self._rule(prior), prices)

    def novelty(self, x: Tensor) -> Tensor:
        """Squared Mahalanobis distance [B] to the nearest client; needs `with_moments`."""
        if self.gaussians is None:
            raise InputError(
                "novelty needs the clients' moments: router.with_moments(clients) has them"
            )
        return self.gaussians.novelty(self.features(x))

    def route(
        self,
        x: Tensor,
        k: int = 1,
        *,
        prior: Prior | None = None,
        prices: Numbers | None = None,
        min_posterior: float | None = None,
        max_novelty: float | None = None,
    ) -> Routed:
        """The k best clients for each query x [B, ...] and their probabilities.

        min_posterior  refuse where the best client's probability is smaller: ambiguous queries
        max_novelty    refuse where no client's data is within this squared distance: new ones
        Raises InputError for a k that is not 1 to the number of clients, thresholds that are none,
        and queries that the network cannot read or that are not finite: it names the first.
        """
        self._check_width(k)
        check_thresholds(min_posterior, max_novelty)
        z, rule = self.logits(x), self._rule(prior)
        chosen = best(scores(z, self.sizes, rule, prices), k)
        # Prices move the choice, not what is believed.
        belief = posterior(z, self.sizes, rule)
        refused = torch.zeros(len(x), dtype=torch.bool, device=belief.device)
        if min_posterior is not None:
            refused |= belief.amax(1) < min_posterior
        if max_novelty is not None:
            refused |= self.novelty(x) > max_novelty
        told = chosen.masked_fill(refused[:, None], ABSTAIN)
        return Routed(told, belief.gather(1, chosen))

    def predict(
        self,
        x: Tensor,
        mode: Mode = "hard",
        *,
        prior: Prior | None = None,
        prices: Numbers | None = None,
    ) -> Tensor:
        """Class probabilities [B, K] float64: P(y | x) = sum_i r_i(x) P_i(y | x) / sum_i r_i(x).

        The sums run over the chosen clients: one for "hard", k for a number, all for "mixture",
        which is Bayes' rule for queries from the prior's mix. A client answers only what is sent to
        it, so "hard" costs one pass per query and "mixture" N. Raises InputError as `route`.
        """
        k, x = self._width(mode), check_queries(x)
        blocks = [self._answered(b, k, self._rule(prior), prices) for b in torch.split(x, BLOCK)]
        return torch.cat(blocks)

    def without(self, client: int) -> Router:
        """The router after a client has left; the odds between the others stay as they are."""
        if client not in self.clients:
            raise InputError(f"client {client} cannot be routed to; there are {self.clients}")
        if len(self.clients) == 1:
            raise InputError(f"client {client} is the last one; nothing would be left to route to")
        sizes = self.sizes.clone()
        sizes[client] = 0.0
        known = self.gaussians
        if known is not None:
            left = torch.where(sizes > 0, known.sizes, 0.0)
            known = replace(known, sizes=left)
        return replace(self, sizes=sizes, gaussians=known)

    @torch.inference_mode(False)
    def refitted(
        self,
        clients: Sequence[ClientData],
        *,
        penalty: float = 1e-4,
        tolerance: float = 1e-6,
        rounds: int = 2000,
    ) -> Router:
        """With the client head fitted again on frozen features, see `fedshift.router.refit`.

        clients: all, in the order of their ids, as in training. Raises InputError otherwise.
        """
        features = self._features_of(clients)
        found = refit_locally(features, penalty=penalty, tolerance=tolerance, rounds=rounds)
        return replace(self, head=found.head, sizes=self._counted(features))

    @torch.inference_mode(False)
    def with_moments(self, clients: Sequence[ClientData], *, loading: float = 0.01) -> Router:
        """With the clients' feature moments, for novelty; the client head stays."""
        sent = [moments(h) for h in self._features_of(clients)]
        return replace(self, gaussians=pooled(sent, loading))

    @torch.inference_mode(False)
    def from_moments(self, clients: Sequence[ClientData], *, loading: float = 0.01) -> Router:
        """With the moments and, from them, a client head in closed form: `Gaussians.head`."""
        features = self._features_of(clients)
        known = pooled([moments(h) for h in features], loading)
        sizes = self._counted(features)
        return replace(self, head=known.head(), gaussians=known, sizes=sizes)

    def _features_of(self, clients: Sequence[ClientData]) -> list[Tensor]:
        if len(clients) != len(self.sizes):
            raise InputError(
                f"{len(clients)} clients given, the router tells {len(self.sizes)} apart; give all"
            )
        check_clients(clients)
        pair, given = self.shared, [(i, c.x[c.w != 0]) for i, c in enumerate(clients)]
        held = {
            i: _client_features(outputs(self.model, pair, x, f"client {i}: example"))
            for i, x in given
            if len(x)
        }
        if not held:
            raise InputError("none of these clients has an example to refit with")
        nothing = next(iter(held.values()))[:0]
        return [held.get(i, nothing).cpu() for i in range(len(clients))]

    def _counted(self, features: Sequence[Tensor]) -> Tensor:
        """n of what a head was fitted to, which is in its intercepts; 0 stays for who is out."""
        n = torch.tensor([len(h) for h in features], dtype=torch.float64)
        return torch.where(self.sizes > 0, n, 0.0)

    def _answered(self, x: Tensor, k: int, rule: Prior, prices: Numbers | None) -> Tensor:
        z = self.logits(x)
        chosen = best(scores(z, self.sizes, rule, prices), k)
        # Softmax over the chosen alone: their posterior, renormalised without underflow.
        share = scores(z, self.sizes, rule).gather(1, chosen).softmax(1)
        used = sorted(set(chosen.flatten().tolist()))
        return torch.stack([self._of_client(i, x, chosen, share) for i in used]).sum(0)

    def _of_client(self, i: int, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        """r_i(x) P_i(y | x) for the queries sent to client i, 0 for the others; [B, K]."""
        row, place = (chosen == i).nonzero(as_tuple=True)
        with torch.no_grad():
            logits = self.model(*self.served[i], x[row])["logits"].double()
        answer = torch.zeros(len(x), logits.shape[1], dtype=logits.dtype, device=logits.device)
        return answer.index_add(0, row, logits.softmax(1) * share[row, place, None])

    def _rule(self, prior: Prior | None) -> Prior:
        return self.prior if prior is None else prior

    def _width(self, mode: Mode) -> int:
        if not isinstance(mode, str):
            self._check_width(mode)
            return mode
        widths = {"hard": 1, "mixture": len(self.clients)}
        if mode not in widths:
            raise unknown("mode (or a number of clients)", str(mode), widths)
        return widths[mode]

    def _check_width(self, k: int) -> None:
        whole = isinstance(k, int) and not isinstance(k, bool)
        if not whole or not 1 <= k <= len(self.clients):
            raise InputError(
                f"k = {k} clients of {len(self.clients)}; give 1 to all of them, a whole number"
            )


def _client_features(out: Params) -> Tensor:
    if "client_features" not in out:
        raise InputError(
            f'this needs "client_features", and the model returns {sorted(out)}; let its forward '
            'return {"client_features": h, "client_logits": ...}, h what the client head reads'
        )
    return out["client_features"].flatten(1)
