"""FedJAX: `fedjax.algorithms.fed_avg` on an in-memory federation, jitted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import torch
from fedjax.algorithms import fed_avg
from plain import BLOCKS, CLASSES, RATE, Client, Workload, compare

Keys = Iterator[Any]
Forward = Callable[[Any, Any], Any]


def network(name: str) -> tuple[Any, Forward]:
    """First parameters and a function (params, x [B, h, w, channels]) -> logits."""
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 64))
    if name == "W4":
        return resnet(keys)
    if name == "W1":
        params = {"a": kernel(keys, 5, 1, 32), "b": kernel(keys, 5, 32, 64),
                  "c": dense(keys, 1024, 512), "d": dense(keys, 512, CLASSES)}  # fmt: skip
        return params, lambda p, x: layer(
            p["d"],
            jax.nn.relu(layer(p["c"], pooled(p["b"], pooled(p["a"], x)).reshape(len(x), -1))),
        )
    if name == "W2":
        params = {"c": dense(keys, 784, 200), "d": dense(keys, 200, CLASSES)}
        return params, lambda p, x: layer(p["d"], jax.nn.relu(layer(p["c"], x.reshape(len(x), -1))))
    return {"d": dense(keys, 784, CLASSES)}, lambda p, x: layer(p["d"], x.reshape(len(x), -1))


def dense(keys: Keys, a: int, b: int) -> tuple[Any, Any]:
    """Weights and shifts of a linear layer."""
    return jax.random.normal(next(keys), (a, b)) / a**0.5, jnp.zeros(b)


def kernel(keys: Keys, side: int, a: int, b: int) -> tuple[Any, Any]:
    """Weights and shifts of a convolution."""
    return jax.random.normal(next(keys), (side, side, a, b)) / (side**2 * a) ** 0.5, jnp.zeros(b)


def layer(p: tuple[Any, Any], x: Any) -> Any:
    """A linear layer."""
    return x @ p[0] + p[1]


def convolved(weights: Any, x: Any, stride: int = 1, border: int = 0) -> Any:
    """A convolution without shifts."""
    return jax.lax.conv_general_dilated(
        x, weights, (stride, stride), ((border, border),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def pooled(p: tuple[Any, Any], x: Any) -> Any:
    """A convolution, a rectifier and a pool."""
    return jax.lax.reduce_window(
        jax.nn.relu(convolved(p[0], x) + p[1]), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1),
        "VALID",
    )  # fmt: skip


def normed(p: tuple[Any, Any, Any], x: Any, stride: int = 1) -> Any:
    """A convolution of weights p[0] and GroupNorm of 32 groups, scales p[1] and shifts p[2]."""
    y = convolved(p[0], x, stride, len(p[0]) // 2)
    groups = y.reshape(*y.shape[:3], 32, -1)
    centred = groups - groups.mean((1, 2, 4), keepdims=True)
    scaled = centred / jnp.sqrt((centred**2).mean((1, 2, 4), keepdims=True) + 1e-5)
    return scaled.reshape(y.shape) * p[1] + p[2]


def resnet(keys: Keys) -> tuple[Any, Forward]:
    """ResNet-18 for images of 32 x 32, as plain.py has it."""

    def first(side: int, a: int, b: int) -> tuple[Any, Any, Any]:
        return kernel(keys, side, a, b)[0], jnp.ones(b), jnp.zeros(b)

    blocks = [
        {"one": first(3, a, b), "two": first(3, b, b)}
        | ({} if a == b else {"skip": first(1, a, b)})
        for a, b, _ in BLOCKS
    ]

    def forward(p: Any, x: Any) -> Any:
        x = jax.nn.relu(normed(p["stem"], x))
        for block, (*_, stride) in zip(p["blocks"], BLOCKS, strict=True):
            inside = normed(block["two"], jax.nn.relu(normed(block["one"], x, stride)))
            x = jax.nn.relu(inside + (normed(block["skip"], x, stride) if "skip" in block else x))
        return layer(p["head"], x.mean((1, 2)))

    return {"stem": first(3, 3, 64), "blocks": blocks, "head": dense(keys, 512, CLASSES)}, forward


def play(work: Workload, clients: Sequence[Client], rounds: int, tick: Callable[[], None]) -> None:
    """Rounds, each until its last operation is finished."""
    params, apply = network(work.name)

    def loss(p: Any, batch: Any) -> Any:
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(apply(p, batch["x"])), batch["y"][:, None], 1
        )
        return -chosen.mean()

    method = fed_avg.federated_averaging(
        lambda p, batch, rng: jax.grad(loss)(p, batch),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_steps=work.local_steps),
    )
    datasets = [
        fedjax.ClientDataset({"x": x.permute(0, 2, 3, 1).numpy(), "y": y.to(torch.int32).numpy()})
        for x, y in clients
    ]
    state = method.init(params)
    for t in range(rounds):
        ids = [(t * work.asked + i) % work.clients for i in range(work.asked)]
        seeds = jax.random.split(jax.random.PRNGKey(t), len(ids))
        chosen = [(str(i).encode(), datasets[i], key) for i, key in zip(ids, seeds, strict=True)]
        state, _ = method.apply(state, chosen)
        jax.block_until_ready(state.params)
        tick()


if __name__ == "__main__":
    compare("FedJAX", "fedjax", play)
