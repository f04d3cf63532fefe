"""Measurements where clients serve models of their own, compared with counts by hand.

Clients of unequal sizes: with equal ones many different definitions give the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from fedshift.data import Examples, Task, client_data
from fedshift.experiments.measures import served
from fedshift.experiments.measures.routing_details import POINTS, details
from fedshift.experiments.measures.served import observe, refit, routable, scored
from fedshift.experiments.task.preparing import joined
from fedshift.router.route import Router
from support.by_hand import Array
from support.serving_by_hand import CLASSES, CLIENTS, Hand, Labels, played, prepared, softmax


@pytest.mark.slow
def test_the_clients_are_of_unequal_sizes_and_so_are_their_shares_of_tests() -> None:
    hand = played("feddrm")
    assert hand.sizes.max() > 2.5 * hand.sizes.min()
    drawn = np.array([len(t) for t in hand.task.tests])
    assert np.abs(drawn / drawn.sum() - hand.sizes / hand.sizes.sum()).max() > 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "cohort"),
    [("feddrm", None), ("feddrm", 3), ("fedper", None), ("ditto", None), ("fedala_drm_repo", None)],
)
def test_every_metric_is_what_counting_gives(method: str, cohort: int | None) -> None:
    hand = played(method, cohort)
    observed, expected = vars(hand.observed.metrics), hand.metrics()
    for name, value in expected.items():
        assert observed[name] == pytest.approx(value, abs=1e-12), name
    absent = observed.keys() - expected.keys() - {"round", "global_accuracy"}
    assert all(np.isnan(observed[name]) for name in absent)
    assert len(hand.last.states) == (cohort or CLIENTS)


def test_the_metrics_differ() -> None:
    """The control: no two ways of answering agree here."""
    hand = played("feddrm")
    metrics = {k: v for k, v in hand.metrics().items() if k != "system_accuracy"}
    for one, other in combinations(metrics.values(), 2):
        assert abs(one - other) > 1e-4
    assert abs(metrics["average_accuracy"] - hand.own_accuracies().mean()) > 1e-3
    assert all(abs(metrics["vote_accuracy"] - hand.right(labels)) > 1e-3 for labels in hand.labels)
    assert abs(metrics["router_accuracy"] - np.mean(hand.density() == hand.origin)) > 1e-3
    uniform = np.mean([softmax(out["logits"]) for out in hand.each], axis=0).argmax(1)
    assert abs(metrics["mixture_accuracy"] - hand.right(uniform)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ditto", "fedala_drm_repo"])
def test_global_accuracy_is_the_servers_model(method: str) -> None:
    hand = played(method)
    server = hand.last.server
    given = hand.outputs(server["params"], server["buffers"])["logits"].argmax(1)
    accuracy = hand.observed.metrics.global_accuracy
    assert accuracy == pytest.approx(hand.right(given), abs=1e-12)
    assert all(abs(accuracy - hand.right(labels)) > 1e-3 for labels in hand.labels)


@pytest.mark.parametrize("method", ["feddrm", "fedper"])
def test_there_is_no_global_accuracy_without_a_whole_model(method: str) -> None:
    assert np.isnan(played(method).observed.metrics.global_accuracy)


@pytest.mark.parametrize(("method", "rule"), [("feddrm", "routed"), ("fedper", "vote")])
def test_the_systems_own_answers_are_scored_label_by_label(method: str, rule: str) -> None:
    hand = played(method)
    given = hand.sent(hand.z.argmax(1)) if rule == "routed" else hand.vote()
    score = hand.observed.score
    for k in range(CLASSES):
        assert int(score.total[k]) == int((hand.y == k).sum())
        assert int(score.correct[k]) == int(((hand.y == k) & (given == k)).sum())
        assert int(score.predicted[k]) == int((given == k).sum())


# --------------------------------------------------------------------------- details


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def by_hand_auc(z: Array, origin: Labels, i: int, j: int) -> float:
    """P(d(x) > d(x')) + P(=)/2 over all pairs."""
    d = z[:, i] - z[:, j]
    high, low = d[origin == i][:, None], d[origin == j][None, :]
    return float((high > low).mean() + (high == low).mean() / 2)


def by_hand_ece(belief: Array, origin: Labels) -> float:
    confidence, right = belief.max(1), belief.argmax(1) == origin
    error = 0.0
    for g in range(15):
        in_bin = (confidence > g / 15) & (confidence <= (g + 1) / 15)
        if in_bin.any():
            error += in_bin.mean() * abs(right[in_bin].mean() - confidence[in_bin].mean())
    return float(error)


def test_details_are_what_counting_gives() -> None:
    hand = played("feddrm")
    shown = details(hand.observed.answers, torch.from_numpy(hand.routable), CLASSES)
    assert shown["client_accuracy"] == pytest.approx(hand.own_accuracies().tolist())
    right = hand.sent(hand.origin) == hand.y
    for i in range(CLIENTS):
        for k in range(CLASSES):
            cell = (hand.origin == i) & (hand.y == k)
            assert shown["class_accuracy"][i][k] == share(int(right[cell].sum()), int(cell.sum()))
    router, chosen = shown["router"], hand.z.argmax(1)
    for i in range(CLIENTS):
        mine = hand.origin == i
        for j in range(CLIENTS):
            assert router["sent"][i][j] == share(int((chosen[mine] == j).sum()), int(mine.sum()))
            if i != j:
                auc = by_hand_auc(hand.z, hand.origin, i, j)
                assert router["auc"][i][j] == pytest.approx(auc, abs=1e-6)
    truth = np.eye(CLIENTS)[hand.origin]
    belief = softmax(hand.z)
    assert router["brier"] == pytest.approx(float(((belief - truth) ** 2).sum(1).mean()))
    assert router["ece"] == pytest.approx(by_hand_ece(belief, hand.origin))


def test_risk_is_that_of_routing_by_the_posterior() -> None:
    hand = played("feddrm")
    router = details(hand.observed.answers, torch.from_numpy(hand.routable), CLASSES)["router"]
    surest = np.argsort(-softmax(hand.z).max(1), kind="stable")
    wrong = (hand.sent(hand.z.argmax(1)) != hand.y)[surest]
    risk = wrong.cumsum() / np.arange(1, len(wrong) + 1)
    assert router["aurc"] == pytest.approx(float(risk.mean()), abs=1e-9)
    assert router["risk"][-1] == pytest.approx(1 - hand.metrics()["routed_posterior"])
    assert (len(router["risk"]), router["coverage"][-1]) == (POINTS, 1.0)
    at = [round(c * len(wrong)) - 1 for c in router["coverage"]]
    assert router["risk"] == pytest.approx(risk[at].tolist(), abs=1e-9)
    voted = (hand.vote() != hand.y)[surest]
    assert abs(voted.mean() - wrong.mean()) > 1e-3  # the control


@pytest.mark.slow
def test_details_leave_out_clients_that_never_took_part() -> None:
    """Nothing is sent to the two of five that were not drawn."""
    hand = played("feddrm", 3)
    last = served.last_round(
        hand.algorithm, hand.last, hand.federation, hand.task, hand.observed.answers
    ).details["router"]
    away = [j for j in range(CLIENTS) if j not in hand.last.states]
    assert len(away) == 2
    assert not any(row[j] for row in last["sent"] for j in away)
    truth, raw = np.eye(CLIENTS)[hand.origin], hand.each[min(hand.last.states)]["client_logits"]
    score = [float(((softmax(z) - truth) ** 2).sum(1).mean()) for z in (hand.z, raw)]
    assert last["brier"] == pytest.approx(score[0])
    assert abs(score[0] - score[1]) > 1e-3  # the control: their rows have logits all the same


# --------------------------------------------------------------------------- refits


def refitted(hand: Hand, task: Task) -> dict[str, float]:
    answers = observe(hand.algorithm, hand.last, hand.federation, task).answers
    again = refit(hand.algorithm, hand.last, hand.federation, task.test.x)
    assert again.notes == ()
    return scored(again, routable(hand.last, hand.federation), answers)


def routers(hand: Hand, data: Sequence[Any]) -> dict[str, Router]:
    router = Router.of(hand.algorithm.at(6), hand.last.server, hand.last.states)
    return {
        "refitted": router.refitted(data, tolerance=1e-4),
        "moment": router.from_moments(data),
    }


@pytest.mark.slow
def test_refits_are_fitted_on_training_images_and_scored_on_the_others() -> None:
    hand = played("feddrm")
    scores = refitted(hand, hand.task)
    leaked = routers(hand, [client_data(t.x, t.y, i) for i, t in enumerate(hand.task.tests)])
    for name, router in routers(hand, hand.task.clients).items():
        z = router.logits(hand.task.test.x).double().numpy()
        chosen = z.argmax(1)
        assert scores[f"{name}_accuracy"] == pytest.approx(hand.right(hand.sent(chosen)))
        assert scores[f"{name}_router_accuracy"] == pytest.approx(np.mean(chosen == hand.origin))
        assert scores[f"{name}_ece"] == pytest.approx(by_hand_ece(softmax(z), hand.origin))
        other = leaked[name].logits(hand.task.test.x).double().numpy()
        assert abs(by_hand_ece(softmax(other), hand.origin) - scores[f"{name}_ece"]) > 1e-3
        assert abs(scores[f"{name}_router_accuracy"] - hand.metrics()["router_accuracy"]) > 1e-3
    assert abs(scores["refitted_router_accuracy"] - scores["moment_router_accuracy"]) > 1e-3


def changed(task: Task, change: Any) -> Task:
    tests = tuple(change(t) for t in task.tests)
    return replace(task, tests=tests, test=joined(tests))


@pytest.mark.slow
def test_test_examples_never_reach_a_refit() -> None:
    """With other test images and labels the router, fitted to the clients' data, is the same."""
    hand = played("feddrm")
    scores = refitted(hand, hand.task)
    other = changed(hand.task, lambda t: Examples(-t.x, (t.y + 1) % CLASSES))
    moved = refitted(hand, other)
    for name, router in routers(hand, hand.task.clients).items():
        z = router.logits(other.test.x).double().numpy()
        right = np.mean(z.argmax(1) == hand.origin)
        assert moved[f"{name}_router_accuracy"] == pytest.approx(right)
        assert moved[f"{name}_ece"] == pytest.approx(by_hand_ece(softmax(z), hand.origin))
    assert all(moved[k] != scores[k] for k in scores)
    labels = changed(hand.task, lambda t: Examples(t.x, (t.y + 1) % CLASSES))
    relabelled = refitted(hand, labels)
    same = {k for k in scores if relabelled[k] == scores[k]}
    assert same == set(scores) - {"refitted_accuracy", "moment_accuracy"}


# --------------------------------------------------------------------------- what is tested on


def test_every_clients_images_go_through_its_look_in_training_and_in_testing() -> None:
    """Client i: brightness 1/2 or 3/2 by bit 0, inverted by bit 1, gamma 2 by bit 2."""
    task, plain = prepared("fedper").task, prepared("fedper", "none").task
    for i in range(CLIENTS):
        pairs = [(task.clients[i].x, plain.clients[i].x), (task.tests[i].x, plain.tests[i].x)]
        pairs += [(task.validation[i].x, plain.validation[i].x)]
        for seen, raw in pairs:
            expected = ((raw + 1) / 2 * (0.5, 1.5)[i & 1]).clamp(max=1.0)
            expected = expected**2 if i & 4 else expected
            expected = 1 - expected if i & 2 else expected
            torch.testing.assert_close((seen + 1) / 2, expected)
            assert len(seen)
            assert not torch.allclose(seen, raw)


def test_no_client_is_tested_on_training_examples() -> None:
    task = prepared("fedper", "none").task
    trained = {x.numpy().tobytes() for c in task.clients for x in c.x}
    parts = [t.x for t in (*task.tests, *task.validation)]
    assert not any(x.numpy().tobytes() in trained for part in parts for x in part)
    assert torch.equal(task.test.x, torch.cat([t.x for t in task.tests]))
    assert len(trained) + sum(map(len, parts)) == 700
