"""Prior correction: closed forms, another solver, sums that pool, and a control that must lose."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import add

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax

from fedshift.errors import InputError
from fedshift.server.prior import (
    RIDGE,
    Calibrator,
    calibrate,
    calibrated_shift,
    calibration_sums,
    prior_shift,
)

Floats = np.ndarray


def blobs(shares: Floats, n: int, seed: int) -> tuple[Floats, Floats]:
    """(x [n, 2], y [n]): three Gaussians of unit variance, with these shares."""
    draw = np.random.default_rng(seed)
    y = draw.choice(3, n, p=shares)
    centres = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    return centres[y] + draw.standard_normal((n, 2)), y


def log_likelihoods(x: Floats) -> Floats:
    centres = np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    return -0.5 * ((x[:, None] - centres) ** 2).sum(2)


def fitted(z: Floats, y: Floats) -> Calibrator:
    return calibrate(partial(calibration_sums, z, y), z.shape[1])


def test_a_target_like_training_changes_nothing() -> None:
    p = np.array([0.5, 0.2, 0.3])
    assert prior_shift(p, p).bias.tolist() == [0.0, 0.0, 0.0]
    assert prior_shift(p, p).scale == 1.0
    z = np.random.default_rng(0).standard_normal((50, 3))
    assert (prior_shift(p, p).of(z) == z).all()


def test_the_threshold_of_two_gaussians() -> None:
    """x ~ N(+-1, 1): the corrected boundary is the Bayes rule's, x = log(T_0 / T_1) / 2."""
    p, T = np.array([0.7, 0.3]), np.array([0.1, 0.9])
    correction = prior_shift(T, p)

    def margin(x: float) -> float:
        z = np.array([-0.5 * (x + 1) ** 2, -0.5 * (x - 1) ** 2]) + np.log(p)
        return float(np.diff(correction.of(z))[0])

    closed = 0.5 * math.log(T[0] / T[1])
    assert abs(margin(closed)) < 1e-9
    assert margin(closed - 1e-6) < 0 < margin(closed + 1e-6)


def test_a_label_that_was_hardly_trained_is_not_promoted() -> None:
    correction = prior_shift([0.25, 0.75, 0.0], [0.6, 0.0005, 0.3995])
    assert correction.correctable.tolist() == [True, False, True]
    assert correction.bias[1] == math.log(0.75)  # and not log(0.75 / 0.0005)
    assert correction.bias[2] < -25  # the target never has it


def test_newton_by_sums_is_lbfgs_on_pooled_logits() -> None:
    x, y = blobs(np.array([0.6, 0.3, 0.1]), 900, seed=1)
    z = 3.0 * log_likelihoods(x) + np.array([0.4, -1.0, 0.2])  # over-confident, wrong prior

    def loss(at: Floats) -> tuple[float, Floats]:
        logs = log_softmax(at[0] * z + at[1:], axis=1)
        away, off = at - np.array([1.0, 0.0, 0.0, 0.0]), np.exp(logs) - np.eye(3)[y]
        slope = np.concatenate([[(off * z).sum()], off.sum(0)]) + RIDGE * away
        return float(-logs[np.arange(len(y)), y].sum() + 0.5 * RIDGE * away @ away), slope

    # The ridge alone settles a constant in the bias: without tight stops L-BFGS is not there yet.
    limits = {"ftol": 1e-18, "gtol": 1e-9, "maxiter": 10_000, "maxcor": 20}
    start = np.array([1.0, 0, 0, 0])
    other = minimize(loss, start, jac=True, method="L-BFGS-B", options=limits)
    here = fitted(z, y)
    ours = np.concatenate([[here.scale], here.bias])
    assert loss(ours)[0] <= other.fun + 1e-9
    assert np.abs(ours - other.x).max() < 1e-6
    logs = log_softmax(here.scale * z + here.bias, axis=1)
    assert np.exp(logs).mean(0) == pytest.approx(here.prior, abs=1e-12)
    assert here.prior == pytest.approx(np.bincount(y) / len(y), abs=1e-5)


