"""Methods that give every client a model of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedavg import FedAvg
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.method import Method
from fedshift.client.local import Local
from fedshift.client.sharing import Share
from fedshift.errors import InputError, check_name, nearest
from fedshift.model import Model
from fedshift.recipes import one_model
from fedshift.recipes.setting import Setting, SettingError
from fedshift.recipes.traits import Count, PersonalLam, ProximalMu, Traits, method

LastRounds = Annotated[Count, "the last rounds, in which clients tune alone"]
TunePart = Annotated[Literal["head", "body", "full"], "what clients tune in the last rounds"]


@method(Traits(fixes_weights=True))
def local_only(setting: Setting) -> LocalOnly:
    """Train every client alone, from the common first model.

    Reference: the baseline "local" of Li et al. 2021 (Ditto), arXiv 2012.04221, Section 4.
    Note: nothing is sent; always run it, since personalisation must beat it.
    """
    return LocalOnly(setting.model, local=setting.local)


def _tuned(setting: Setting, inner: Method, tune_rounds: int, tune: Local) -> Method:
    """`inner`, with fine-tuning in the last `tune_rounds` of the setting's rounds."""
    if not tune_rounds:
        return inner  # bit for bit: not even the state of fine-tuning is added
    if setting.rounds is None:
        raise InputError(
            f"tune_rounds={tune_rounds} are the last rounds of the run, and the setting does not "
            "say how many that has; give Setting(..., rounds=...)"
        )
    if tune_rounds >= setting.rounds:
        raise InputError(
            f"tune_rounds={tune_rounds} of {setting.rounds} rounds leave none to train together; "
            f"give 0 to {setting.rounds - 1}, as tune_rounds={setting.rounds // 4} (for none "
            "together, take local_only)"
        )
    return FineTune(inner, setting.rounds - tune_rounds, tune)


@method(Traits(page="finetune"))
def fedavgft(setting: Setting, *, tune_rounds: LastRounds = 100) -> Method:
    """FedAvg, then every client tunes the whole model alone in the last rounds.

    Reference: Wang et al. 2026, "Beyond aggregation: guiding clients in heterogeneous federated
    learning" (FedDRM), arXiv 2509.23049, Section 4 (baseline).
    Note: 100 of 800 rounds there; report tune_rounds with results; 0 is FedAvg bit for bit.
    """
    return _tuned(setting, one_model.fedavg(setting), tune_rounds, setting.local)


@method(Traits(page="finetune"))
def fedproxft(setting: Setting, *, mu: ProximalMu = 0.01, tune_rounds: LastRounds = 100) -> Method:
    """FedProx, then every client tunes the whole model alone, without the pull.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4 (baseline).
    Note: mu = 0 is fedavgft, and tune_rounds = 0 is FedProx, bit for bit.
    """
    return _tuned(setting, one_model.fedprox(setting, mu=mu), tune_rounds, setting.local)


@method(Traits(page="finetune"))
def fedsamft(setting: Setting, *, rho: float = 0.05, tune_rounds: LastRounds = 100) -> Method:
    """FedSAM, then every client tunes the whole model alone, by plain SGD.

    Reference: Wang et al. 2026 (FedDRM), arXiv 2509.23049, Section 4 (baseline).
    Note: two gradients per federated step; rho = 0 is fedavgft bit for bit.
    """
    return _tuned(setting, one_model.fedsam(setting, rho=rho), tune_rounds, setting.local)


@method()
def ditto(setting: Setting, *, lam: PersonalLam = 1.0) -> Ditto:
    """FedAvg, and beside it a personal model on each client that is pulled to the global one.

    Reference: Li, Hu, Beirami and Smith 2021, "Ditto: fair and robust federated learning through
    personalization", arXiv 2012.04221, Algorithm 1.
    Note: both models train as long as the setting says; lam = 0 is local_only beside FedAvg.
    """
    return Ditto(one_model.fedavg(setting), lam, setting.local)


