"""What the backend `dense` trains and refuses, and how far it is from `loop`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fedshift.engine.backends import Backend, ClientUpdate, Job, Reply
from fedshift.engine.run import Federation, run, start
from fedshift.recipes import Setting
from support.every_method import MAKE, ROUNDS, Make
from support.rounds import apart, last

# Rows of MAKE that it is not for, and a word of the reason.
REFUSED = {
    **dict.fromkeys(("fedrs", "fedrs by frequency", "fedpals + fedrs"), "RestrictedSoftmax"),
    **dict.fromkeys(("fedsam", "fedsamft", "fedpals + fedsam"), "through Sam"),
    **dict.fromkeys(("moon", "moon_uniform", "fedpals + moon"), "CrossEntropy . Contrastive"),
    "fedntd": "CrossEntropy . NotTrueDistillation",
    "fedgela": "ShareScaled",
    "fedetf": "CountAdjusted",
    "balanced_softmax": "CountAdjusted",
    "fedlc": "CountMargins",
    **dict.fromkeys(("fedvls", "fedvls strong"), "CountAdjusted . VacantDistillation"),
    **dict.fromkeys(("feddecorr", "feddecorr by code"), "CrossEntropy . Decorrelation"),
    **dict.fromkeys(("feddrm", "feddrm_shared_head"), "client_logits"),
    **dict.fromkeys(("fedpac", "fedpac without mixing"), "CrossEntropy . "),
    **dict.fromkeys(("fedala", "fedala of all layers"), "torch.equal"),
    **dict.fromkeys(("fedas", "fedas_drm_repo"), "the objective is To"),
    **dict.fromkeys(("feddisk", "feddisk, direct, by moon"), "the network has MixtureMade"),
    "made": "the network has Made",
    **{name: "slots.py" for name in MAKE if name.startswith("labelset") and "pu" not in name},
}
del REFUSED["labelset_fedavg holders"], REFUSED["labelset_fedavg + pairwise"]

# What follows training here makes more of rounding: AFL's mixture, which moves less than the losses
# that it comes of (other stacked clients: 1.2e-6, too), and tuning on the server.
MOST = {"afl with idle clients": 2e-6, "labelset_fedavg + pairwise": 2e-6}
AT_ONCE = ("fedavg", "fedprox", "fedper", "fedpals")


def with_other_labels(backend: Backend) -> Backend:
    """It trains each client on its examples with their labels shifted by one place."""

    def odd(update: ClientUpdate, jobs: Iterable[Job]) -> Iterator[Reply]:
        shifted = (j._replace(data=j.data._replace(y=j.data.y.roll(1))) for j in jobs)
        return backend(update, shifted)

    return odd


def gap(make: Make, setting: Setting, federation: Federation, backend: Backend) -> float:
    """How far it ends from the loop, relative to the run's change."""
    algorithm = make(setting)
    plain = last(run(algorithm, federation, ROUNDS, cohort=4))
    other = last(run(algorithm, federation, ROUNDS, cohort=4, backend=backend))
    loss = abs(plain.loss - other.loss) / abs(plain.loss)
    return max(loss, apart(plain, other, start(algorithm, federation)))
