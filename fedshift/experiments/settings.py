"""From a configuration to the setting that recipes build on."""

from __future__ import annotations

from fedshift.client.local import Local
from fedshift.client.schedules import Cosine
from fedshift.experiments.config import Config, Training
from fedshift.model import Model
from fedshift.recipes import Setting
from fedshift.server.optimizers import Sgd


def setting(config: Config, model: Model, target: tuple[float, ...]) -> Setting:
    """The recipe's setting: network, target, local steps and server step as configured."""
    t = config.training
    return Setting(
        model,
        target,
        local_of(t),
        Sgd(t.server_lr, t.server_momentum),
        rounds=t.rounds,
        clients=config.shift.clients,
    )


def local_of(t: Training) -> Local:
    """One phase of local training as configured."""
    return Local(
        lr=Cosine(t.lr, t.rounds) if t.schedule == "cosine" else t.lr,
        epochs=t.local_epochs,
        steps=t.steps,
        batch=t.batch,
        momentum=t.momentum,
        decay=t.decay,
        optimizer=t.optimizer,
    )