def test_gradient_and_hessian_are_those_of_the_loss() -> None:
    x, y = blobs(np.array([0.2, 0.5, 0.3]), 40, seed=2)
    z, at, h = log_likelihoods(x), np.array([0.7, 0.1, -0.3, 0.2]), 1e-5
    here = calibration_sums(z, y, at[0], at[1:])
    for i in range(4):
        step = h * np.eye(4)[i]
        up, down = (calibration_sums(z, y, v[0], v[1:]) for v in (at + step, at - step))
        assert (up.loss - down.loss) / (2 * h) == pytest.approx(here.gradient[i], abs=1e-6)
        assert (up.gradient - down.gradient) / (2 * h) == pytest.approx(here.hessian[i], abs=1e-6)


@pytest.mark.parametrize("clients", [2, 5, 40])
def test_sums_pool_over_any_split(clients: int) -> None:
    x, y = blobs(np.array([0.2, 0.5, 0.3]), 300, seed=3)
    z = 2.0 * log_likelihoods(x)
    rows = np.array_split(np.random.default_rng(0).permutation(300), clients)

    def ask(scale: float, bias: Floats):  # type: ignore[no-untyped-def]
        return reduce(add, (calibration_sums(z[r], y[r], scale, bias) for r in rows))

    apart, pooled = calibrate(ask, 3), fitted(z, y)
    assert apart.scale == pytest.approx(pooled.scale, abs=1e-9)
    assert apart.bias == pytest.approx(pooled.bias, abs=1e-9)
    assert apart.counts.tolist() == pooled.counts.tolist()


def accuracy(z: Floats, y: Floats) -> float:
    return float((z.argmax(1) == y).mean())


def test_correction_gains_and_a_permuted_target_loses() -> None:
    p, T = np.array([0.8, 0.1, 0.1]), np.array([0.05, 0.05, 0.9])
    x, y = blobs(T, 20_000, seed=4)
    z = log_likelihoods(x) + np.log(p)
    plain = accuracy(z, y)
    bayes = accuracy(log_likelihoods(x) + np.log(T), y)
    assert accuracy(prior_shift(T, p).of(z), y) == bayes
    assert bayes > plain + 0.2
    # The control: the same correction for another target.
    assert accuracy(prior_shift(np.roll(T, 1), p).of(z), y) < plain

    held_x, held_y = blobs(p, 3000, seed=5)
    # Logits that are thrice too sharp, and of another prior than they were trained on.
    wrong = 3.0 * (log_likelihoods(x) + np.log([0.2, 0.3, 0.5]))
    on = 3.0 * (log_likelihoods(held_x) + np.log([0.2, 0.3, 0.5]))
    calibrated = calibrated_shift(fitted(on, held_y), T)
    assert accuracy(calibrated.of(wrong), y) > bayes - 0.005
    assert accuracy(calibrated.of(wrong), y) > accuracy(prior_shift(T, p).of(wrong), y) + 0.005


def test_odd_validation_examples() -> None:
    x, y = blobs(np.array([0.5, 0.5, 0.0]), 200, seed=6)
    z = log_likelihoods(x)
    without = fitted(z, y)
    correction = calibrated_shift(without, [0.3, 0.3, 0.4])
    assert correction.correctable.tolist() == [True, True, False]
    assert correction.bias[2] == math.log(0.4)
    perfect = fitted(10.0 * np.eye(3)[y], y)  # all right: the scale could grow for ever
    assert 0 < perfect.scale < 100
    backwards = fitted(-z, y)  # the logits point the wrong way: only the shares count
    assert backwards.scale == 0.0
    assert backwards.prior == pytest.approx(np.bincount(y, minlength=3) / 200, abs=1e-4)
    # Large logits, often wrong: a model that trained for too long. The scale brings them down.
    loud = 300.0 * (np.eye(3)[y] + np.random.default_rng(6).normal(size=z.shape))
    large, small = fitted(loud, y), fitted(loud / 300.0, y)
    assert large.scale * 300.0 == pytest.approx(small.scale, rel=1e-3)
    assert large.bias == pytest.approx(small.bias, abs=1e-3)
    with pytest.raises(InputError, match="no client has validation examples"):
        fitted(z[:0], y[:0])
