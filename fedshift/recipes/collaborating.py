"""Methods whose clients borrow from one another: heads, weights or directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal, get_args

from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.fedpac import FedPac
from fedshift.client.local import Local
from fedshift.client.mixing import Layers, Mix
from fedshift.client.sharing import Share
from fedshift.errors import InputError, check_name
from fedshift.recipes import one_model, personal
from fedshift.recipes.setting import Setting
from fedshift.recipes.traits import Count, Traits, method
from fedshift.server.confree import ConFree, Scope

# Methods that ConFREE can be combined with; its authors name FedRep, FedALA and FedPAC, and more.
Host = Literal["fedrep", "fedper", "fedala", "fedpac", "fedavg"]


@method()
def fedpac(
    setting: Setting,
    *,
    lam: Annotated[float, "the pull of the features"] = 1.0,
    collaborate: bool = True,
    head_epochs: int = 1,
    head_lr: float = 0.1,
) -> FedAvg:
    """Pull features to all clients' class means, and mix heads as suits each client.

    Reference: Xu, Tong and Huang 2023, "Personalized federated learning with feature alignment and
    classifier collaboration" (FedPAC), arXiv 2306.11867, Algorithm 1.
    Note: head_epochs at rate head_lr for the head, then setting.local for the body; lam = 0 with
    collaborate = false is FedRep bit for bit; needs a model that returns "features".
    """
    # steps=None: a phase has epochs or steps, not both.
    fit = replace(setting.local, lr=head_lr, epochs=head_epochs, steps=None)
    phases, head = personal.in_turn(setting, fit, setting.local), personal.head_of(setting)
    extra = FedPac(head, lam, collaborate)
    plain = replace(one_model.fedavg(setting), local=phases)
    # Where neither pull nor mixing is left it is FedRep itself, which is cheaper.
    alone = not (lam or collaborate)
    return replace(plain, share=Share(head)) if alone else replace(plain, extras=(extra,))


@method()
def fedala(
    setting: Setting,
    *,
    layers: Layers = 1,
    mix_lr: float = 1.0,
    share: Annotated[float, "the part of the examples that the mixture is learned on"] = 0.8,
    threshold: float = 0.1,
) -> FedAvg:
    """Start local training from a learned mixture of the old local and the global model.

    Reference: Zhang et al. 2023, "FedALA: adaptive local aggregation for personalized federated
    learning", arXiv 2212.01197, Algorithm 1.
    Note: layers counts layers with parameters from the end (the paper's p), or is "all"; mix_lr is
    the rate of the mixing weights, share the part of the examples that they are learned on.
    """
    mix = Mix(mix_lr, layers, share, threshold)
    return replace(one_model.fedavg(setting), extras=(FedAla(mix, setting.head),))


@method(Traits(fixes_weights=True))
def fedas(
    setting: Setting,
    *,
    align_epochs: Count = 1,
    align_lr: float = 0.01,
    align_batch: int = 16,
    align_first: bool = False,
) -> FedAvg:
    """Align the body received with the client's old features; weigh clients by Fisher traces.

    Reference: Yang, Huang and Ye 2024, "FedAS: bridging inconsistency in personalized federated
    learning", CVPR.
    Note: sizes do not count, except through the traces; align_epochs = 0 leaves the alignment out;
    align_first aligns from a client's first round on, as the authors' code does; needs a model that
    returns "features".
    """
    # Alignment and training must run on the same kind of numbers.
    kind = setting.local.precision
    align = Local(align_lr, align_epochs, align_batch, precision=kind) if align_epochs else None
    return replace(personal.fedper(setting), extras=(FedAs(align, first=align_first),))


@method(Traits(fixes_weights=True))
def confree(
    setting: Setting,
    *,
    alpha: Annotated[float, "how far changes may be from the guidance"] = 0.5,
    normalise: bool = True,
    scope: Scope = "tensor",
    host: Host = "fedrep",
    head_epochs: int = 1,
) -> FedAvg:
    """Remove conflicts between clients' changes on the server, to the worst client's gain.

    Reference: Zheng et al. 2025, "ConFREE: conflict-free client update aggregation for personalized
    federated learning", AAAI, doi 10.1609/aaai.v39i21.34449.
    Note: host is that method, by default FedRep; normalise = false projects as the authors' code
    does; scope is "tensor" or "model"; sizes do not count; head_epochs as in fedrep and fedpac.
    """
    check_name("host of confree", host, get_args(Host))
    if head_epochs != 1 and host not in ("fedrep", "fedpac"):
        raise InputError(
            f'head_epochs={head_epochs} is for the hosts "fedrep" and "fedpac", which fit heads by '
            f'themselves; leave it out with host "{host}"'
        )
    inner = _hosts(setting, head_epochs)[host]()
    return replace(inner, combine=ConFree(alpha, normalise, scope))


def _hosts(setting: Setting, head_epochs: int) -> dict[Host, Callable[[], FedAvg]]:
    # Functions: only the host that is asked for may check, and refuse, the setting.
    return {
        "fedrep": lambda: personal.fedrep(setting, head_epochs=head_epochs),
        "fedper": lambda: personal.fedper(setting),
        "fedala": lambda: fedala(setting),
        "fedpac": lambda: fedpac(setting, head_epochs=head_epochs),
        "fedavg": lambda: one_model.fedavg(setting),
    }
