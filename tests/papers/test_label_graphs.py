"""The algebraic connectivity of the labels that clients hold together."""

from __future__ import annotations

import numpy as np
import pytest

from fedshift.shifts.label_sets import cyclic_sets
from fedshift_papers.protocols.label_graphs import algebraic_connectivity


@pytest.mark.parametrize("reach", [1, 2, 3, 4])
def test_of_a_circulant_graph_it_is_the_closed_form(reach: int) -> None:
    """min over j of sum_d 2 - 2 cos(2 pi j d / K)."""
    j, d = np.arange(1, 10)[:, None], np.arange(1, reach + 1)
    expected = (2 - 2 * np.cos(2 * np.pi * j * d / 10)).sum(1).min()
    assert algebraic_connectivity(10, cyclic_sets(10, 2, reach)) == pytest.approx(expected)


def test_pairs_fall_apart_and_all_pairs_hold_together() -> None:
    assert algebraic_connectivity(10, cyclic_sets(10, 2, 0)) == pytest.approx(0, abs=1e-12)
    assert algebraic_connectivity(10, cyclic_sets(10, 2, 5)) == pytest.approx(10)
    assert algebraic_connectivity(10, [range(10)]) == pytest.approx(10)
    assert algebraic_connectivity(3, [(0, 1), (1, 2)]) == pytest.approx(1)
