"""What methods refuse: each row is a call, the key at fault, and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedshift.algorithms.afl import Afl, project_simplex
from fedshift.algorithms.ccvr import Ccvr
from fedshift.algorithms.ditto import Ditto
from fedshift.algorithms.fedala import FedAla
from fedshift.algorithms.fedas import FedAs
from fedshift.algorithms.fedavg import Extra, FedAvg
from fedshift.algorithms.feddisk import FedDisk
from fedshift.algorithms.feddyn import FedDyn
from fedshift.algorithms.fednova import FedNova
from fedshift.algorithms.fedpac import FedPac
from fedshift.algorithms.finetune import FineTune
from fedshift.algorithms.label_weights import LabelWeights
from fedshift.algorithms.labelsets import LabelSets
from fedshift.algorithms.local_only import LocalOnly
from fedshift.algorithms.method import Method
from fedshift.algorithms.scaffold import Scaffold
from fedshift.algorithms.tuning import CentralTuning
from fedshift.client.decorrelation import Decorrelation
from fedshift.client.distilling import NotTrueDistillation, VacantDistillation
from fedshift.client.local import Local
from fedshift.client.mixing import Mix
from fedshift.client.objectives import Contrastive
from fedshift.client.origin import ClientEntropy
from fedshift.client.prototypes import ToPrototypes
from fedshift.client.shares import CountAdjusted, CountMargins, LogitSuppression
from fedshift.client.sharing import Share
from fedshift.data import Examples
from fedshift.engine.run import start
from fedshift.errors import InputError
from fedshift.model import Model
from fedshift.server.confree import ConFree
from fedshift.server.robust import Median
from support.federations import FEATURES, TARGET

HEAD = Share(("head.",))
ADAM = Local(optimizer="adam")
X = torch.zeros(8, FEATURES)
NAN = float("nan")


def tuning(model: Model, **given: Any) -> CentralTuning:
    return CentralTuning(LabelSets(FedAvg(model)), given.pop("inputs", X), **given)


def on(extra: Extra, **given: Any) -> Callable[[Model], Method]:
    return lambda m: FedAvg(m, extras=(extra,), **given)


# Call of the model -> words that the sentence holds: the key at fault, what was given.
MADE: list[tuple[Callable[[Any], Any], tuple[str, ...]]] = [
    (lambda m: Scaffold("ii"), ("option", '"ii"', "I, II")),  # type: ignore[arg-type]
    (on(Scaffold(), local=Local(momentum=0.9)), ("momentum 0.9", "momentum=0")),
    (on(Scaffold(), local=ADAM), ("Adam", 'optimizer="sgd"')),
    (on(Scaffold(), local=(Local(), Local())), ("one Local",)),
    (on(Scaffold(), combine=Median()), ("Mean", "Median")),
    (on(Scaffold(), share=HEAD), ("share",)),
    *((lambda m, a=a: FedDyn(a), ("alpha", f"{a}")) for a in (0.0, -0.1, float("inf"), NAN)),
    (on(FedDyn()), ("combine=Mean(Uniform())",)),
    (on(FedNova(), local=ADAM), ("adam", 'optimizer="sgd"')),
    (on(FedNova(), local=(Local(), Local())), ("one Local",)),
    (lambda m: Afl(-0.1), ("gamma", "-0.1")),
    (lambda m: Afl(domains=(0, 2, 2)), ("domains", "[0, 2]")),
    (on(Afl(), combine=Median()), ("combine",)),
    (lambda m: FedPac(lam=-1.0), ("lam", "-1")),
    (on(FedPac(), share=HEAD), ("share",)),
    (lambda m: ToPrototypes(0.0), ("lam", "0")),
    (lambda m: FedAs(match="class"), ("match", '"class"', '"classes"')),  # type: ignore[arg-type]
    (lambda m: FedAs(Local(only=("head.",))), ("only=", "leave out")),
    (on(FedAs()), ("share=",)),
    (on(FedAs(), share=HEAD, combine=ConFree()), ("ConFree", "fisher=False")),
    (on(FedAla(), share=HEAD), ("share",)),
    (lambda m: Mix(cap=0), ("cap", "0")),
    (lambda m: Ditto(FedAvg(m), -1.0), ("lam", "-1")),
    (lambda m: Ditto(FineTune(FedAvg(m), 1)), ("FineTune", "Ditto inside")),
    (lambda m: Ditto(LocalOnly(m)), ("LocalOnly", "moves none")),
    (lambda m: Ditto(LabelSets(FedAvg(m))), ("LabelSets(Ditto(...))",)),
    (lambda m: Ditto(FedAvg(m), objective=ClientEntropy()), ("cohort",)),
    (lambda m: FineTune(FedAvg(m), 1, objective=ClientEntropy()), ("cohort",)),
    (lambda m: LocalOnly(m, ClientEntropy()), ("cohort",)),
    (lambda m: FineTune(FedAvg(m), -1), ("round -1", "0 or more")),
    (lambda m: FineTune(LabelSets(FedAvg(m)), 1), ('mode="holders"',)),
    (lambda m: LabelSets(FedAvg(m), "hidden"), ("mode", '"hidden"')),  # type: ignore[arg-type]
    (lambda m: LabelSets(FedAvg(m), slots=2.5), ("slots", "2.5")),  # type: ignore[arg-type]
    (lambda m: LabelSets(FedAvg(m), "public", slots=3), ("slots = 3", "drop slots")),
    (lambda m: LabelSets(LocalOnly(m)), ("LocalOnly", "FedAvg")),  # type: ignore[arg-type]
    (lambda m: LabelSets(FedAvg(m, extras=(FedNova(),))), ("Scaffold", "extras")),
    (lambda m: LabelSets(FedAvg(m, combine=Median())), ("Mean", "Median")),
    (lambda m: LabelSets(FedAvg(m, share=HEAD)), ("share",)),
    (lambda m: LabelWeights(FedAvg(m), (0.5, 0.2)), ("sum to 1",)),
    (lambda m: LabelWeights(FedAvg(m), TARGET, 0.5), ("clip", "0.5")),
    (lambda m: LabelWeights(FedAvg(m), TARGET, ratio="nodes"), ("ratio", '"node"')),  # type: ignore[arg-type]
    (lambda m: Ccvr(FedAvg(m), -1, TARGET), ("-1 rounds",)),
    (lambda m: Ccvr(FedAvg(m), 1, TARGET, virtual=0), ("0 virtual",)),
    (lambda m: Ccvr(FedAvg(m), 1, TARGET, ridge=0.0), ("ridge", "0.0")),
    (lambda m: FedDisk(FedAvg(m), None, rounds=0), ("rounds", "0")),
    (lambda m: FedDisk(FedAvg(m), None, weighing=0), ("weighing", "0")),
    (lambda m: FedDisk(FedAvg(m), None, most=1.0), ("most", "1.0")),
    (lambda m: FedDisk(FedAvg(m), None, least_ess=1.0), ("least_ess", "1.0")),
    (lambda m: FedDisk(FedAvg(m), None, useful=-0.1), ("useful", "-0.1")),
    (lambda m: tuning(m, loss="pair"), ("loss", '"pairwise"')),
    (lambda m: tuning(m, part="heads"), ("part", '"head"')),
    (lambda m: tuning(m, stop="hold-out"), ("stop", '"held-out"')),
    (lambda m: tuning(m, steps=-1), ("steps", "-1")),
    (lambda m: tuning(m, batch=0), ("batch", "0")),
    (lambda m: tuning(m, lr=0.0), ("lr", "0.0")),
    (lambda m: tuning(m, rounds=-1), ("rounds", "-1")),
    (lambda m: tuning(m, loss="kl", over="union"), ("over", "leave")),
    (lambda m: tuning(m, temperature="fitted"), ("temperature", "labelled=")),
    (lambda m: tuning(m, stop="held-out", inputs=X[:4]), ("stop", "4", "give it 5")),
    (lambda m: tuning(m, moments="kept", optimizer="sgd"), ("moments", "sgd")),
    (lambda m: tuning(m, inputs=X[:0]), ("no inputs",)),
    (lambda m: tuning(m, inputs=X.numpy()), ("inputs", "as_tensor")),
    (lambda m: tuning(m, inputs=X / 0), ("input 0", "NaN")),
    (lambda m: Contrastive(tau=0.0), ("tau", "0")),
    (lambda m: NotTrueDistillation(tau=0.0), ("tau", "0")),
    (lambda m: CountMargins(3, -1.0), ("tau", "-1")),
    (lambda m: Decorrelation(scale="papr"), ("scale", '"paper"')),  # type: ignore[arg-type]
    *((lambda m, k=k: k(3, 0.0), ("positive number", "0")) for k in
      (VacantDistillation, LogitSuppression, CountAdjusted)),
    (lambda m: project_simplex(torch.tensor([])), ("vector",)),
    (lambda m: project_simplex(torch.tensor([1.0, NAN])), ("finite",)),
    (lambda m: project_simplex(torch.ones(2), 0.0), ("total", "0.0")),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(MADE)))
def test_refused_when_made(row: int, mlp: Model) -> None:
    call, words = MADE[row]
    with pytest.raises(InputError) as e:
        call(mlp)
    assert all(word in str(e.value) for word in words), str(e.value)


# The same for what is seen with the federation's parameters, before round 1.
STARTED: list[tuple[Callable[[Model], Method], tuple[str, ...]]] = [
    (lambda m: FedAvg(m, share=Share(("haed.",))), ('"haed."', "head.")),
    (lambda m: FedAvg(m, share=Share(("body", "head"))), ("cover every parameter",)),
    (on(Afl(domains=(0, 1))), ("2 clients", "6")),
    (on(FedPac(("head.bias",))), ("is a matrix",)),
    (on(FedAla(Mix(layers=9))), ("layers=9", "2 layers")),
    (lambda m: Ditto(FedAvg(m, share=HEAD)), ("head.bias", "share all")),
    (lambda m: LabelSets(FedAvg(m), head=("haed.",)), ("['haed.']", "head.")),
    (lambda m: LabelSets(FedAvg(m), slots=2), ("slots", "2")),
    (lambda m: LabelWeights(FedAvg(m), (0.5, 0.5)), ("2 labels", "5")),
    (lambda m: Ccvr(FedAvg(m, share=HEAD), 2, TARGET), ("FedAvg", "shares them all")),
    (lambda m: Ccvr(FedAvg(m), 2, TARGET, head=("body.", "head.")), ("one linear layer",)),
    (lambda m: FedDisk(FedAvg(m), None), ("no density", "shape=")),
    (lambda m: CentralTuning(FedAvg(m), X), ("FedAvg", "LabelSets")),
    (lambda m: CentralTuning(tuning(m), X), ("centrally tuned", "give one")),
    (lambda m: tuning(m, head=("haed.",)), ("haed.",)),
    (lambda m: tuning(m, inputs=torch.zeros(8, 3)), ("inputs [8, 3]",)),
    (lambda m: tuning(m, labelled=Examples(X[:0], torch.zeros(0).long())), ("no example",)),
    (lambda m: tuning(m, labelled=Examples(X[:1], torch.tensor([5]))), ("label 5", "5 classes")),
    (lambda m: tuning(m, labelled=Examples(torch.zeros(1, 3), torch.tensor([1]))), ("labelled",)),
]


@pytest.mark.parametrize("row", range(len(STARTED)))
def test_refused_before_round_1(row: int, mlp: Model, federated: Any) -> None:
    call, words = STARTED[row]
    method = call(mlp)
    with pytest.raises(InputError) as e:
        start(method, federated())
    assert all(word in str(e.value) for word in words), str(e.value)
