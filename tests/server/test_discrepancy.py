"""FedDisco's weights by hand and by the authors' steps, and where there are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

from fedshift import recipes
from fedshift.errors import InputError
from fedshift.recipes import Setting
from fedshift.server.discrepancy import Disco
from fedshift.server.weights import BySize
from support.comparing import same
from support.federations import TARGET

COUNTS = ((30.0, 10.0, 0.0), (5.0, 45.0, 10.0), (20.0, 20.0, 20.0), (0.0, 0.0, 70.0))
EVEN = (1 / 3, 1 / 3, 1 / 3)


def table(counts: Any = COUNTS) -> dict[str, Tensor]:
    labels = torch.tensor(counts, dtype=torch.float64)
    return {"n": labels.sum(1), "labels": labels}


def by_the_authors(counts: Any, towards: Any, a: float, b: float) -> list[float]:
    """Their steps: scipy's divergence, over its sum; what is left of the sizes, cut off at 0."""
    counts = np.array(counts)
    apart = special.kl_div(counts / counts.sum(1)[:, None], np.array(towards)).sum(1)
    rest = counts.sum(1) / counts.sum() - a * apart / apart.sum() + b
    rest[rest < 0] = 0
    return list(rest / rest.sum())


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.1), (0.9, 0.0), (0.0, 0.2)])
@pytest.mark.parametrize("towards", [EVEN, (0.6, 0.3, 0.1)], ids=["even", "uneven"])
def test_the_weights_are_the_authors(a: float, b: float, towards: tuple[float, ...]) -> None:
    weights = Disco(towards, a, b)(table())
    assert weights.tolist() == pytest.approx(by_the_authors(COUNTS, towards, a, b), rel=1e-9)


def test_a_client_that_is_far_from_the_target_gets_less() -> None:
    near, far = (Disco(T, 0.9, 0.0, "l2")(table()) for T in ((0.0, 0.0, 1.0), (0.7, 0.3, 0.0)))
    assert near[3] == near.max()
    assert far[3] == 0  # cut off
    assert far[0] == far.max()


def test_clients_as_far_as_one_another_differ_by_size_alone() -> None:
    """And by b, which adds the same to each."""
    alike = ((30.0, 10.0), (10.0, 30.0), (60.0, 20.0))
    by_size = BySize()(table(alike))
    # d is a third for each: it takes off what b adds.
    given = Disco((0.5, 0.5), 0.6, 0.2)(table(alike))
    assert given.tolist() == pytest.approx(by_size.tolist())
    none_apart = ((5.0, 5.0), (20.0, 20.0))
    assert Disco((0.5, 0.5), 3.0)(table(none_apart)).tolist() == pytest.approx([0.25, 0.75])


def test_a_client_without_examples_has_no_weight() -> None:
    with_empty = Disco(EVEN)(table((*COUNTS, (0.0, 0.0, 0.0))))
    assert with_empty[-1] == 0
    assert with_empty[:-1].tolist() == Disco(EVEN)(table()).tolist()


@pytest.mark.parametrize("make", [recipes.feddisco, recipes.feddisco_target])
def test_without_both_it_is_fedavg(setting: Setting, federated: Any, make: Any) -> None:
    plain = recipes.fedavg(setting)
    assert torch.equal(Disco(EVEN, 0.0, 0.0)(table()), BySize()(table()))
    assert same(make(setting, a=0.0, b=0.0), plain, federated()) == 0
    assert same(make(setting), plain, federated()) > 1e-4


def test_the_two_recipes_differ_by_the_shares_that_they_measure_from(setting: Setting) -> None:
    even = recipes.feddisco(setting, distance="l2").combine.weights  # type: ignore[attr-defined]
    target = recipes.feddisco_target(setting).combine.weights  # type: ignore[attr-defined]
    assert (even.distance, target.distance) == ("l2", "l2")
    assert target.towards == TARGET
    assert len(set(even.towards)) == 1


def test_a_cohort_without_any_weight_is_refused() -> None:
    alike = ((10.0, 0.0), (0.0, 10.0))
    with pytest.raises(InputError, match="are 0 for all 2 clients of a cohort: a = 1 times"):
        Disco((0.5, 0.5), a=1.0, b=0.0)(table(alike))
    assert Disco((0.5, 0.5), a=0.99, b=0.0)(table(alike)).tolist() == [0.5, 0.5]


def test_shares_of_other_labels_are_refused() -> None:
    """Of one label, too: its share would otherwise be every label's."""
    for towards in ((1.0,), (0.5, 0.5)):
        message = f"of {len(towards)} labels, and clients have 3; give a share for each"
        with pytest.raises(InputError, match=message):
            Disco(towards, distance="l2")(table())
