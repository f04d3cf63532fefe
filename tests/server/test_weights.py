"""FedPALS weights of a cohort: the solver's, also where the cohort comes again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.server.pals import pals_weights
from fedshift.server.weights import Pals

COUNTS = ((30.0, 10.0), (5.0, 45.0), (20.0, 20.0))


def table(counts: Tensor) -> dict[str, Tensor]:
    return {"n": counts.sum(1), "labels": counts}


def test_a_cohort_that_comes_again_has_the_same_weights() -> None:
    counts = torch.tensor(COUNTS, dtype=torch.float64)
    rule = Pals((0.7, 0.3), lam=3.0)
    first = rule(table(counts))
    first += 1.0  # what one caller does with its weights is nothing to the next
    again = Pals((0.7, 0.3), lam=3.0)(table(counts.clone()))
    assert again.tolist() == pals_weights(COUNTS, (0.7, 0.3), lam=3.0).weights.tolist()
    # Another order of the same numbers, other numbers, other settings are other questions.
    for other, given in (
        (rule, counts.flip(1)), (rule, counts.view(2, 3)[:, :2]),
        (Pals((0.6, 0.4), lam=3.0), counts), (Pals((0.7, 0.3), ess=0.9), counts),
        (Pals((0.7, 0.3), lam=3.0, cap=0.5), counts),
        (Pals((0.7, 0.3), lam=3.0, fidelity="norm"), counts),
    ):  # fmt: skip
        weights = other(table(given))
        assert weights.tolist() != again.tolist()
        alone = pals_weights(given.numpy(), other.target, lam=other.lam, ess=other.ess,
                             cap=other.cap, fidelity=other.fidelity)  # fmt: skip
        assert weights.tolist() == alone.weights.tolist()


def test_counts_of_any_type_and_a_target_in_a_list() -> None:
    counts = torch.tensor(COUNTS)
    single = Pals([0.7, 0.3], lam=3.0)(table(counts.float()))  # type: ignore[arg-type]
    assert single.tolist() == Pals((0.7, 0.3), lam=3.0)(table(counts.double())).tolist()


def test_a_refusal_is_not_remembered_as_an_answer() -> None:
    rule = Pals((0.7, 0.3), lam=3.0)
    for _ in range(2):
        with pytest.raises(InputError):
            rule(table(torch.zeros(2, 2, dtype=torch.float64)))
