"""How much clients' gradients of FedDRM's two heads differ, on one random embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedshift import datasets
from fedshift.experiments.config.schema import Data
from fedshift.experiments.config.shift import Split
from fedshift.experiments.task.client_tests import deal_to_clients
from fedshift.experiments.task.feature_shift import looks
from fedshift.seeds import Seeds, numpy_generator
from fedshift_papers.pictures.clients import as_images

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Chosen: neither the embedding's width nor the local steps of this figure are known to us.
WIDTH, STEPS, BATCH, RATE = 128, 10, 128, 0.5
HEADS = ("class", "client")


@dataclass(frozen=True)
class Embedded:
    """One client: features f [n, d + 1], whose last column is 1, classes y [n], its own number."""

    f: Floats
    y: Ints
    client: int


def embed(
    images: Sequence[Floats], labels: Sequence[Ints], seed: int, width: int = WIDTH
) -> list[Embedded]:
    """f(x) = (relu(W x), 1) with W_kl ~ N(0, 2 / D) fixed, of each client's inputs [n, D].

    Inputs are centred by the mean of all clients' and divided by their deviation; f is scaled so
    that the mean of its squared norm, without the 1, is 1 over all clients.
    """
    flat = np.concatenate(images)
    scale = flat.std() or 1.0
    rng = numpy_generator(seed, "embedding")
    w = rng.normal(0.0, math.sqrt(2 / flat.shape[1]), (flat.shape[1], width))
    hidden = [np.maximum(((x - flat.mean()) / scale) @ w, 0.0) for x in images]
    size = math.sqrt((np.concatenate(hidden) ** 2).sum(1).mean()) or 1.0
    return [
        Embedded(np.hstack([h / size, np.ones((len(h), 1))]), y, i)
        for i, (h, y) in enumerate(zip(hidden, labels, strict=True))
    ]


def gradient(head: Floats, f: Floats, labels: Ints) -> Floats:
    """The gradient of the mean cross-entropy: G = f^T (softmax(f H) - onehot) / n, [d + 1, K]."""
    z = f @ head
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(f)), labels] -= 1.0
    return np.asarray(f.T @ p / len(f))


class Spread(NamedTuple):
    """How much clients' gradients g_i differ; their weights are w_i, and g = sum_i w_i g_i.

    drift   sum_i w_i ||g_i - g||^2
    share   drift / sum_i w_i ||g_i||^2, in [0, 1]: 0 where all agree, 1 where they cancel
    cosine  the mean over pairs of clients of the cosine between their gradients
    """

    drift: float
    share: float
    cosine: float


def spread(gradients: Sequence[Floats], weights: Floats) -> Spread:
    """The `Spread` of these gradients; share and cosine are NaN if all gradients are zero."""
    flat = np.stack([g.ravel() for g in gradients])
    apart = float(weights @ ((flat - weights @ flat) ** 2).sum(1))
    norms = np.linalg.norm(flat, axis=1)
    total = float(weights @ norms**2)
    pairs = np.triu_indices(len(flat), 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (flat @ flat.T / np.outer(norms, norms))[pairs]
    return Spread(apart, apart / total if total else math.nan, float(cosines.mean()))


def train(
    clients: Sequence[Embedded], classes: int, rounds: int, seed: int
) -> dict[str, list[Spread]]:
    """FedAvg of both heads from zeros, and the spread of whole gradients before each round.

    Each round every client takes STEPS steps of SGD on BATCH of its examples, with rate RATE, for
    the head (alpha, beta) of the classes and the head (gamma, xi) of the clients; the server takes
    means by n_i / N. A client's label in the second is its number, the same for all its examples.
    """
    sizes = np.array([len(c.y) for c in clients], dtype=np.float64)
    weights = sizes / sizes.sum()
    wide = clients[0].f.shape[1]
    heads = {"class": np.zeros((wide, classes)), "client": np.zeros((wide, len(clients)))}
    spreads: dict[str, list[Spread]] = {name: [] for name in HEADS}
    for t in range(1, rounds + 1):
        for name, head in heads.items():
            whole = [gradient(head, c.f, _labels(c, name)) for c in clients]
            spreads[name].append(spread(whole, weights))
            local = [_steps(head, c, name, t, seed) for c in clients]
            heads[name] = sum((w * h for w, h in zip(weights, local, strict=True)), 0.0 * head)
    return spreads


def _labels(client: Embedded, head: str) -> Ints:
    return client.y if head == "class" else np.full(len(client.y), client.client, dtype=np.int64)


def _steps(head: Floats, client: Embedded, name: str, t: int, seed: int) -> Floats:
    # Both heads see the same batches.
    rng, labels = numpy_generator(seed, "heads", t, client.client), _labels(client, name)
    for _ in range(STEPS):
        rows = rng.permutation(len(labels))[:BATCH]
        head = head - RATE * gradient(head, client.f[rows], labels[rows])
    return head


def embedded_clients(
    data: Data, shift: Split, seeds: Seeds
) -> tuple[list[Embedded], tuple[str, ...]]:
    """The training examples of an experiment's clients, and the names of the classes."""
    dealt = deal_to_clients(data, shift, seeds.split)
    changes = looks(shift, len(dealt.parts), seeds.split)
    x, y = dealt.data.train.x, dealt.data.train.y.numpy()
    inputs = []
    for i, rows in enumerate(dealt.parts):
        images = as_images(x[rows])
        images = changes[i](images) if changes else images
        inputs.append(images.flatten(1).double().numpy())
    labels = [y[rows] for rows in dealt.parts]
    return embed(inputs, labels, seeds.init), datasets.entry(data.name).classes
