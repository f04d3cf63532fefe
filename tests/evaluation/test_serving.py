"""Serving by local models: votes, routes, mixtures and averages, against counting by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.data import Examples
from fedshift.errors import InputError
from fedshift.evaluation.serving import (
    Served,
    accuracy,
    average_accuracy,
    by_client_and_class,
    own_accuracy,
    serve,
)
from fedshift.model import Model, build
from fedshift.seeds import generator


def believing(labels: list[list[int]], classes: int = 3, **more: Any) -> Served:
    """Models [M][n] that each give 0.6 to one label and share the rest."""
    one_hot = torch.nn.functional.one_hot(torch.tensor(labels), classes)
    n = len(labels[0])
    y = more.get("y", torch.zeros(n, dtype=torch.int64))
    origin = more.get("origin", torch.zeros(n, dtype=torch.int64))
    return Served(0.4 / (classes - 1) + (0.6 - 0.4 / (classes - 1)) * one_hot, y, origin, None)


def test_a_vote_is_the_most_frequent_label_and_a_tie_the_smallest() -> None:
    served = believing([[2, 1, 0], [2, 0, 2], [1, 1, 1]])
    assert served.voted().tolist() == [2, 1, 0]


def test_a_tie_by_probability_goes_to_the_surer_models() -> None:
    probabilities = torch.tensor([[[0.5, 0.45, 0.05]], [[0.05, 0.9, 0.05]]])
    served = Served(probabilities, torch.tensor([1]), torch.tensor([0]), None)
    assert served.voted().tolist() == [0]
    assert served.voted("probability").tolist() == [1]
    # The control: a label that loses the vote does not win by probability.
    outvoted = Served(
        torch.tensor([[[0.51, 0.49]], [[0.51, 0.49]], [[0.0, 1.0]]]),
        torch.tensor([0]), torch.tensor([0]), None,
    )  # fmt: skip
    assert outvoted.voted("probability").tolist() == [0]


def test_an_unknown_way_to_break_ties_is_refused() -> None:
    with pytest.raises(InputError, match='ties = "random"; allowed: "smallest", "probability"'):
        believing([[0]]).voted("random")  # type: ignore[arg-type]


def test_routing_asks_the_chosen_model() -> None:
    served = believing([[0, 0, 0], [1, 1, 1], [2, 2, 2]])
    assert served.routed(torch.tensor([2, 0, 1])).tolist() == [2, 0, 1]


def test_a_mixture_with_all_mass_on_one_client_is_routing_to_it() -> None:
    served = believing([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    chosen = torch.tensor([1, 0, 2])
    share = torch.nn.functional.one_hot(chosen, 3).double()
    assert torch.equal(served.mixed(share), served.routed(chosen))
    assert not torch.equal(served.mixed(share), served.routed(torch.tensor([0, 1, 2])))


def test_a_mixture_weighs_probabilities_and_not_labels() -> None:
    """0.6 * (0.5, 0.5 - e) + 0.4 * (0, 1): the label of the less likely client wins."""
    probabilities = torch.tensor([[[0.51, 0.49]], [[0.0, 1.0]]])
    served = Served(probabilities, torch.tensor([0]), torch.tensor([0]), None)
    assert served.mixed(torch.tensor([[0.6, 0.4]])).tolist() == [1]
    assert served.routed(torch.tensor([0])).tolist() == [0]


def test_own_and_average_accuracy_by_hand() -> None:
    """Client 0 is right on 2 of its 3 examples, client 1 on 1 of 1; n = (30, 10)."""
    origin, y = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 2])
    served = believing([[0, 0, 0, 0], [2, 2, 2, 2]], y=y, origin=origin)
    accuracies = own_accuracy(served)
    assert accuracies.tolist() == pytest.approx([2 / 3, 1.0])
    assert average_accuracy(accuracies, torch.tensor([30.0, 10.0])) == pytest.approx(
        0.75 * 2 / 3 + 0.25
    )
    # Test sets in proportion to n: the average is the accuracy of routing to the origin.
    assert average_accuracy(accuracies, torch.tensor([3.0, 1.0])) == pytest.approx(
        accuracy(served.routed(origin), y)
    )
    correct, total = by_client_and_class(served, 3)
    assert correct.tolist() == [[2, 0, 0], [0, 0, 1]]
    assert total.tolist() == [[2, 1, 0], [0, 0, 1]]


def test_a_client_without_test_examples_does_not_count() -> None:
    served = believing([[0], [1]], y=torch.tensor([0]), origin=torch.tensor([0]))
    accuracies = own_accuracy(served)
    assert accuracies[1].isnan()
    assert average_accuracy(accuracies, torch.tensor([1.0, 99.0])) == 1.0


def test_models_are_run_on_everybodys_examples(mlp: Model) -> None:
    source = generator(0, "serving")
    tests = [Examples(torch.randn(n, 8, generator=source), torch.arange(n) % 5) for n in (4, 7)]
    params, buffers = mlp.init()
    other = {k: -v for k, v in params.items()}
    served = serve(mlp, [(params, buffers), (other, buffers)], tests, batch=3)
    x = torch.cat([t.x for t in tests])
    for i, p in enumerate((params, other)):
        expected = mlp(p, buffers, x)["logits"].softmax(1)
        torch.testing.assert_close(served.probabilities[i], expected)
    assert served.origin.tolist() == [0] * 4 + [1] * 7
    assert not torch.equal(served.labels[0], served.labels[1])


def test_clients_with_one_model_are_run_once(mlp: Model) -> None:
    params, buffers = mlp.init()
    tests = [Examples(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64))] * 3
    calls: list[int] = []
    mlp.net.register_forward_hook(lambda *_: calls.append(1))
    served = serve(mlp, [(dict(params), buffers)] * 3, tests)
    assert len(calls) == 1
    assert served.probabilities.shape == (3, 6, 5)
    copied = {k: v.clone() for k, v in params.items()}
    serve(mlp, [(params, buffers), (copied, buffers), (params, buffers)], tests)
    assert len(calls) == 3


def test_one_test_set_per_model(mlp: Model) -> None:
    empty = Examples(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(InputError, match="2 models and 1 test sets with 0 examples; give one"):
        serve(mlp, [mlp.init()] * 2, [empty])


def test_models_that_differ_in_the_head_share_a_pass(mlp: Model) -> None:
    """A pass, and another that tries whether it may be shared."""
    params, buffers = mlp.init()
    heads = [{k: v + i for k, v in params.items() if k.startswith("head.")} for i in range(3)]
    served = [(params | head, buffers) for head in heads]
    source = generator(1, "serving")
    tests = [Examples(torch.randn(3, 8, generator=source), torch.zeros(3, dtype=torch.int64))] * 3
    x = torch.cat([t.x for t in tests])
    expected = [mlp(*pair, x)["logits"].softmax(1) for pair in served]
    calls: list[int] = []
    mlp.net.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(serve(mlp, served, tests).probabilities, torch.stack(expected))
    assert len(calls) == 2


class NormedHead(nn.Module):
    """A head with running statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"features": z, "logits": self.head(z)}


def test_heads_with_running_statistics_answer_with_their_own() -> None:
    """Two clients share a body; the first one's statistics are those of the template."""
    model = build(NormedHead, seed=0)
    params, buffers = model.init()
    other = {k: v + 2.0 if v.is_floating_point() else v for k, v in buffers.items()}
    head = {k: v + 0.5 for k, v in params.items() if k.startswith("head.")}
    pairs = [(params, buffers), (params | head, other)]
    x = torch.randn(7, 4, generator=generator(0, "queries"))
    queries = Examples(x, torch.zeros(7, dtype=torch.int64))
    served = serve(model, pairs, [queries, queries])
    for together, pair in zip(served.probabilities, pairs, strict=True):
        alone = model(*pair, torch.cat([x, x]))["logits"].softmax(1)
        assert torch.allclose(together.double(), alone.double(), atol=1e-6)
    stale = model(params | head, buffers, torch.cat([x, x]))["logits"].softmax(1)
    assert not torch.allclose(served.probabilities[1].double(), stale.double(), atol=1e-2)
