"""FedJAX: `fedjax.algorithms.fed_avg` on an in-memory federation, jitted on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import fedjax
import jax
import jax.numpy as jnp
import torch
from fedjax.algorithms import fed_avg
from plain import CLASSES, RATE, Client, Workload, compare


def network(name: str) -> tuple[dict[str, Any], Any]:
    """First parameters and a function (params, x [B, 28, 28, 1]) -> logits."""
    keys = iter(jax.random.split(jax.random.PRNGKey(0), 8))

    def dense(a: int, b: int) -> tuple[Any, Any]:
        return jax.random.normal(next(keys), (a, b)) / a**0.5, jnp.zeros(b)

    def kernel(a: int, b: int) -> tuple[Any, Any]:
        return jax.random.normal(next(keys), (5, 5, a, b)) / (25 * a) ** 0.5, jnp.zeros(b)

    def conv(p: tuple[Any, Any], x: Any) -> Any:
        out = jax.lax.conv_general_dilated(
            x, p[0], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.lax.reduce_window(
            jax.nn.relu(out + p[1]), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    def layer(p: tuple[Any, Any], x: Any) -> Any:
        return x @ p[0] + p[1]

    if name == "W1":
        params = {"a": kernel(1, 32), "b": kernel(32, 64), "c": dense(1024, 512),
                  "d": dense(512, CLASSES)}  # fmt: skip
        return params, lambda p, x: layer(
            p["d"], jax.nn.relu(layer(p["c"], conv(p["b"], conv(p["a"], x)).reshape(len(x), -1)))
        )
    if name == "W2":
        params = {"c": dense(784, 200), "d": dense(200, CLASSES)}
        return params, lambda p, x: layer(p["d"], jax.nn.relu(layer(p["c"], x.reshape(len(x), -1))))
    return {"d": dense(784, CLASSES)}, lambda p, x: layer(p["d"], x.reshape(len(x), -1))


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
    held = [
        fedjax.ClientDataset({"x": x.permute(0, 2, 3, 1).numpy(), "y": y.to(torch.int32).numpy()})
        for x, y in clients
    ]
    state = method.init(params)
    for t in range(rounds):
        ids = [(t * work.asked + i) % work.clients for i in range(work.asked)]
        seeds = jax.random.split(jax.random.PRNGKey(t), len(ids))
        chosen = [(str(i).encode(), held[i], key) for i, key in zip(ids, seeds, strict=True)]
        state, _ = method.apply(state, chosen)
        jax.block_until_ready(state.params)
        tick()


if __name__ == "__main__":
    compare("FedJAX", "fedjax", play)
