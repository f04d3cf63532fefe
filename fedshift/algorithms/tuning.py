"""Central tuning: after aggregation the server brings its model closer to the clients' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedshift.algorithms.method import LabelRules, Method, Wrapper
from fedshift.algorithms.opinions import Opinions, answers, cast, logits_of
from fedshift.arguments import check_choices, check_fields, check_positive, check_whole
from fedshift.client.descent import Adam, Descent, HeavyBall
from fedshift.client.oracles import slope
from fedshift.data import Examples, first_not_finite, plan_phase
from fedshift.errors import DivergedError, InputError
from fedshift.model import Model
from fedshift.outputs import check_columns, dry_logits
from fedshift.seeds import generator
from fedshift.server.agreement import Disagreement, disagreement, farthest, restricted, seen_by
from fedshift.server.optima import MEASURED, accuracies
from fedshift.server.rows import head_rows, keep_rows, wire_labels
from fedshift.server.trust import by_confidence, fitted_temperature
from fedshift.tree import Params, Parts, split

# Probabilities that differ by at most so many roundings of a logit count as equal.
ROUNDINGS = 16
Part = Literal["head", "all"]
Over = Literal["all", "union"]
Moments = Literal["new", "kept"]
Weights = Literal["round", "confidence"]
Temperature = Literal["none", "fitted"]
Stop = Literal["steps", "held-out"]
# The loss on held-out inputs is computed every LOOK steps; one input in HELD_OUT is held out.
LOOK, HELD_OUT = 10, 5


def _check_labelled(labelled: Examples, classes: int) -> None:
    """Raise InputError unless there is an example, and none has a label beyond the classes."""
    if not len(labelled):
        raise InputError("central tuning: labelled has no example; give one at least, or none")
    if int(labelled.y.max()) >= classes:
        raise InputError(
            f"central tuning: labelled has label {int(labelled.y.max())}, and the model has "
            f"{classes} classes; labels are 0 to {classes - 1}"
        )


def _check_inputs(inputs: Tensor) -> None:
    """Raise InputError unless inputs [n, ...] are finite and at least one."""
    if not isinstance(inputs, Tensor):
        raise InputError(
            f"central tuning: inputs is a {type(inputs).__name__}; give torch.as_tensor(inputs)"
        )
    if not inputs.ndim or not len(inputs):
        raise InputError("central tuning has no inputs; give the server at least one")
    if (row := first_not_finite(inputs)) is not None:
        raise InputError(
            f"central tuning: input {row} holds NaN or infinity; leave such inputs out, or fill "
            "what is missing"
        )


def _check_fit(
    model: Model, params: Params, buffers: Params, x: Tensor, what: str, classes: int
) -> None:
    """Raise InputError unless the model takes the server's x [n, ...] in its parameters' type."""
    inputs = cast(x, params)
    # Infinite after the cast alone: the clients' models would be blamed for what they answer.
    if (row := first_not_finite(inputs)) is not None:
        raise InputError(
            f"central tuning: {what[:-1]} {row} of the server is too large for {inputs.dtype}, "
            "the type of the parameters; scale it as the clients' inputs are scaled"
        )
    try:
        logits = dry_logits(model, params, buffers, inputs[:2])
    except InputError as e:
        raise InputError(
            f"central tuning: the server's {what} {list(x.shape)} do not fit; give [n, ...] of "
            f"the shape and the type of the clients' inputs: {e}"
        ) from e
    check_columns(logits, classes)
    try:
        dry_logits(model, params, buffers, inputs[:1])
    except InputError as e:
        raise InputError(
            "central tuning asks models input by input, and this one cannot answer for one alone, "
            "as BatchNorm with track_running_stats=False cannot: give it running statistics, or "
            f"another normalisation ({e})"
        ) from e


@dataclass(frozen=True)
class CentralTuning(Wrapper):
    """`inner`, then in each round steps of theta down sum_k a_k E_x D(h_k(.|x), h_theta(.|x)).

        mse       D = sum_{y in Y_k} (h_k(y) - h(y))^2
        pairwise  D = sum_{y,y' in Y_k} (h_k(y) h(y') - h_k(y') h(y))^2
        kl        D = sum_{y in Y_k} h_k(y) log(h_k(y) / h|k (y)),  h|k (y) = h(y) / h(Y_k)   (ours)

    Breitholtz, Listo Zec and Johansson 2025, arXiv 2508.18774. h_k is client k's model as received
    in this round, a_k its weight, h the softmax over all labels. Y_k are the labels of h_k: the
    client's own in private mode, otherwise all. The steps start at the aggregate and use batches of
    `inputs` [n, ...], drawn anew in each round. Inputs are cast to the parameters' type.

    over       "union": h is the softmax over labels that the cohort has, so that other labels get
               no mass, and their rows keep their bits (ours). "kl" is for "all" only: it compares h
               on Y_k alone, with gradient exactly 0 for labels that no client has
    part       "head" tunes parameters that start with `head`; "all" the whole model
    steps      0 leaves `inner` unchanged, bit for bit
    rounds     tune only in so many first rounds; 0 for all
    optimizer  "adam" or "sgd", with rate lr
    moments    Adam's: "new" in each round, or "kept" on the server from round to round (ours)

    weights    "round": the round's a_k; "confidence": by `by_confidence` on each input (ours)
    temperature  "fitted": divide the logits of all clients by one number, fitted in each round on
               `labelled` by `fitted_temperature` (ours)
    stop       "held-out": hold out every fifth input, compute the loss there every ten steps, stop
               when it no longer falls, and take the parameters with the smallest (ours)
    labelled   examples that the server has, to measure where each loss would lead

    A batch on which the loss is 0 but for rounding takes no step: Adam would turn its gradient,
    which is rounding, into a full step.

    All models run in evaluation mode, so running statistics do not change. `server["tuning"]` has
    values before and after, on the inputs drawn: "loss" [2], and "outside" [2], the mean mass that
    h gives to labels that no client of the cohort has. With `labelled` it also has, even without
    steps, "accuracy" [4], of the aggregate and of every loss's pointwise optimum over the labels of
    `over`, and "gain_se" [3], standard errors of optimum minus aggregate
    (`fedshift.server.optima.accuracies`). KL's predicts whether tuning will help; in private mode
    the others' did not. docs/methods/central_tuning.md says why they matter. Our own choices:
    `part`, evaluation mode, Adam at 1e-3, 50 steps of 128 inputs; the paper does not give its own.

    Raises InputError for values out of range, for inputs that are not finite or that the model does
    not accept, for labels beyond the model's classes, and for an `inner` without label sets or
    whose clients do not send a whole model; TrainingError if a client's model has outputs that are
    not finite, or the steps diverge.
    """

    inner: Method
    inputs: Tensor = field(repr=False, compare=False)
    loss: Disagreement = "mse"
    steps: int = 50
    batch: int = 128
    lr: float = 1e-3
    optimizer: Literal["adam", "sgd"] = "adam"
    part: Part = "head"
    over: Over = "all"
    head: tuple[str, ...] = ("head.",)
    rounds: int = 0
    moments: Moments = "new"
    weights: Weights = "round"
    temperature: Temperature = "none"
    stop: Stop = "steps"
    labelled: Examples | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_inputs(self.inputs)
        check_fields(self)
        # By the recipes' names, which are what most people give.
        check_choices(self, "tune_{}")
        check_whole("tune_steps", self.steps, 0)
        check_whole("tune_rounds", self.rounds, 0)
        check_whole("batch", self.batch, 1)
        check_positive("tune_lr", self.lr)
        if self.loss == "kl" and self.over == "union":
            raise InputError(
                'tune = "kl" compares models on each client\'s labels alone, and tune_over = '
                '"union" has no place in it; leave tune_over out, or set tune = "mse" or "pairwise"'
            )
        if self.temperature == "fitted" and self.labelled is None:
            raise InputError('temperature="fitted" needs labelled=Examples(x, y) on the server')
        if self.stop == "held-out" and len(self.inputs) < HELD_OUT:
            raise InputError(
                f'tune_stop="held-out" holds out every fifth input of the server, which has '
                f"{len(self.inputs)}; give it {HELD_OUT} or more, or leave tune_stop out"
            )
        if self.moments == "kept" and self.optimizer == "sgd":
            raise InputError('moments="kept" is Adam\'s, and "sgd" has none; leave it out')

    def init(self, params: Params, buffers: Params, table: Params) -> Parts:
        server = self.inner.init(params, buffers, table)
        if "sets" not in server or server["params"].keys() != params.keys():
            raise InputError(
                "central tuning compares the server's model with whole models of clients whose "
                f"labels are known; give a LabelSets, not {type(self.inner).__name__}"
            )
        if "tuning" in server:
            raise InputError(
                f"central tuning around a {type(self.inner).__name__} that is centrally tuned: one "
                'would hide what the other measures, as both have server["tuning"]; give one'
            )
        classes = server["sets"]["held"].shape[1]
        head_rows(params, self.head, classes)
        if not self._trained_part(params):
            raise InputError(
                f"central tuning has nothing to move: all of {list(self.head)} has "
                'requires_grad=False; give part="all", or steps=0'
            )
        rows = {"inputs": self.inputs}
        if self.labelled is not None:
            _check_labelled(self.labelled, classes)
            rows["labelled examples"] = self.labelled.x
        for what, x in rows.items():
            _check_fit(self.model, params, buffers, x, what, classes)
        sizes = {"loss": 2, "outside": 2}
        if self.labelled is not None:
            sizes |= {"accuracy": len(MEASURED), "gain_se": len(MEASURED) - 1}
        tuning = {k: torch.zeros(n, dtype=torch.float64) for k, n in sizes.items()}
        return (
            server
            | {"tuning": tuning}
            | self._stored(self._descent().start(self._trained_part(params)))
        )

    def at(self, t: int) -> Method:
        """The method of round t: without steps after the last round of tuning."""
        over = 0 < self.rounds < t
        # rounds=0, so that the copy does not come back here for ever.
        return replace(self, steps=0, rounds=0).at(t) if over else super().at(t)

    def server_update(self, server: Parts, updates: Parts, seed: int) -> Parts:
        changed = self.inner.server_update(server, updates, seed)
        if not self.steps and self.labelled is None:
            return changed
        after, record, divisor = server | changed, dict(server["tuning"]), 1.0
        # What each loss could reach at best, measured even without steps.
        if self.labelled is not None:
            x, y = cast(self.labelled.x, server["params"]), self.labelled.y
            outputs, cohort = self._outputs(server, updates, x), updates["cohort"]
            if self.temperature == "fitted":
                labels = wire_labels(server, cohort["id"])
                divisor = fitted_temperature(outputs, labels, y, cohort["weight"])
            opinions = self._opinions(after, server, updates, x, outputs, divisor)
            z = self._logits(after["params"], after["buffers"], x)
            among = ~opinions.absent if self.over == "union" else None
            record["accuracy"], record["gain_se"] = accuracies(
                opinions.p, opinions.labels, opinions.w, z, y, among
            )
        if not self.steps:
            return changed | {"tuning": record}
        batches, inputs = self._batches(seed), cast(self.inputs, server["params"])
        rows = [*batches, self._held_out()] if self.stop == "held-out" else batches
        # Run clients' models once on each input drawn, however often batches repeat it.
        drawn = torch.bincount(torch.cat(rows)).nonzero().flatten()
        outputs = self._outputs(server, updates, inputs[drawn])
        opinions = self._opinions(after, server, updates, inputs[drawn], outputs, divisor)
        # Positions of the inputs in `drawn`, which is sorted.
        places = [torch.searchsorted(drawn, r) for r in rows]
        tuned, moments = self._tune(after, opinions, places)
        measured = [self._evaluate(p, after["buffers"], opinions) for p in (after["params"], tuned)]
        loss, outside = (torch.tensor(v, dtype=torch.float64) for v in zip(*measured, strict=True))
        record |= {"loss": loss, "outside": outside}
        return changed | {"params": tuned, "tuning": record} | self._stored(moments)

    def sums(self, server: Parts, cohort: Params) -> Mapping[str, Tensor]:
        """None, because every client's model is needed; those of `inner` if there is no tuning."""
        idle = not self.steps and self.labelled is None
        return self.inner.sums(server, cohort) if idle else {}

    def label_rules(self) -> LabelRules | None:
        """Those of `inner`, plus the loss and the labels of tuning."""
        rules = self.inner.label_rules()
        if rules is None or not self.steps:
            return rules
        # In private mode clients know only their own labels, and "kl" does not change other rows.
        over = None if (self.loss, rules["mode"]) == ("kl", "private") else self.over
        return {"mode": rules["mode"], "tune": self.loss, "tune_over": over}

    def _trained_part(self, params: Params) -> Params:
        part = split(params, self.head)[0] if self.part == "head" else params
        return self.model.trainable(part)

    def _batches(self, seed: int) -> list[Tensor]:
        """Rows of `inputs` for each step."""
        every = torch.arange(len(self.inputs))
        held_out = self.stop == "held-out"
        free = every[every % HELD_OUT != HELD_OUT - 1] if held_out else every
        # Of the plan only the rows are used; the rate is applied in `_tune`.
        plan = plan_phase(
            len(free),
            batch=self.batch,
            lr=self.lr,
            generator=generator(seed, "tuning"),
            steps=self.steps,
        )
        return [free[rows[w > 0]] for rows, w in zip(plan.rows, plan.weight, strict=True)]

    def _held_out(self) -> Tensor:
        """Rows of `inputs` that are never used for a step."""
        return torch.arange(HELD_OUT - 1, len(self.inputs), HELD_OUT)

    def _outputs(self, server: Parts, updates: Parts, x: Tensor) -> Tensor:
        return answers(self.inner, server, updates, x, self.batch)

    def _opinions(
        self, after: Parts, server: Parts, updates: Parts, x: Tensor, z: Tensor, divisor: float
    ) -> Opinions:
        """The clients' predictions on x, from their logits z [C, n, L] divided by `divisor`."""
        cohort = updates["cohort"]
        p, w = (z if divisor == 1.0 else z / divisor).softmax(2), cohort["weight"]
        w = by_confidence(p, w) if self.weights == "confidence" else w
        return Opinions(x, p, wire_labels(server, cohort["id"]), w, after["absent"]["now"])

    def _logits(self, params: Params, buffers: Params, x: Tensor) -> Tensor:
        return logits_of(self.model, params, buffers, x, self.batch)

    def _descent(self) -> Descent:
        return Adam() if self.optimizer == "adam" else HeavyBall()

    def _stored(self, moments: Parts) -> Parts:
        """The moments as parts of the server's state; {} unless they are kept between rounds."""
        return {f"tuning_{k}": v for k, v in moments.items()} if self.moments == "kept" else {}

    def _predict(self, z: Tensor, opinions: Opinions) -> Tensor:
        """The server's predictions for each client's labels [C, B, L], from its logits [B, K].

        In the form that `disagreement` takes: probabilities, or logarithms for "kl".
        """
        if self.loss == "kl":
            return restricted(z, opinions.labels)
        z = z.masked_fill(opinions.absent, -torch.inf) if self.over == "union" else z
        return seen_by(z.softmax(1), opinions.labels)

    def _loss(self, z: Tensor, opinions: Opinions, rows: Tensor) -> Tensor:
        """The loss on some rows of x, with logits z [B, K] of the server's model."""
        q, w = self._predict(z, opinions), opinions.w
        w = w if w.ndim == 1 else w[:, rows]
        return disagreement(self.loss, opinions.p[:, rows], q, w)

    def _agrees(self, z: Tensor, opinions: Opinions, rows: Tensor) -> Tensor:
        """Whether the loss on these rows is 0 but for rounding, [] bool."""
        w = opinions.w if opinions.w.ndim == 1 else opinions.w[:, rows]
        far = farthest(self.loss, opinions.p[:, rows], self._predict(z, opinions), w)
        return far <= ROUNDINGS * torch.finfo(z.dtype).eps * (1.0 + z.abs().max())

    def _tune(
        self, server: Parts, opinions: Opinions, batches: list[Tensor]
    ) -> tuple[Params, Parts]:
        """(parameters, moments) after all steps; `batches` ends with the held-out rows, if any."""
        params, buffers = server["params"], server["buffers"]
        moving, descent = self._trained_part(params), self._descent()
        # New moments by default: old ones belong to another point than the new aggregate.
        moments = descent.start(moving)
        if self.moments == "kept":
            moments = {k: server[f"tuning_{k}"] for k in moments}
        rate = torch.tensor(self.lr, dtype=torch.float64)

        def value(rows: Tensor, at: Params) -> tuple[Tensor, Params]:
            z = self.model(params | at, buffers, opinions.x[rows])["logits"]
            agrees = self._agrees(z.detach(), opinions, rows)
            return self._loss(z, opinions, rows), {"agrees": agrees}

        held_out = batches.pop() if self.stop == "held-out" else None
        best, least = (moving, moments), self._loss_at(server, {}, opinions, held_out)
        for step, rows in enumerate(batches, start=1):
            # Parameters on which the logits do not depend (a router's) get gradient 0.
            at = slope(partial(value, rows), moving, rows)
            if not bool(at.buffers["agrees"]):
                moving, moments = descent(moving, at.grad, moments, rate)
            if held_out is not None and (step % LOOK == 0 or step == len(batches)):
                loss = self._loss_at(server, moving, opinions, held_out)
                if not loss < least:
                    break
                best, least = (moving, moments), loss
        if held_out is not None:
            moving, moments = best
        # One check at the end is enough: NaN and infinity never become finite again.
        if not all(bool(torch.isfinite(v).all()) for v in moving.values()):
            raise DivergedError(f"central tuning diverged at lr = {self.lr}; lower it")
        tuned = {k: moving.get(k, v) for k, v in params.items()}
        return self._restore_rows(params, tuned, opinions), moments

    def _loss_at(
        self, server: Parts, moving: Params, opinions: Opinions, rows: Tensor | None
    ) -> float:
        """The loss on some rows of x, with `moving` instead of the server's; 0 for no rows."""
        if rows is None:
            return 0.0
        z = self._logits(server["params"] | moving, server["buffers"], opinions.x[rows])
        return float(self._loss(z, opinions, rows))

    def _restore_rows(self, before: Params, tuned: Params, opinions: Opinions) -> Params:
        """`tuned`, with the rows as they were on which the loss does not depend.

        Kept moments would move them, and so would rounding, of which Adam makes full steps: a
        network that ends in log_softmax gives them a gradient that is 0 but for rounding.
        """
        if self.loss != "kl" and self.over == "all":
            return tuned
        unclaimed = opinions.absent
        if self.loss == "kl":
            active = opinions.w.reshape(len(opinions.w), -1).amax(1) > 0
            present = opinions.labels[active].flatten()
            unclaimed = torch.ones_like(opinions.absent)
            unclaimed[present[present >= 0]] = False
        return keep_rows(before, tuned, unclaimed, head_rows(before, self.head, len(unclaimed)))

    def _evaluate(self, params: Params, buffers: Params, opinions: Opinions) -> tuple[float, float]:
        """(loss, mass that the model gives to absent labels) on all of x."""
        z = self._logits(params, buffers, opinions.x)
        loss = self._loss(z, opinions, torch.arange(len(z)))
        # The pairwise loss is never negative, but rounding can make it so near 0.
        return max(float(loss), 0.0), float(z.softmax(1)[:, opinions.absent].sum(1).mean())
