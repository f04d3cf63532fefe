"""Send each query to the client whose data it resembles, or to several, or refuse it.

Shapes: B queries, N clients, K classes, e client features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.method import Method, check_method
from fedshift.arguments import check_kind, check_whole
from fedshift.data import ClientData, check_clients
from fedshift.errors import InputError, check_name
from fedshift.model import Model
from fedshift.router.answers import Answers
from fedshift.router.calibration import Calibration
from fedshift.router.moments import Gaussians, moments, pooled
from fedshift.router.parts import Clients, Here, Part, folds_of
from fedshift.router.refit import LOADING, Way, discriminant, fit_again, penalised
from fedshift.router.score import ClientHead, Prior, log_tilt, scores
from fedshift.router.sight import BLOCK, ClientOutputs, Pair, Sight, check_queries
from fedshift.sketch import sketched
from fedshift.tree import Parts

ABSTAIN = -1
Mode = Literal["hard", "mixture"] | int


@sketched
class Routed(NamedTuple):
    """clients [B, k], best first, and their posterior probabilities [B, k] among all clients.

    A refused query has ABSTAIN (-1) in all k places, with the probabilities that it would have had.
    If fewer than k clients have a probability above 0, ABSTAIN fills the last places.
    """

    clients: Tensor
    probabilities: Tensor


def best(score: Tensor, k: int) -> Tensor:
    """The k clients with the highest scores [B, N], best first, ties to the smaller id: [B, k]."""
    if k == 1:  # argmax takes the first of ties, too, and is ten times as fast for 100 clients
        return score.argmax(1, keepdim=True)
    return score.sort(dim=1, descending=True, stable=True).indices[:, :k]


@sketched
@dataclass(frozen=True, eq=False)
class Router:
    """Client models, and scores that decide which of them answers. Frozen; `of` builds it.

    model        the network: "logits", "client_logits", and "client_features" for refits and
                 novelty
    shared       (parameters, buffers) with which client logits are computed
    served       client id -> (parameters, buffers) with which this client would answer
    sizes        n [N]; 0 for clients that cannot be routed to (in formulas, N is then the sum of
                 the others)
    prior        the prior for calls that give none, see `fedshift.router.score.scores`
    head         a refitted client head, used instead of the model's
    gaussians    moments of client features, for novelty
    calibration  held-out measures of a refit, and of the router before it

    docs/routing.md has an example.
    """

    model: Model
    shared: Pair = field(repr=False)
    served: Mapping[int, Pair] = field(repr=False)
    sizes: Tensor
    prior: Prior = "posterior"
    head: ClientHead | None = field(default=None, repr=False)
    gaussians: Gaussians | None = field(default=None, repr=False)
    calibration: Calibration | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        algorithm: Method,
        server: Parts,
        states: Mapping[int, Parts],
        prior: Prior = "posterior",
        *,
        untrained: bool = False,
    ) -> Router:
        """The router after a round: pass the round's `server` and `states`.

        A client that never took part has no model, so no query is sent to it; the odds between the
        others do not change. Client logits are computed with the server's parameters, so all
        parameters that they depend on must be shared. For a method with stages pass
        `algorithm.at(t)`.

        untrained: accept a method that trained no router, in order to refit it; before that its
        routes mean nothing.

        Raises InputError for a method that trains no router, if no client has a model, if "router."
        is not shared, and for a prior that is no distribution.
        """
        check_method(algorithm)
        cure = "give Router.of(method, played.server, played.states)"
        check_kind("server", server, dict, cure)
        if "params" not in server:
            raise InputError(f'server has no "params", as a round\'s has; {cure}')
        if not untrained and not algorithm.trains_router():
            raise InputError(
                f"this {type(algorithm).__name__} has trained no router: nothing in its objective "
                "asks which client an example comes from. Train with recipes.feddrm (lam below 1) "
                'on a network that returns "client_logits", or pass untrained=True and refit'
            )
        if not states:
            raise InputError("no client has taken part yet: train for a round, then route")
        served = {i: algorithm.model_for(server, states[i]) for i in sorted(states)}
        # Private tensors of any client will do: the router must not depend on them.
        return cls._make(algorithm.model, server, served[min(served)], served, served, prior)

    @classmethod
    def of_sites(
        cls,
        algorithm: Method,
        server: Parts,
        first: Pair,
        took_part: Iterable[int],
        prior: Prior = "posterior",
    ) -> Router:
        """The router if clients' models stay at their sites: `route` names the site to ask.

        first: the first model, for private parts, which the router does not depend on. Raises
        InputError as `of` does. `predict` of the result always raises InputError.
        """
        return cls._make(algorithm.model, server, first, sorted(took_part), {}, prior)

    @classmethod
    def _make(
        cls, model: Model, server: Parts, pair: Pair, ids: Iterable[int],
        served: Mapping[int, Pair], prior: Prior,
    ) -> Router:  # fmt: skip
        params, buffers = pair
        private = [k for k in params if k.startswith("router.") and k not in server["params"]]
        if private:
            raise InputError(
                f'"{private[0]}" stays on the clients, so each has a router of its own; share '
                'all of "router." and all that it reads (private parts are for the classifier)'
            )
        # A size of 0 keeps a client without a model out of all scores and sums.
        present = torch.zeros(len(server["table"]["n"]), dtype=torch.bool)
        present[list(ids)] = True
        n = torch.where(present, server["table"]["n"].cpu().double(), 0.0)
        log_tilt(n, prior)  # raises for an invalid prior now, not at the first query
        shared = (params | server["params"], buffers | server["buffers"])
        return cls(model, shared, served, n, prior)

    @property
    def clients(self) -> list[int]:
        """Ids of the clients that queries can be sent to."""
        return self.sizes.nonzero().flatten().tolist()

    def logits(self, x: Tensor) -> Tensor:
        """Client logits z [B, N], by the refitted head if there is one."""
        return self._sight.logits(x)

    def features(self, x: Tensor) -> Tensor:
        """Client features h [B, e]. Raises InputError for a model that does not return them."""
        return self._sight.features(x)

    def scores(self, x: Tensor, prior: Prior | None = None) -> Tensor:
        """z - log(n/N) + log q [B, N] float64; minus infinity for clients without queries."""
        return scores(self.logits(x), self.sizes, self._prior(prior))

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
        min_posterior: float | None = None,
        max_novelty: float | None = None,
    ) -> Routed:
        """The k best clients for each query x [B, ...] and their probabilities.

        min_posterior  refuse ambiguous queries, whose best client has a smaller probability
        max_novelty    refuse new queries, with no client's data within this squared distance
        Raises InputError for a k that is not from 1 to the number of clients, for invalid
        thresholds, and for queries that the network cannot read or that are not finite; it names
        the first.
        """
        k = self._check_width(k)
        _check_threshold("min_posterior", min_posterior, "a probability, 0 to 1", 1.0)
        _check_threshold("max_novelty", max_novelty, "a squared distance, 0 or more", math.inf)
        score = self.scores(x, prior)
        probabilities, chosen = score.softmax(1), best(score, k)
        refused = torch.zeros(len(x), dtype=torch.bool, device=probabilities.device)
        if min_posterior is not None:
            refused |= probabilities.amax(1) < min_posterior
        if max_novelty is not None:
            refused |= self.novelty(x) > max_novelty
        # Keep the probabilities of refused queries: they show why these were refused.
        shares = probabilities.gather(1, chosen)
        return Routed(chosen.masked_fill(refused[:, None] | (shares == 0.0), ABSTAIN), shares)

    def predict(
        self,
        x: Tensor,
        mode: Mode = "hard",
        *,
        prior: Prior | None = None,
    ) -> Tensor:
        """Class probabilities [B, K] float64: P(y | x) = sum_i r_i(x) P_i(y | x) / sum_i r_i(x).

        The sums run over the chosen clients: one for "hard", k for a number, all for "mixture",
        which is Bayes' rule for queries drawn from the prior. If clients differ only in their
        classifiers, any of these costs one pass plus the classifiers; otherwise each client takes a
        pass for its queries. Raises InputError as `route`.
        """
        if away := [i for i in self.clients if i not in self.served]:
            raise InputError(
                f"the models of clients {away} are at their sites: route(x) names the client whose "
                "site has the answer"
            )
        k, x = self._clients_asked(mode), check_queries(x)
        blocks = [self._predict(b, k, self._prior(prior)) for b in torch.split(x, BLOCK)]
        return torch.cat(blocks)

    def without(self, client: int) -> Router:
        """The router after a client has left: no query is sent to it any more.

        The odds between the others do not change, novelty is as if the client had never existed,
        and later fits leave it out. Raises InputError for a client that cannot be routed to, for
        the last one, and for one that has all of the prior.
        """
        is_number = isinstance(client, Integral) and not isinstance(client, bool)
        if not is_number or client not in self.clients:
            raise InputError(f"client {client} cannot be routed to; there are {self.clients}")
        if len(self.clients) == 1:
            raise InputError(f"client {client} is the last one; nothing would be left to route to")
        sizes = self.sizes.clone()
        sizes[int(client)] = 0.0
        log_tilt(sizes, self.prior)  # raises if the prior has no mass left
        gaussians = self.gaussians and self.gaussians.without(int(client))
        return replace(self, sizes=sizes, gaussians=gaussians, calibration=None)

    @torch.inference_mode(False)
    def refitted(
        self,
        clients: Sequence[ClientData],
        *,
        fresh: Sequence[Tensor] | None = None,
        penalty: float | None = None,
        tolerance: float = 1e-6,
        rounds: int = 2000,
        seed: int = 0,
        cap: float = 1.0,
    ) -> Router:
        """A router with the client head refitted on frozen features, see `fedshift.router.refit`.

        clients  all, in the order of their ids, as in training
        fresh    inputs [n, ...] of each client that the network was not trained on; without them
                 clients hold out folds of their examples in turn, drawn by `seed`
        penalty  if left out, that of `PENALTIES` with the least held-out loss, and a temperature
        cap      the largest share of all examples that one client may have in the fit

        `calibration` of the result has measures on held-out examples. Raises InputError for other
        clients and invalid numbers, TrainingError if `rounds` are not enough.
        """
        return self._fit_head(penalised(penalty, tolerance, rounds), clients, fresh, seed, cap=cap)

    @torch.inference_mode(False)
    def from_moments(
        self,
        clients: Sequence[ClientData],
        *,
        fresh: Sequence[Tensor] | None = None,
        loading: float | None = None,
        seed: int = 0,
        cap: float = 1.0,
    ) -> Router:
        """A router with moments, and a client head from them in closed form (`Gaussians.head`).

        fresh, seed and cap as in `refitted`; if `loading` is left out, it is chosen from
        `LOADINGS`, and novelty uses 0.01.
        """
        novelty = LOADING if loading is None else loading
        return self._fit_head(discriminant(loading), clients, fresh, seed, novelty, cap)

    @torch.inference_mode(False)
    def calibrated(
        self, clients: Sequence[ClientData], *, fresh: Sequence[Tensor] | None = None, seed: int = 0
    ) -> Router:
        """The refit with the least held-out loss, or this router if no refit is better.

        See `Calibration.better`; `calibration` has the measures. fresh and seed as in `refitted`.
        """
        refits = [f(clients, fresh=fresh, seed=seed) for f in (self.refitted, self.from_moments)]
        measured = [(r.calibration, r) for r in refits if r.calibration is not None]
        # In the order of held-out loss, take the first that is clearly better than this router.
        ranked = sorted(measured, key=lambda pair: pair[0].after.loss)
        unchanged = replace(self, calibration=ranked[0][0])
        return next((r for figures, r in ranked if figures.better), unchanged)

    @torch.inference_mode(False)
    def with_moments(self, clients: Sequence[ClientData], *, loading: float = LOADING) -> Router:
        """This router with moments of client features, for novelty; same client head."""
        sent = [moments(h) for h in self._outputs_of(clients).features]
        return replace(self, gaussians=pooled(sent, loading))

    def _fit_head(
        self, way: Way, clients: Sequence[ClientData], fresh: Sequence[Tensor] | None, seed: int,
        novelty: float | None = None, cap: float = 1.0,
    ) -> Router:  # fmt: skip
        """Refit the head on these clients' examples, with held-out folds or on `fresh` inputs."""
        fresh_ones = None
        if fresh is not None:
            fresh_ones = Here(*self._sight.of_clients(fresh, "a held-out example"))
        here = Here(*self._outputs_of(clients), seed, fresh_ones)
        return self.fitted(way, here, novelty, cap)

    def fitted(
        self, way: Way, clients: Clients, novelty: float | None = None, cap: float = 1.0
    ) -> Router:
        """This router with the head refitted from what clients send, wherever they are.

        novelty: set the moments as well, with this loading. cap and errors: as in `refitted`.
        """
        whole = Part(clients, cap)
        held_apart = isinstance(clients, Here) and clients.fresh is not None
        folds = [0] if held_apart else folds_of(whole.sizes)
        head, figures = fit_again(way, whole, folds)
        # The head's intercepts contain the sizes that it was fitted to, so store these. Clients
        # that were left out keep 0.
        sizes = torch.where(self.sizes > 0, whole.sizes, 0.0)
        gaussians = self.gaussians if novelty is None else pooled(whole.moments(), novelty)
        return replace(self, head=head, sizes=sizes, calibration=figures, gaussians=gaussians)

    def _outputs_of(self, clients: Sequence[ClientData]) -> ClientOutputs:
        check_clients(clients)
        return self._sight.of_clients([c.x[c.w != 0] for c in clients], "an example")

    @cached_property
    def _sight(self) -> Sight:
        return Sight(self.model, self.shared, self.head, self.sizes)

    @cached_property
    def _answers(self) -> Answers:
        return Answers(self.model, self.shared, self.served)

    def _predict(self, x: Tensor, k: int, rule: Prior) -> Tensor:
        """Class probabilities for one block of queries, by the k best clients for each."""
        seen = self._answers.see(x)
        score = scores(self._sight.logits_of(seen.out), self.sizes, rule)
        if k < len(self.clients):
            chosen = best(score, k)
            score = torch.full_like(score, -torch.inf).scatter(1, chosen, score.gather(1, chosen))
        # Softmax over the chosen clients is their posterior, renormalised without underflow.
        return self._answers.mixed(seen, score.softmax(1))

    def _prior(self, prior: Prior | None) -> Prior:
        return self.prior if prior is None else prior

    def _clients_asked(self, mode: Mode) -> int:
        """How many clients answer a query in this mode."""
        if not isinstance(mode, str):
            return self._check_width(mode)
        widths = {"hard": 1, "mixture": len(self.clients)}
        check_name("mode (or a number of clients)", mode, widths)
        return widths[mode]

    def _check_width(self, k: int) -> int:
        check_whole("k", k)
        if not 1 <= k <= len(self.clients):
            raise InputError(
                f"k = {k} clients of {len(self.clients)}; give 1 to all of them, a whole number"
            )
        return int(k)


def _check_threshold(name: str, value: float | None, allowed: str, largest: float) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and (not number or not 0.0 <= value <= largest):
        raise InputError(f"{name} must be {allowed}, or None to refuse nothing, got {value!r}")
