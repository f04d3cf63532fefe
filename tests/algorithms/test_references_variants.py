"""FedPALS, SCAFFOLD and Ditto under label sets against plain loops; methods without a reference."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift import recipes
from fedshift.model import Model
from fedshift.recipes import Setting
from support.every_method import MAKE
from support.federations import CLASSES, TARGET
from support.references import (
    BODY,
    DECAY,
    HEAD,
    LOCAL,
    LR,
    Played,
    Tree,
    by_size,
    descend,
    entropy,
    entropy_over,
    federated,
    gradient,
    labels_of,
    less,
    off,
    plus,
    pulled,
    reference_setting,
    row_means,
    uniform,
)

EXACT, OTHER = 1e-12, 1e-5

# ------------------------------------------------------------------ FedPALS


def pals(lam: float) -> Any:
    """argmin ||T - S' a||^2 + lam sum_i a_i^2 / n_i: the best of all faces, each solved exactly."""

    def weigh(played: Played, ids: list[int]) -> list[float]:
        n = torch.tensor([played.n(i) for i in ids]).double()
        S = torch.tensor([played.counts(i) for i in ids]).double() / n[:, None]
        T = torch.tensor(TARGET, dtype=torch.float64)
        P, best = S @ S.T + lam * (1 / n).diag(), (float("inf"), [0.0])
        faces = chain.from_iterable(combinations(range(len(ids)), k + 1) for k in range(len(ids)))
        for face in map(list, faces):
            k = len(face)
            system = torch.zeros(k + 1, k + 1).double()
            system[:k, :k], system[k, :k], system[:k, k] = P[face][:, face], 1.0, 1.0
            right = torch.cat([(S @ T)[face], torch.ones(1).double()])
            a = torch.zeros(len(ids)).double()
            a[face] = torch.linalg.solve(system, right)[:k]
            if float(a.min()) >= 0:
                best = min(best, (float(a @ P @ a - 2 * a @ (S @ T)), a.tolist()))
        return best[1]

    return weigh


@pytest.mark.parametrize("lam", [0.5, 5.0])
def test_fedpals(lam: float) -> None:
    played = Played.of(recipes.fedpals(reference_setting(), lam=lam, mu=0.2))

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, pulled(theta, 0.2), played.batches(t, i))

    assert off(played.end, federated(played, client, pals(lam))) < EXACT
    assert off(played.end, federated(played, client, pals(1.2 * lam))) > OTHER


def test_moon_by_uniform_means() -> None:
    played = Played.of(recipes.moon_uniform(reference_setting(), mu=0.0))

    def client(t: int, i: int, theta: Tree, last: Tree) -> Tree:
        return descend(theta, entropy, played.batches(t, i))

    assert off(played.end, federated(played, client, uniform)) < EXACT
    assert off(played.end, federated(played, client)) > OTHER


# ------------------------------------------------------------------ label sets

STILL = replace(LOCAL, momentum=0.0)


