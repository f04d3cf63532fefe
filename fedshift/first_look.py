"""A network's first passes, before training: what they reveal about it."""

from __future__ import annotations

import torch
from torch import Tensor

from fedshift.errors import InputError
from fedshift.kernels.passes import check_own
from fedshift.model import Model
from fedshift.randomness import one_at_a_time
from fedshift.repeating import watched
from fedshift.tree import Params


class UntriedError(InputError):
    """A network failed in training mode on the examples of its trial."""


def look(model: Model, params: Params, buffers: Params, x: Tensor) -> None:
    """Find the generators from which the network draws, by passes on x [n, ...], n > 1.

    Draws that these passes do not make are found later (`fedshift.repeating`). Raises InputError
    for a network that fails in training mode, for one whose outputs no gradient leads back from,
    and for one whose passes differ though tensors and seed are the same.
    """
    moving = {k: v.detach().requires_grad_() for k, v in model.trainable(params).items()}
    try:
        with watched():
            before = _evaluate(model, params, buffers, x)
            # Seed 0 twice must agree; seed 1 shows whether the network draws.
            first, second, other = (
                _tensors(model.train(params | moving, buffers, x, seed)[0]) for seed in (0, 0, 1)
            )
            after = _evaluate(model, params, buffers, x)
    except Exception as e:
        raise UntriedError(
            f"the model fails in training mode on inputs {x.dtype} {tuple(x.shape)}: {e}"
        ) from e
    if moving and first and not any(v.requires_grad for v in first.values()):
        raise InputError(
            "the network's outputs are cut off from its parameters (detach(), no_grad(), numpy "
            "or argmax in its forward): no gradient reaches them, and nothing would be learned"
        )
    if moving:
        with one_at_a_time():
            check_own(model.net, first.values(), moving.values())
    _check_stateless(first, second, "two passes of the network in training")
    _check_stateless(before, after, "the network's passes in evaluation before and after training")
    # It seems to draw nothing, yet passes from different generator states differ.
    if model.draws_nothing() and (name := _first_difference(first, other)):
        raise InputError(
            f'the network\'s "{name}" in training depends on the state of a global generator that '
            "it puts back after drawing (torch.random.fork_rng, set_state), where no seed of the "
            "run reaches; draw from it as it is, or from a torch.Generator that is an attribute of "
            "the network"
        )


def _evaluate(model: Model, params: Params, buffers: Params, x: Tensor) -> Params:
    with torch.no_grad():
        return _tensors(model(params, {k: v.clone() for k, v in buffers.items()}, x))


def _tensors(outputs: Params) -> Params:
    return {name: v for name, v in outputs.items() if isinstance(v, Tensor)}


def _check_stateless(one: Params, other: Params, which: str) -> None:
    if name := _first_difference(one, other):
        raise InputError(
            f'{which} give other "{name}", though parameters, buffers and seed are the same: '
            "it keeps a state of its own, or draws random numbers from a generator that no "
            "seed reaches, such as numpy's default_rng; keep such a state in buffers "
            "(register_buffer), and use torch's functions without a generator, or a "
            "torch.Generator that is an attribute of the network"
        )


def _first_difference(one: Params, other: Params) -> str:
    """The name of the first output that differs; empty where none does."""
    differing = (name for name, v in one.items() if name not in other or not _alike(v, other[name]))
    return next(differing, "")


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN; on a GPU, up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() and a.device.type != "cpu":
        return torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1e-6, equal_nan=True)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
