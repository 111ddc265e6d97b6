"""Time of one round of federated averaging written in plain JAX: `vmap` over the clients, `scan` over the batches.

Run by an interpreter that has JAX: `python jax_vmap.py FOLDER`. The folder holds the work (`spec.json`, `images.npy`,
`labels.npy`, `weight0.npy`, `bias0.npy`, …); every line on stdin asks for one round, answered by one JSON line.
The one compiled function is a whole round; it is compiled before "ready". Drawing the orders is part of the round.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Parameters = list[tuple[jax.Array, jax.Array]]


def cross_entropy(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of each sample."""
    hidden = images
    for weight, bias in parameters[:-1]:
        hidden = jax.nn.relu(hidden @ weight.T + bias)
    weight, bias = parameters[-1]
    scores = jax.nn.log_softmax(hidden @ weight.T + bias)
    return -jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0]


def mean_loss(parameters: Parameters, images: jax.Array, labels: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the mean over the samples that count; `counts` is 0 for the padding of a short batch and 1 otherwise."""
    return (cross_entropy(parameters, images, labels) * counts).sum() / counts.sum()


def train(
    learning_rate: float, parameters: Parameters, images: jax.Array, labels: jax.Array, order: jax.Array
) -> Parameters:
    """Run one epoch of SGD of one client; row b of `order` are the samples of batch b, -1 where it is short."""

    def step(parameters: Parameters, batch: jax.Array) -> tuple[Parameters, None]:
        counts = (batch >= 0).astype(images.dtype)
        gradient = jax.grad(mean_loss)(parameters, images[batch], labels[batch], counts)
        return jax.tree.map(lambda value, slope: value - learning_rate * slope, parameters, gradient), None

    return jax.lax.scan(step, parameters, order)[0]


@partial(jax.jit, static_argnums=0)
def one_round(
    learning_rate: float, parameters: Parameters, images: jax.Array, labels: jax.Array, orders: jax.Array
) -> Parameters:
    """Train all clients from the same parameters; return the mean of what they come to."""
    trained = jax.vmap(partial(train, learning_rate), in_axes=(None, 0, 0, 0))(parameters, images, labels, orders)
    return jax.tree.map(lambda values: values.mean(axis=0), trained)


def draw(generator: np.random.Generator, clients: int, samples: int, batch_size: int) -> np.ndarray[Any, Any]:
    """Return a new order of the samples of every client: clients × batches × batch size, filled up with -1."""
    orders = np.tile(np.arange(samples, dtype=np.int32), (clients, 1))
    generator.permuted(orders, axis=1, out=orders)
    padded = np.pad(orders, ((0, 0), (0, -samples % batch_size)), constant_values=-1)
    return padded.reshape(clients, -1, batch_size)


def main() -> None:
    """Answer every line on stdin with one round."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers goes to the caller

    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    clients, samples, rate = spec["clients"], spec["samples"], spec["learning_rate"]
    images = jnp.asarray(np.load(folder / "images.npy")).reshape(clients, samples, -1)
    labels = jnp.asarray(np.load(folder / "labels.npy").astype(np.int32)).reshape(clients, samples)
    parameters: Parameters = [
        (jnp.asarray(np.load(folder / f"weight{i}.npy")), jnp.asarray(np.load(folder / f"bias{i}.npy")))
        for i in range(spec["layers"])
    ]
    generator = np.random.default_rng()
    test = images.reshape(clients * samples, -1)[:2000], labels.reshape(-1)[:2000]

    # Compile and run once; the result is thrown away.
    orders = draw(generator, clients, samples, spec["batch_size"])
    jax.block_until_ready(one_round(rate, parameters, images, labels, orders))
    answers.write(json.dumps({"ready": True, "name": "jax", "version": jax.__version__}) + "\n")

    for _ in sys.stdin:
        start = time.perf_counter()
        orders = draw(generator, clients, samples, spec["batch_size"])
        parameters = jax.block_until_ready(one_round(rate, parameters, images, labels, orders))
        seconds = time.perf_counter() - start
        loss = float(cross_entropy(parameters, *test).mean())
        answers.write(json.dumps({"seconds": seconds, "loss": loss}) + "\n")


if __name__ == "__main__":
    main()
