"""`fit(..., max_weight=...)`: one key for all methods, also where a method has its own cap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedshift as fs


def weights(method: Any, **keys: Any) -> tuple[list[float], list[str]]:
    """The weights of a large client and two small ones, and the summary's sentences on clients."""
    x = torch.randn(300, 5, generator=torch.Generator().manual_seed(0))
    client = [0] * 200 + [1] * 60 + [2] * 40
    task = fs.Task.from_arrays(
        x.numpy(), (x[:, 0] > 0).long().numpy(), client=client, target="pooled"
    )
    run = fs.fit(task, "linear", method=method, rounds=1, steps=2, progress=False, **keys).summary
    return list(run.weights), [line for line in run.why if line.startswith("Client 0: ")]


@pytest.mark.parametrize("method", ["fedavg", fs.method("fedpals", lam=1.0)], ids=["size", "pals"])
def test_no_weight_is_larger(method: Any) -> None:
    free, silent = weights(method)
    assert free[0] > 0.6
    assert not silent
    bounded, warnings = weights(method, max_weight=0.4)
    assert max(bounded) == pytest.approx(0.4)
    assert sum(bounded) == pytest.approx(1.0)
    assert len(warnings) == 1
    assert warnings[0].endswith("of the weight; the cap leaves it 0.400.")
