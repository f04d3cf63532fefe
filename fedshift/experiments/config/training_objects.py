"""What [training] describes, as objects: a recipe's setting, local training, and the gate."""

from __future__ import annotations

import math

from torch import Tensor

from fedshift.client.local import Local
from fedshift.client.schedules import Cosine
from fedshift.data import Examples
from fedshift.engine.checks.gate import Gate
from fedshift.experiments.config.custom_network import Unpacking
from fedshift.experiments.config.schema import Training
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.optimizers import Sgd


def setting(
    t: Training,
    model: Model,
    target: tuple[float, ...],
    *,
    clients: int,
    seed: int,
    server_inputs: Tensor | None = None,
    server_examples: Examples | None = None,
    shape: tuple[int, ...] | None = None,
) -> Setting:
    """The recipe's setting: network, target, local steps and server step as configured.

    seed: of first weights, `seeds.init`, for networks that a method adds. server_inputs [n, ...]:
    the server's examples without labels; server_examples: those with labels. shape: of one input.
    """
    head = "net.head." if isinstance(model.net, Unpacking) else "head."
    return Setting(
        model,
        target,
        local_of(t),
        Sgd(t.server_lr, t.server_momentum),
        (head,),
        rounds=t.rounds,
        clients=clients,
        server_inputs=server_inputs,
        server_examples=server_examples,
        shape=shape,
        cap=t.max_weight,
        seed=seed,
    )


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