def controlled(played: Played, mode: str, option: str, population: bool = True) -> Tree:
    """SCAFFOLD, whose controls and changes are averaged over the clients that hold a row."""
    everyone = list(range(len(played.federation.clients)))
    nothing = {k: torch.zeros_like(v) for k, v in played.start.items()}
    theta, c, controls = played.start, nothing, dict.fromkeys(everyone, nothing)
    for t, ids in played.cohorts:
        changes, news = [], {}
        for i in ids:
            loss = entropy_over(labels_of(played, i) if mode == "private" else list(range(CLASSES)))
            y, batches = theta, played.batches(t, i)
            for batch in batches:
                g = gradient(loss, y, *batch, y)
                y = {k: v - LR * (g[k] + DECAY * v + c[k] - controls[i][k]) for k, v in y.items()}
            changes.append(less(y, theta))
            if option == "II":
                news[i] = {
                    k: (theta[k] - y[k]) / (LR * len(batches)) - (c[k] - controls[i][k]) for k in y
                }
            else:
                full = gradient(loss, theta, *played.data(i), theta)
                news[i] = {k: full[k] + DECAY * v for k, v in theta.items()}
        public = mode == "public"
        a = [1 / len(ids)] * len(ids)
        theta = plus(theta, row_means(played, ids, a, changes, ids, public))
        moved = [less(news[i], controls[i]) for i in ids]
        by = everyone if population else ids
        p = [1 / len(by)] * len(ids)
        c = plus(c, row_means(played, ids, p, moved, by, public))
        controls |= news
    return theta


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["private", "public"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_row_by_row(mode: Any, option: Any) -> None:
    """In public mode it is SCAFFOLD itself."""
    recipe = recipes.labelset_scaffold(reference_setting(local=STILL), option=option, mode=mode)
    played = Played.of(recipe, rounds=4)
    assert off(played.end, controlled(played, mode, option)) < EXACT
    assert off(played.end, controlled(played, mode, option, population=False)) > OTHER
    other = "public" if mode == "private" else "private"
    assert off(played.end, controlled(played, other, option)) > OTHER
    if mode == "public":
        plain = Played.of(recipes.scaffold(reference_setting(local=STILL), option=option), rounds=4)
        assert off(plain.end, played.end) == 0


def test_ditto_of_label_sets() -> None:
    """A personal model of the body and the rows of a client's labels, pulled to those received."""
    played = Played.of(recipes.labelset_ditto(reference_setting(), lam=0.5))

    def personal(lam: float) -> dict[int, Tree]:
        theta, models = played.start, {}
        for t, ids in played.cohorts:
            changes = []
            for i in ids:
                labels, start = labels_of(played, i), models.get(i, played.start)
                rows = {k: labels if k in HEAD else slice(None) for k in theta}

                def loss(
                    p: Tree,
                    x: Tensor,
                    y: Tensor,
                    labels: Any = labels,
                    rows: Any = rows,
                    w: Tree = theta,
                ) -> Tensor:
                    gaps = [((p[k] - w[k])[rows[k]] ** 2).sum() for k in p]
                    return entropy_over(labels)(p, x, y) + lam / 2 * torch.stack(gaps).sum()

                models[i] = descend(start, loss, played.batches(t, i, "personal0"))
                changes.append(
                    less(descend(theta, entropy_over(labels), played.batches(t, i)), theta)
                )
            theta = plus(theta, row_means(played, ids, by_size(played, ids), changes, ids, False))
        return models

    def gap(models: dict[int, Tree]) -> float:
        states = played.rounds[-1].states
        assert states.keys() == models.keys()
        gaps = []
        for i, model in models.items():
            rows = {k: v if k in BODY else v[labels_of(played, i)] for k, v in model.items()}
            gaps.append(off(states[i]["personal"], rows))
        return max(gaps)

    assert gap(personal(0.5)) < EXACT
    assert gap(personal(0.4)) > OTHER


# ------------------------------------------------------------------ what has none

TESTS = Path(__file__).parents[1]
# Methods whose plain loops stand in other files.
ELSEWHERE = {
    "feddyn": "algorithms/test_feddyn_fednova.py::test_feddyn_by_hand",
    "fednova": "algorithms/test_feddyn_fednova.py::test_fednova_by_hand",
    "oracle": "algorithms/test_references.py::test_local_losses",  # FedAvg on other clients
}


Part = tuple[str, str, object]


def parts(value: Any) -> set[Part]:
    """What a method is made of: (class, field, class or choice that it has there)."""
    if isinstance(value, tuple):
        return {part for one in value for part in parts(one)}
    if not is_dataclass(value) or isinstance(value, Model | type):
        return set()
    made = set[Part]()
    for field in fields(value):
        there = getattr(value, field.name)
        several = there if isinstance(there, tuple) else (there,)
        for one in several:
            kind = one if isinstance(one, str | bool) else type(one).__name__
            made |= {(type(value).__name__, field.name, kind)} | parts(one)
    return made


def test_every_method_has_a_reference(setting: Setting) -> None:
    """A method of new parts brings its plain loops; one of parts that have theirs needs none."""
    texts = [path.read_text() for path in TESTS.glob("*/test_references*.py")]
    text = "".join(texts)

    def is_named(name: str) -> bool:
        return re.search(rf'recipes\.{name}\b|"{name}"', text) is not None

    checked, new = set[Part](), {}
    for row, make in MAKE.items():
        name = row.split()[0]
        if is_named(name) or name in ELSEWHERE:
            checked |= parts(make(setting))
        elif name in recipes.__all__:
            new[row] = make
    for name, make in new.items():
        assert not (odd := parts(make(setting)) - checked), f"{name} needs plain loops for {odd}"
    assert not parts(MAKE["fedprox + fedpals"](setting)) - checked
    unknown = {("FedAvg", "extras", "Another")}
    assert (parts(MAKE["scaffold"](setting)) | unknown) - checked == unknown
    for place in ELSEWHERE.values():
        path, _, name = place.partition("::")
        assert f"def {name}(" in (TESTS / path).read_text()
    assert not is_named("feddyn_of_another_" + "kind")
