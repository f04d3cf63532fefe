"""What is measured where clients serve models of their own, counted once more by hand.

Clients of unequal sizes: with equal ones many different definitions give the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Array
from numpy.typing import NDArray
from torch.func import functional_call

from fedshift.algorithms.base import Algorithm
from fedshift.data import Examples, Task, client_data
from fedshift.engine.rounds import Federation, Round, run
from fedshift.experiments import served
from fedshift.experiments.experiment import method_of
from fedshift.experiments.load import validate
from fedshift.experiments.routing_details import POINTS, details
from fedshift.experiments.served import Observed, observe, refits
from fedshift.experiments.task import Prepared, joined, prepare
from fedshift.router.route import Router

Labels = NDArray[np.int64]
CLIENTS, CLASSES = 5, 10
TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini", "validation": 0.1, "limit": 700},
    "shift": {
        "kind": "dirichlet-per-class", "beta": 0.5, "clients": CLIENTS, "target": "clients",
        "transform": "fashion",
    },
    "model": {"name": "mlp-projected", "hidden": [12, 8]},
    "seeds": {"run": 0},
    "training": {"rounds": 6, "steps": 6, "batch": 16, "lr": 0.1},
}  # fmt: skip


@cache
def prepared(method: str, transform: str = "fashion") -> Prepared:
    tables = TABLES | {"shift": TABLES["shift"] | {"transform": transform}}
    return prepare(validate(tables | {"method": {"name": method}}))


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Hand:
    """One round's models on everybody's test images [n], with plain arrays."""

    algorithm: Algorithm
    federation: Federation
    task: Task
    last: Round

    @cached_property
    def observed(self) -> Observed:
        return observe(self.algorithm, self.last, self.federation, self.task)

    @cached_property
    def y(self) -> Labels:
        return torch.cat([t.y for t in self.task.tests]).numpy()

    @cached_property
    def origin(self) -> Labels:
        return np.repeat(np.arange(CLIENTS), [len(t) for t in self.task.tests])

    @cached_property
    def sizes(self) -> Array:
        """How many examples every client trains on."""
        return np.array([float(len(c.y)) for c in self.task.clients])

    @cached_property
    def routable(self) -> Array:
        """The same, with 0 for clients that never took part."""
        return self.sizes * [i in self.last.states for i in range(CLIENTS)]

    def outputs(self, params: Any, buffers: Any) -> dict[str, Array]:
        x, net = torch.cat([t.x for t in self.task.tests]), self.algorithm.model.net.eval()
        with torch.no_grad():
            out = functional_call(net, {**params, **buffers}, (x,))
        return {k: v.double().numpy() for k, v in out.items()}

    @cached_property
    def each(self) -> list[dict[str, Array]]:
        """What every client's own model gives; the first model for one that never trained."""
        stage, found = self.algorithm.at(self.last.t), []
        for i, data in enumerate(self.federation.clients):
            first = self.algorithm.init_client(
                self.federation.params, self.federation.buffers, data
            )
            state = self.last.states.get(i, first)
            found.append(self.outputs(*stage.model_for(self.last.server, state)))
        return found

    @cached_property
    def labels(self) -> Labels:
        """[M, n]"""
        return np.stack([out["logits"].argmax(1) for out in self.each])

    @cached_property
    def z(self) -> Array:
        """Client logits [n, M]; minus infinity where nothing can be sent."""
        drawn = min(self.last.states)
        return np.where(self.routable > 0, self.each[drawn]["client_logits"], -np.inf)

    def right(self, given: Labels) -> float:
        return float(np.mean(given == self.y))

    def sent(self, client: Labels) -> Labels:
        """The labels where query b is answered by client[b]."""
        return np.array([self.labels[i, b] for b, i in enumerate(client)])

    def vote(self) -> Labels:
        counts = [np.bincount(column, minlength=CLASSES) for column in self.labels.T]
        return np.array([count.argmax() for count in counts])

    def mixture(self) -> Labels:
        share = softmax(self.z)
        mixed = sum(share[:, [i]] * softmax(self.each[i]["logits"]) for i in range(CLIENTS))
        return np.asarray(mixed).argmax(1)

    def density(self) -> Labels:
        with np.errstate(divide="ignore", invalid="ignore"):
            score = self.z - np.log(self.routable / self.routable.sum())
        return np.where(np.isfinite(score), score, -np.inf).argmax(1)

    def own(self) -> Array:
        """Each client's accuracy on its own test images."""
        right = self.labels == self.y
        return np.array([right[i, self.origin == i].mean() for i in range(CLIENTS)])

    def metrics(self) -> dict[str, float]:
        own, vote = self.own(), self.right(self.vote())
        found = {
            "average_accuracy": float(self.sizes / self.sizes.sum() @ own),
            "worst_accuracy": float(own.min()),
            "vote_accuracy": vote,
            "system_accuracy": vote,
            "oracle_routed": self.right(self.sent(self.origin)),
        }
        if "client_logits" not in self.each[0]:
            return found
        hard = self.right(self.sent(self.z.argmax(1)))
        return found | {
            "system_accuracy": hard,
            "routed_posterior": hard,
            "routed_density": self.right(self.sent(self.density())),
            "mixture_accuracy": self.right(self.mixture()),
            "router_accuracy": float(np.mean(self.z.argmax(1) == self.origin)),
        }


