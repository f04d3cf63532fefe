"""From a configuration to the setting that recipes build on."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from fedshift.client.importance import two_values
from fedshift.client.local import Local
from fedshift.client.schedules import Cosine
from fedshift.data import Examples
from fedshift.engine.checks.gate import Gate
from fedshift.experiments.config.custom_network import Unpacking
from fedshift.experiments.config.prepared import Prepared
from fedshift.experiments.config.schema import Config, Training
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.optimizers import Sgd


def setting(
    config: Config,
    model: Model,
    target: tuple[float, ...],
    server_inputs: Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    server_examples: Examples | None = None,
) -> Setting:
    """The recipe's setting: network, target, local steps and server step as configured.

    server_inputs: what the server has without labels, [n, ...]; server_examples: and with labels;
    shape: of one input. Networks that a method adds start from seeds.init, too.
    """
    t = config.training
    head = "net.head." if isinstance(model.net, Unpacking) else "head."
    return Setting(
        model,
        target,
        local_of(t),
        Sgd(t.server_lr, t.server_momentum),
        (head,),
        rounds=t.rounds,
        clients=config.shift.clients,
        server_inputs=server_inputs,
        server_examples=server_examples,
        shape=shape,
        cap=t.max_weight,
        seed=config.seeds.resolved().init,
    )


def for_densities(base: Setting, prepared: Prepared, at_sites: bool) -> Setting:
    """The setting with what methods that fit densities of inputs are told of them."""
    # Sites see their own inputs alone, and all must fit densities of one kind.
    pair = None if at_sites else two_values(prepared.task.clients)
    return replace(base, two_values=pair, log_ratios=prepared.log_ratios)


def local_of(t: Training) -> Local:
    """One phase of local training as configured."""
    return Local(
        lr=Cosine(t.lr, t.rounds) if t.schedule == "cosine" else t.lr,
        epochs=t.epochs,
        steps=t.steps,
        batch=t.batch,
        momentum=t.momentum,
        decay=t.decay,
        optimizer=t.optimizer,
        precision=t.precision,
    )


def gate_of(t: Training, target: tuple[float, ...]) -> Gate:
    """Which replies are let through, as configured; target [K] as the server gets it."""
    return Gate(
        on_bad=t.on_bad_reply,
        # TOML has no key for "no limit", so an absent one means it.
        max_norm=math.inf if t.max_norm is None else t.max_norm,
        min_clients=t.min_clients,
        max_gap=math.inf if t.max_gap is None else t.max_gap,
        target=target,
        max_reply=t.max_reply,
        max_weight=1.0 if t.max_weight is None else t.max_weight,
    )
