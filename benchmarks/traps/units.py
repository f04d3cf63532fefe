"""Numbers in another unit or order than is read, and losses that teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import nn

import fedshift as fs
from fedshift.client.objectives import CrossEntropy, Term, View
from fedshift.data import client_data, register
from fedshift.errors import FedshiftError
from fedshift.estimate import estimate_target_loss
from fedshift.seeds import Seeds
from fedshift.server.pals import effective_sample_size

COUNTS = [[90.0, 10.0], [20.0, 80.0]]


def answer(use: Callable[[], object]) -> str:
    """Refused, or taken without a word."""
    try:
        return f"silent: {use()}"
    except FedshiftError as e:
        return f"refused: {e}"
    except Exception as e:
        return f"raw: {type(e).__name__}"


def client(**changed: Any) -> Any:
    """A client of 300 examples, with fields replaced."""
    made = client_data(torch.ones(300, 4), torch.arange(300) % 2, 0)
    return made._replace(**changed)


@dataclass(frozen=True)
class Detached(Term):
    """A term whose value has no gradient."""

    def __call__(self, view: View) -> torch.Tensor:
        return nn.functional.cross_entropy(view.out["logits"].detach(), view.batch.y)


@dataclass(frozen=True)
class Writing(Term):
    """A term that writes labels."""

    def __call__(self, view: View) -> torch.Tensor:
        return nn.functional.cross_entropy(view.out["logits"], view.batch.y.fill_(0))


def train(objective: Term) -> str:
    """The loss after a round."""
    model = fs.Model(nn.Linear(4, 2))
    federation = fs.Federation([client()], *model.init(), register([client()], 2), Seeds.of(0))
    *_, last = fs.run(fs.FedAvg(model, objective), federation, 1)
    return f"trained to a loss of {last.loss:.2f}"


def trap_true_for_importances() -> str:
    """Importances as a mask of True: 300 examples count as one."""
    return answer(lambda: register([client(w=torch.ones(300).bool())], 2)["n"].tolist())


def trap_bytes_for_importances() -> str:
    """Importances as bytes: the count of 300 examples overflows to 44."""
    w = torch.ones(300, dtype=torch.uint8)
    return answer(lambda: register([client(w=w)], 2)["n"].tolist())


def trap_sixteen_bits_for_importances() -> str:
    """Importances in bfloat16, which cannot count to 301."""
    many = client_data(torch.ones(301, 4), torch.zeros(301).long(), 0)
    n = register([many._replace(w=torch.ones(301).bfloat16())], 2)["n"].item()
    return "right" if n == 301 else f"silent: {n} examples"


def trap_shares_for_counts() -> str:
    """pals_weights of label shares: every client has one example, and λ another unit."""
    shares = [[0.9, 0.1], [0.2, 0.8]]
    return answer(lambda: fs.pals_weights(shares, [0.5, 0.5], lam=1).ess)


def trap_shares_in_the_table() -> str:
    """A federation's table with label shares in place of counts."""
    model, table = fs.Model(nn.Linear(4, 2)), register([client()], 2)
    odd = table | {"labels": table["labels"] / 300}
    return answer(lambda: fs.Federation([client()], *model.init(), odd, Seeds.of(0)))


def trap_value_counts_for_the_target() -> str:
    """A pandas Series by falling share as the target, read by place."""
    target = pd.Series([0.7, 0.3], index=[1, 0])
    return answer(lambda: fs.pals_weights(COUNTS, target, lam=1).weights.tolist())


def trap_value_counts_in_a_rule() -> str:
    """The same Series as the target of a weight rule."""
    from fedshift.server.weights import Pals

    return answer(lambda: Pals(pd.Series([0.7, 0.3], index=[1, 0]), lam=1).target)  # type: ignore[arg-type]


def trap_recalls_for_counts() -> str:
    """estimate_target_accuracy of recalls in place of counts of right answers."""
    return answer(lambda: fs.estimate_target_accuracy([0.8, 0.7], [100, 100], [0.5, 0.5]).accuracy)


def trap_a_target_in_percent() -> str:
    """estimate_target_loss with a target in percent."""
    use = lambda: estimate_target_loss([1.0], [1.0], [2], [100.0]).unmeasured_mass  # noqa: E731
    return answer(use)


def trap_weights_in_percent() -> str:
    """effective_sample_size of weights that sum to 100."""
    return answer(lambda: effective_sample_size([50, 50], [10, 20]))


def trap_a_loss_without_gradient() -> str:
    """An objective that detaches its logits: nothing is learned."""
    return answer(lambda: train(Detached()))


def trap_a_term_without_gradient() -> str:
    """The same as a second term: it changes nothing."""
    return answer(lambda: train(CrossEntropy() + Detached()))


def trap_a_term_that_writes_labels() -> str:
    """An objective that writes into its batch's labels."""
    return answer(lambda: train(Writing()))
