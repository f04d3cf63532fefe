"""Generated worlds whose densities p and q_i are known: examples weighed by the true ratio.

Three clients of one size; p is the mean of their densities, labels follow one P(y | x), and test
examples follow p. With three clients alike, log p(x) - log q_i(x) has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift import datasets
from fedshift.datasets import Dataset, OwnClients, Samples, Wanted, content_sha256
from fedshift.datasets.base import joined
from fedshift.seeds import numpy_generator
from fedshift.shifts.covariate import fashion_pool

CLASSES = ("0", "1")
CLIENTS, PER_CLIENT, N_TEST = 3, 4000, 6000
Floats = NDArray[np.float64]

TILT, BITS = 0.9, 8
# Factors of the tilt and of the Gaussians' means: client 1 stands between the two others.
PLACES = np.array([-1.0, 0.0, 1.0])
DISTANCE, INPUTS = 1.0, 4
LOOK_SHARE = 0.9


def log_ratios(log_q: Floats, client: int) -> Floats:
    """log p(x) - log q_i(x) [n] for log q [n, M] of clients of one size: p = sum_j q_j / M.

    >>> import numpy as np
    >>> from fedshift_papers.datasets.worlds import log_ratios
    >>> np.exp(log_ratios(np.log([[0.5, 0.1]]), 0)).round(3).tolist()
    [0.6]
    """
    log_p = np.logaddexp.reduce(log_q, axis=1) - math.log(log_q.shape[1])
    return np.asarray(log_p - log_q[:, client])


def tilted_bits(x: Floats) -> Floats:
    """log q_i(x) [n, 3] of x [n, 8] in {-1, 1}, q_i ~ exp(t_i sum_d x_d / 2), t = (-0.9, 0, 0.9).

    So each bit is 1 with probability 1 / (1 + exp(-t_i)).
    """
    tilts = TILT * PLACES / 2
    return np.asarray(x.sum(1)[:, None] * tilts - x.shape[1] * np.log(2 * np.cosh(tilts)))


def shifted_gaussians(x: Floats) -> Floats:
    """log q_i(x) [n, 3] of x [n, 4] ~ N(m_i 1, I), m = (-1/2, 0, 1/2): two clients 2 apart."""
    means = DISTANCE * PLACES / 2
    away = ((x[:, :, None] - means) ** 2).sum(1)
    return np.asarray(-away / 2 - x.shape[1] * math.log(2 * math.pi) / 2)


def _bits(client: int, n: int, rng: np.random.Generator) -> Floats:
    on = rng.random((n, BITS)) < 1 / (1 + math.exp(-TILT * PLACES[client]))
    return np.where(on, 1.0, -1.0)


def _vectors(client: int, n: int, rng: np.random.Generator) -> Floats:
    return np.asarray(rng.standard_normal((n, INPUTS)) + DISTANCE * PLACES[client] / 2)


def _labels(x: Floats, seed: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """y ~ Bernoulli(1 / (1 + exp(-f(x)))), f = b x + (s^2 - 1) / 2, s = sum_d x_d / sqrt(D).

    b ~ N(0, 1/4) by seed. No linear classifier is right about the square: its best one depends on
    where the inputs are, which is what weights of examples can mend.
    """
    slopes = numpy_generator(seed, "world", "slopes").standard_normal(x.shape[1]) / 2
    s = x.sum(1) / math.sqrt(x.shape[1])
    f = x @ slopes + (s**2 - 1) / 2
    return np.asarray(rng.random(len(x)) < 1 / (1 + np.exp(-f))).astype(np.int64)


def _world(
    name: str, seed: int, draw: Callable[[int, int, np.random.Generator], Floats],
    log_q: Callable[[Floats], Floats],
) -> OwnClients:  # fmt: skip
    def samples(client: int, n: int, part: str) -> Samples:
        rng = numpy_generator(seed, name, part, client)
        x = draw(client, n, rng)
        y = _labels(x, seed, rng)
        return Samples(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y))

    clients = [samples(i, PER_CLIENT, "client") for i in range(CLIENTS)]
    test = joined([samples(i, N_TEST // CLIENTS, "test") for i in range(CLIENTS)])
    ratios = [log_ratios(log_q(c.x.double().numpy()), i) for i, c in enumerate(clients)]
    return _own(name, clients, test, CLASSES, np.concatenate(ratios))


def _own(
    name: str, clients: list[Samples], test: Samples, classes: tuple[str, ...], ratios: Floats,
    licence: str = "generated",
) -> OwnClients:  # fmt: skip
    train = joined(clients)
    digest = content_sha256(train, test)
    data = Dataset(name, train, test, classes, digest, "generated", licence)
    parts = np.split(np.arange(len(train)), np.cumsum([len(c) for c in clients])[:-1])
    target = np.bincount(test.y.numpy(), minlength=len(classes)) / len(test)
    return OwnClients(data, parts, target, None, np.arange(len(test)), ratios)


def binary_world(wanted: Wanted) -> OwnClients:
    """Three clients of 4,000 examples of eight bits, tilted towards -1, not at all, towards 1."""
    return _world("binary-world", wanted.seed, _bits, tilted_bits)


def gaussian_world(wanted: Wanted) -> OwnClients:
    """Three clients of 4,000 examples of four numbers, Gaussian around three points in line."""
    return _world("gaussian-world", wanted.seed, _vectors, shifted_gaussians)


def looks_world(wanted: Wanted) -> OwnClients:
    """Small grey clothes in three looks, of which client i has look i for 90 % and others for 5 %.

    Images of the set that ships, at 14 x 14 pixels, dealt at random; test images have each look
    equally often. An image shows its look, so p(x) / q_i(x) is the ratio of the looks' shares,
    1/3 to 0.9 or 0.05.
    """
    base = datasets.load("fashion-mnist-mini")
    rng = numpy_generator(wanted.seed, "looks-world")
    shares = np.full((CLIENTS, CLIENTS), (1 - LOOK_SHARE) / (CLIENTS - 1))
    np.fill_diagonal(shares, LOOK_SHARE)
    clients, ratios = [], []
    for i, rows in enumerate(np.array_split(rng.permutation(len(base.train)), CLIENTS)):
        looks = rng.choice(CLIENTS, len(rows), p=shares[i])
        clients.append(_in_looks(base.train.take(torch.from_numpy(rows)), looks))
        ratios.append(np.log(shares.mean(0)[looks]) - np.log(shares[i][looks]))
    test = _in_looks(base.test, rng.integers(CLIENTS, size=len(base.test)))
    return _own("looks-world", clients, test, base.classes, np.concatenate(ratios), base.licence)


def _in_looks(images: Samples, looks: NDArray[np.int64]) -> Samples:
    """The images at half their size, each in its look of `fashion_pool`."""
    small = torch.nn.functional.avg_pool2d(images.x.float() / 255, 2)
    pool, x = fashion_pool(), torch.empty_like(small)
    for look in range(CLIENTS):
        rows = torch.from_numpy(looks == look)
        x[rows] = pool[look](small[rows])
    return Samples((255 * x).round().to(torch.uint8), images.y)


def examples(make: Callable[[Wanted], OwnClients]) -> Callable[[], tuple[Samples, Samples]]:
    """(all clients' examples of seed 0, test examples) of a world."""

    def drawn() -> tuple[Samples, Samples]:
        data = make(Wanted(CLIENTS, 0)).data
        return data.train, data.test

    return drawn