def played(method: str, cohort: int | None = None) -> Hand:
    return _played(method, cohort)


@cache
def _played(method: str, cohort: int | None) -> Hand:
    found = prepared(method)
    config = validate(TABLES | {"method": {"name": method}})
    algorithm, federation = method_of(config, found)(), found.federation()
    *_, last = run(algorithm, federation, 1 if cohort else 6, cohort=cohort)
    return Hand(algorithm, federation, found.task, last)


def test_the_clients_are_of_unequal_sizes_and_so_are_their_shares_of_tests() -> None:
    hand = played("feddrm")
    assert hand.sizes.max() > 2.5 * hand.sizes.min()
    drawn = np.array([len(t) for t in hand.task.tests])
    assert np.abs(drawn / drawn.sum() - hand.sizes / hand.sizes.sum()).max() > 1e-4


@pytest.mark.parametrize(
    ("method", "cohort"),
    [("feddrm", None), ("feddrm", 3), ("fedper", None), ("ditto", None), ("fedala_drm_repo", None)],
)
def test_every_metric_is_what_counting_gives(method: str, cohort: int | None) -> None:
    hand = played(method, cohort)
    found, expected = vars(hand.observed.metrics), hand.metrics()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name
    absent = found.keys() - expected.keys() - {"round", "global_accuracy"}
    assert all(np.isnan(found[name]) for name in absent)
    assert len(hand.last.states) == (cohort or CLIENTS)


def test_the_metrics_can_be_told_apart() -> None:
    """The control: no two ways of answering agree here."""
    hand = played("feddrm")
    known = {k: v for k, v in hand.metrics().items() if k != "system_accuracy"}
    for one, other in combinations(known.values(), 2):
        assert abs(one - other) > 1e-4
    assert abs(known["average_accuracy"] - hand.own().mean()) > 1e-3
    assert all(abs(known["vote_accuracy"] - hand.right(own)) > 1e-3 for own in hand.labels)
    assert abs(known["router_accuracy"] - np.mean(hand.density() == hand.origin)) > 1e-3
    uniform = np.mean([softmax(out["logits"]) for out in hand.each], axis=0).argmax(1)
    assert abs(known["mixture_accuracy"] - hand.right(uniform)) > 1e-3


@pytest.mark.parametrize("method", ["ditto", "fedala_drm_repo"])
def test_global_accuracy_is_the_servers_model(method: str) -> None:
    hand = played(method)
    server = hand.last.server
    given = hand.outputs(server["params"], server["buffers"])["logits"].argmax(1)
    found = hand.observed.metrics.global_accuracy
    assert found == pytest.approx(hand.right(given), abs=1e-12)
    assert all(abs(found - hand.right(labels)) > 1e-3 for labels in hand.labels)


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
    found = 0.0
    for g in range(15):
        among = (confidence > g / 15) & (confidence <= (g + 1) / 15)
        if among.any():
            found += among.mean() * abs(right[among].mean() - confidence[among].mean())
    return float(found)


def test_details_are_what_counting_gives() -> None:
    hand = played("feddrm")
    shown = details(hand.observed.answers, torch.from_numpy(hand.routable), CLASSES)
    assert shown["client_accuracy"] == pytest.approx(hand.own().tolist())
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


