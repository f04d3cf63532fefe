"""What the backend `dense` trains or refuses, and how far its results are from the loop's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from fedshift.engine.backends import Backend, Job, Reply, Stage
from fedshift.engine.run import Federation, run, start
from fedshift.errors import UnfitError
from fedshift.recipes import Setting
from support.every_method import MAKE, ROUNDS, Make
from support.rounds import last, relative_difference

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

# Rows that it trains. Those in neither list are new: compared where it trains them, or refused.
TRAINED = {
    "fedavg", "fedprox", "fedpals", "fedpals sharp", "fedpals to the mix so far",
    "fedprox + fedpals", "oracle", "afl", "afl with idle clients", "feddisco", "feddisco of few",
    "feddisco_target", "ccvr", "ccvr_target", "iwerm", "iwerm by node", "fedpals_joint",
    "label weights on fedpals", "label weights on scaffold", "fedavgm", "fedadam", "fedyogi",
    "scaffold", "scaffold I", "fednova under fedpals", "rfa under fedpals", "ditto under fedpals",
    "scaffold + fedpals", "feddyn", "fednova", "local_only", "fedavgft", "fedavgft tuning",
    "fedproxft", "ditto", "ditto_drm_repo", "fedper", "fedrep", "fedrep_drm_repo", "fedbabu",
    "fedbabu_drm_repo", "fedpac_drm_repo", "fedala_drm_repo", "confree",
    "confree of whole models", "confree_drm_repo", "fedavg_uniform", "labelset_fedavg public",
    "labelset_fedavg holders", "labelset_fedavg + pairwise", "fedmedian", "fedtrimmed", "krum",
    "multikrum", "rfa",
}  # fmt: skip

# What follows training here makes more of rounding: AFL's mixture, which moves less than the losses
# that it comes of (other stacked clients: 1.2e-6, too), and tuning on the server.
MOST = {"afl with idle clients": 2e-6, "labelset_fedavg + pairwise": 2e-6}
AT_ONCE = ("fedavg", "fedprox", "fedper", "fedpals")


@contextlib.contextmanager
def may_refuse(name: str) -> Iterator[None]:
    """Within the block, a row without an expected outcome may also be refused."""
    try:
        yield
    except UnfitError:
        if name in TRAINED:
            raise


def with_other_labels(backend: Backend) -> Backend:
    """The method, training each client with the labels shifted by one place."""

    def odd(stage: Stage, jobs: Iterable[Job]) -> Iterator[Reply]:
        shifted = tuple(c._replace(y=c.y.roll(1)) for c in stage.clients)
        return backend(replace(stage, clients=shifted), jobs)

    return odd


def gap(make: Make, setting: Setting, federation: Federation, backend: Backend) -> float:
    """The distance of the result from the loop's, relative to the change that the run made."""
    algorithm = make(setting)
    plain = last(run(algorithm, federation, ROUNDS, cohort=4))
    other = last(run(algorithm, federation, ROUNDS, cohort=4, backend=backend))
    loss = abs(plain.loss - other.loss) / abs(plain.loss)
    return max(loss, relative_difference(plain, other, start(algorithm, federation)))
