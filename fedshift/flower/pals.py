"""FedPALS as a strategy for Flower apps that use nothing else of this library."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Strategy,
)

from fedshift.errors import InputError
from fedshift.flower.foreign_replies import (
    COUNTS,
    PARTITION,
    Arrays,
    LabelTable,
    arrays_of,
    mean_arrays,
    mean_metrics,
    to_arrays,
)
from fedshift.flower.nodes import named, names_of
from fedshift.flower.records import failure_of
from fedshift.real import described, disordered, numbers
from fedshift.server.pals import effective_sample_size
from fedshift.server.pals_input import Fidelity
from fedshift.server.prior import Correction, prior_shift
from fedshift.server.weights import Pals

LOG = logging.getLogger("fedshift.flower")
# Strategies whose step depends only on the clients' weighted mean.
SOUND = (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedProx)


class FedPALS(Strategy):
    """FedPALS' weights in a Flower ServerApp: theta <- sum_i a_i theta_i, then `inner`'s step.

        a = argmin over the simplex of ||T - S^T a||^2 + lam sum_i a_i^2 / n_i

    solved anew in each round, over the clients whose replies are usable. Arrays may come from any
    framework; they are averaged in float64, and integer arrays (counters) take the largest value.

    target        T [K], the share of each label where the model will be used
    lam, ess, cap, fidelity   as in `fedshift.pals_weights`; give exactly one of lam and ess
    label_counts  the clients' label counts, if the server knows them: rows [M, K] or
                  {partition id: counts}, and clients put "partition-id" into the metrics of their
                  train replies; or {node name: counts}, for nodes that were registered by name.
                  If left out, clients put "label-counts", K numbers, into those metrics
    inner         a Flower strategy that samples, evaluates, and steps: FedAvg (default), FedAvgM,
                  FedAdagrad, FedAdam, FedYogi or FedProx. It receives the weighted mean as the
                  only reply, so that its step is the one it would take with these weights

    A client's first report is its row of the table for the whole run; a later one that differs is
    ignored, and so is "num-examples": a reply cannot change its own weight. A reply is left out,
    with the reason in the log, if it is an error, lacks a row, differs in names, shapes or types
    from the model that was sent, or has numbers that are not finite. So are nodes that report the
    same partition, and clients without examples. If no weights exist for the rest (because of a
    cap, and too few clients), the model does not change. `weights`, `gap` (the norm of T - S^T a)
    and `correction` (log T - log S^T a) are those of the last round; the gap is also in its
    metrics, as "pals-gap", beside "pals-ess". `corrected` adds the correction to a model.

    FedPALS, eq. 8 and 9. Raises InputError for settings out of range, for an inner strategy whose
    step is no function of the mean (medians, Krum, q-FedAvg, trees, differential privacy), and in
    round 1 if no client reports its labels.
    """

    def __init__(
        self,
        target: Sequence[float],
        *,
        lam: float | None = None,
        ess: float | None = None,
        cap: float | None = None,
        fidelity: Fidelity = "squared",
        label_counts: Mapping[int | str, Sequence[float]] | Sequence[Sequence[float]] | None = None,
        inner: Strategy | None = None,
    ) -> None:
        self.rule = Pals(_shares(target), lam, ess, cap, fidelity)
        self.table = LabelTable(len(self.rule.target), label_counts)
        self.inner = FedAvg() if inner is None else _check_sound(inner)
        self.sent: Arrays = {}
        self.names: dict[int, str] = {}
        self.asked = 0
        self.weights: dict[int, float] = {}
        self.gap = float("nan")
        self.correction: Correction | None = None
        self.corrections: list[np.ndarray] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the inner strategy; also remembers the model, to compare replies with it."""
        self.sent = arrays_of(arrays)
        self.names = names_of(grid)
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self.asked = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's step with the weighted mean of the usable replies."""
        # Sort by node, so that logs do not depend on which reply came first.
        used, refused = self._usable(sorted(replies, key=_node))
        for node, why in refused.items():
            LOG.warning("round %d: left out %s: %s", server_round, named(node, self.names), why)
        if not used:
            return self._no_reply(server_round, refused)
        counts = np.stack([self.table.rows[_node(message)] for message, _ in used])
        try:
            a = self._weigh(counts, [_node(message) for message, _ in used])
        except InputError as e:
            if len(used) >= self.asked:  # no reply is missing, so the settings are at fault
                raise
            LOG.error("round %d: no weights; the model stays: %s", server_round, e)
            return None, None
        mean = mean_arrays([arrays for _, arrays in used], a)
        # Keep label counts out of the results, because they are private.
        excluded = (COUNTS, PARTITION, self.inner.weighted_by_key)
        metrics = mean_metrics([message.content for message, _ in used], a, excluded)
        figures = {"pals-gap": self.gap, "pals-ess": effective_sample_size(a, counts.sum(1))}
        LOG.info(
            "round %d: %d replies used, gap to the target %.3f", server_round, len(a), self.gap
        )
        return self._step(server_round, used[0][0], mean, metrics, figures)

    def corrected(self, arrays: ArrayRecord, bias: str) -> ArrayRecord:
        """The model, with the last round's correction added to the last layer's bias [K].

        bias: the name of that array. Use the result for serving only: training must go on from the
        uncorrected model. Raises InputError before the first round, for an array that is no bias of
        K labels, and for a model that was corrected here before.
        """
        if self.correction is None:
            raise InputError("no round was played: its weights say what a model was trained on")
        given, shape = arrays_of(arrays), (len(self.rule.target),)
        if bias not in given or given[bias].shape != shape:
            fits = [name for name, v in given.items() if v.shape == shape]
            raise InputError(
                f'"{bias}" is no array of {shape[0]} labels; there is {", ".join(fits) or "none"}'
            )
        if any(np.array_equal(given[bias], done) for done in self.corrections):
            raise InputError("this model is corrected already: the target would count twice")
        before = given[bias]
        moved = (before.astype(np.float64) + self.correction.bias).astype(before.dtype)
        self.corrections.append(moved)
        return to_arrays({**given, bias: moved})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the inner strategy."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the inner strategy: by the clients' numbers of examples."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the target, then the inner strategy's settings."""
        LOG.info("FedPALS over %s, target %s", type(self.inner).__name__, list(self.rule.target))
        self.inner.summary()

    def _usable(
        self, replies: Sequence[Message]
    ) -> tuple[list[tuple[Message, Arrays]], dict[int, str]]:
        """(usable replies with their arrays, in the order of clients; why others are left out)."""
        used, refused = [], {}
        for message in replies:
            try:
                used.append((message, self._arrays(message)))
            except InputError as e:
                refused[_node(message)] = str(e)
        refused |= self.table.sharing_partitions(_node(message) for message, _ in used)
        used = [pair for pair in used if _node(pair[0]) not in refused]
        # Sort by client, because sums in floating point depend on the order.
        used.sort(key=lambda pair: self.table.order(_node(pair[0])))
        return used, refused

    def _arrays(self, message: Message) -> Arrays:
        """The arrays of a reply. Raises InputError if it or its sender's row is unusable."""
        if (why := failure_of(message)) is not None:
            raise InputError(why)
        self.table.learn(_node(message), self.names.get(_node(message)), message.content)
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise InputError(f"it holds {len(records)} ArrayRecords; there must be one, the model")
        return arrays_of(records[0], like=self.sent)

    def _weigh(self, counts: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
        """Solve for the weights of these nodes; stores them with the gap and the correction."""
        table = {"labels": torch.from_numpy(counts), "n": torch.from_numpy(counts.sum(1))}
        a: np.ndarray = self.rule(table).numpy()
        rows = counts / np.maximum(counts.sum(1, keepdims=True), 1.0)
        mixture = a @ rows
        self.gap = float(np.linalg.norm(np.asarray(self.rule.target) - mixture))
        self.correction = prior_shift(self.rule.target, mixture / mixture.sum())
        self.weights = dict(zip(nodes, a.tolist(), strict=True))
        return a

    def _step(
        self,
        server_round: int,
        reply: Message,
        mean: Arrays,
        metrics: dict[str, float | list[float]],
        figures: dict[str, float],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The inner strategy's step, with the mean as the only reply, of weight 1."""
        # FedAvg's step is the mean itself; subclasses may do more.
        if type(self.inner) is FedAvg:
            return to_arrays(mean), MetricRecord({**metrics, **figures})
        # Copy a reply: only Flower can make a message with the metadata that the step reads.
        mean_reply = copy.copy(reply)
        record = MetricRecord({**metrics, self.inner.weighted_by_key: 1.0})
        mean_reply.content = RecordDict({"arrays": to_arrays(mean), "metrics": record})
        stepped, inner_metrics = self.inner.aggregate_train(server_round, [mean_reply])
        if stepped is None:
            return None, inner_metrics
        # Flower's optimisers change counters and dtypes: restore both.
        kept_types = {
            k: (v if np.issubdtype(mean[k].dtype, np.inexact) else mean[k]).astype(mean[k].dtype)
            for k, v in arrays_of(stepped).items()
        }
        return to_arrays(kept_types), MetricRecord({**dict(inner_metrics or {}), **figures})

    def _no_reply(
        self, server_round: int, refused: Mapping[int, str]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        # In round 1 the setup is probably wrong: raise. Later the next round may succeed: go on.
        if refused and (server_round == 1 or not self.table.rows):
            node, why = next(iter(refused.items()))
            raise InputError(f"no reply can be used; {named(node, self.names)}: {why}")
        LOG.error("round %d: no reply that can be used; the model stays", server_round)
        return None, None


def _shares(target: Sequence[float]) -> tuple[float, ...]:
    wrong = disordered(target) or "must be a list of shares, one for each label, as [0.5, 0.3, 0.2]"
    # `list` would turn a mapping into its keys, and text into letters.
    with contextlib.suppress(TypeError, ValueError):
        if not disordered(target) and not isinstance(target, Mapping | str):
            shares = numbers(list(target))
            if shares.ndim == 1:
                return tuple(shares.tolist())
    raise InputError(f"target={described(target)}: {wrong}")


def _node(message: Message) -> int:
    return int(message.metadata.src_node_id)


def _check_sound(inner: Strategy) -> FedAvg:
    """The strategy, if its step is one of `SOUND`'s. Raises InputError otherwise."""
    # Compare the method, not the class: a subclass may sample differently, but not step.
    steps = {one.aggregate_train for one in SOUND}
    if not isinstance(inner, FedAvg) or type(inner).aggregate_train not in steps:
        raise InputError(
            f"FedPALS(inner={type(inner).__name__}(...)): its step is no function of the weighted "
            f"mean; allowed: instances of {', '.join(one.__name__ for one in SOUND)}"
        )
    if not inner.train_metrics_aggr_fn.__module__.startswith("flwr."):
        raise InputError(
            "FedPALS hands the inner strategy one reply, the mean; leave out "
            "train_metrics_aggr_fn, which would see no other"
        )
    return inner