@method()
def fedper(setting: Setting) -> FedAvg:
    """FedAvg on the body; heads stay on the clients and train along with it.

    Reference: Arivazhagan et al. 2019, "Federated learning with personalization layers",
    arXiv 1912.00818.
    Note: the head is what Setting(head=...) names, and may be several layers.
    """
    return replace(one_model.fedavg(setting), share=Share(head_of(setting)))


def head_of(setting: Setting) -> tuple[str, ...]:
    """The setting's head, checked: each prefix matches, and something is left for the body.

    Raises SettingError where it does not.
    """
    head, names = setting.head, [name for name, _ in setting.model.net.named_parameters()]
    # startswith(()) is False for every name, so an empty head needs its own refusal.
    matches = head and all(any(n.startswith(prefix) for n in names) for prefix in head)
    if matches and not all(n.startswith(head) for n in names):
        return head
    parts = [*dict.fromkeys(f"{n.partition('.')[0]}." for n in names), *names]
    raise SettingError(
        f"Setting.head = {list(head)} must match some of the model's parameters with each prefix, "
        f"and not all of them; the model has {', '.join(names[:8])}.",
        "head",
        f"{nearest(head[0], parts) if head else ''} Name the last by head=(...): "
        f"{layers_of(setting.model)}",
    )


def layers_of(model: Model) -> str:
    """A sentence with the prefixes of the network's last eight layers, for naming a head."""
    names = [name for name, _ in model.net.named_parameters()]
    layers = [*dict.fromkeys(f"{n.rpartition('.')[0]}." for n in names if "." in n)]
    named = ", ".join(f'"{layer}"' for layer in layers[-8:])
    return f"its layers are {named}" if named else "the network is one layer, and has no body"


def in_turn(setting: Setting, head: Local, body: Local) -> tuple[Local, Local]:
    """Two phases: one of the head alone, then one of the body alone."""
    return _head_only(setting, head), _body_only(setting, body)


def _head_only(setting: Setting, local: Local) -> Local:
    _check_only(setting)
    return replace(local, only=head_of(setting))


def _body_only(setting: Setting, local: Local) -> Local:
    _check_only(setting)
    return replace(local, frozen=(*local.frozen, *head_of(setting)))


def _check_only(setting: Setting) -> None:
    if setting.local.only:
        raise InputError(
            f"the method decides which parameters move; leave out only={setting.local.only}"
        )


@method()
def fedrep(setting: Setting, *, head_epochs: Count = 10) -> FedAvg:
    """FedAvg on the body; each client first fits its own head to the body received.

    Reference: Collins et al. 2021, "Exploiting shared representations for personalized federated
    learning" (FedRep), arXiv 2102.07078, Algorithm 1.
    Note: head_epochs passes over the data for the head, then setting.local for the body;
    head_epochs = 0 is FedBABU's body training bit for bit.
    """
    body = _body_only(setting, setting.local)
    if not head_epochs:
        return replace(fedper(setting), local=body)
    # steps=None: a phase has epochs or steps, not both.
    head = _head_only(setting, replace(setting.local, epochs=head_epochs, steps=None))
    return replace(fedper(setting), local=(head, body))


@method()
def fedbabu(
    setting: Setting, *, tune_rounds: LastRounds = 5, tune_part: TunePart = "full"
) -> Method:
    """FedAvg on the body under a head that stays fixed, then every client tunes alone.

    Reference: Oh, Kim and Yun 2022, "FedBABU: toward enhanced representation for federated image
    classification", arXiv 2106.06042, Algorithm 1.
    Note: tune_part is "head", "body" or "full" (the authors' code); their 5 epochs of tuning are
    tune_rounds = 5 with one epoch per round.
    """
    local = setting.local
    # All three at once: a `local.only` is refused whichever part is tuned.
    parts = {"head": _head_only(setting, local), "body": _body_only(setting, local), "full": local}
    check_name("tune_part of fedbabu", tune_part, parts)
    return _tuned(setting, fedrep(setting, head_epochs=0), tune_rounds, parts[tune_part])