def test_details_know_who_never_took_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to the two of five that were not drawn."""
    hand = played("feddrm", 3)
    monkeypatch.setattr(served, "refits", lambda *_: ({}, ()))
    monkeypatch.setattr(served, "gradient_drift", lambda *_: {})
    found = served.last_round(
        hand.algorithm, hand.last, hand.federation, hand.task, hand.observed.answers
    ).details["router"]
    away = [j for j in range(CLIENTS) if j not in hand.last.states]
    assert len(away) == 2
    assert not any(row[j] for row in found["sent"] for j in away)
    truth, raw = np.eye(CLIENTS)[hand.origin], hand.each[min(hand.last.states)]["client_logits"]
    score = [float(((softmax(z) - truth) ** 2).sum(1).mean()) for z in (hand.z, raw)]
    assert found["brier"] == pytest.approx(score[0])
    assert abs(score[0] - score[1]) > 1e-3  # the control: their rows have logits all the same


# --------------------------------------------------------------------------- refits


def refitted(hand: Hand, task: Task) -> dict[str, float]:
    answers = observe(hand.algorithm, hand.last, hand.federation, task).answers
    found, notes = refits(hand.algorithm, hand.last, hand.federation, task, answers)
    assert notes == ()
    return found


def routers(hand: Hand, data: Sequence[Any]) -> dict[str, Router]:
    router = Router.of(hand.algorithm.at(6), hand.last.server, hand.last.states)
    return {
        "refitted": router.refitted(data, tolerance=1e-4),
        "moment": router.from_moments(data),
    }


def test_refits_are_fitted_on_training_images_and_scored_on_the_others() -> None:
    hand = played("feddrm")
    found = refitted(hand, hand.task)
    leaked = routers(hand, [client_data(t.x, t.y, i) for i, t in enumerate(hand.task.tests)])
    for name, router in routers(hand, hand.task.clients).items():
        z = router.logits(hand.task.test.x).double().numpy()
        chosen = z.argmax(1)
        assert found[f"{name}_accuracy"] == pytest.approx(hand.right(hand.sent(chosen)))
        assert found[f"{name}_router_accuracy"] == pytest.approx(np.mean(chosen == hand.origin))
        assert found[f"{name}_ece"] == pytest.approx(by_hand_ece(softmax(z), hand.origin))
        other = leaked[name].logits(hand.task.test.x).double().numpy()
        assert abs(by_hand_ece(softmax(other), hand.origin) - found[f"{name}_ece"]) > 1e-3
        assert abs(found[f"{name}_router_accuracy"] - hand.metrics()["router_accuracy"]) > 1e-3
    assert abs(found["refitted_router_accuracy"] - found["moment_router_accuracy"]) > 1e-3


def changed(task: Task, change: Any) -> Task:
    tests = tuple(change(t) for t in task.tests)
    return replace(task, tests=tests, test=joined(tests))


def test_test_examples_never_reach_a_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other test images and labels: the same layers, bit for bit, and other accuracies."""
    hand, heads = played("feddrm"), list[Any]()
    for name in ("refitted", "from_moments"):
        plain = getattr(Router, name)

        def kept(*args: Any, plain: Any = plain, **more: Any) -> Router:
            made: Router = plain(*args, **more)
            heads.append(made.head)
            return made

        monkeypatch.setattr(Router, name, kept)
    found = refitted(hand, hand.task)
    other = changed(hand.task, lambda t: Examples(-t.x, (t.y + 1) % CLASSES))
    moved = refitted(hand, other)
    assert len(heads) == 4
    for a, b in zip(heads[:2], heads[2:], strict=True):
        assert torch.equal(a.gamma, b.gamma)
        assert torch.equal(a.xi, b.xi)
    assert all(moved[k] != found[k] for k in found)
    labels = changed(hand.task, lambda t: Examples(t.x, (t.y + 1) % CLASSES))
    relabelled = refitted(hand, labels)
    same = {k for k in found if relabelled[k] == found[k]}
    assert same == set(found) - {"refitted_accuracy", "moment_accuracy"}


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


def test_nobody_is_tested_on_what_somebody_trains_on() -> None:
    task = prepared("fedper", "none").task
    trained = {x.numpy().tobytes() for c in task.clients for x in c.x}
    parts = [t.x for t in (*task.tests, *task.validation)]
    assert not any(x.numpy().tobytes() in trained for part in parts for x in part)
    assert torch.equal(task.test.x, torch.cat([t.x for t in task.tests]))
    assert len(trained) + sum(map(len, parts)) == 700
