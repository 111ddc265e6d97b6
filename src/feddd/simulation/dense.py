"""A quicker trainer for chains of linear layers: forward, backward and update written out, without autograd.

On small layers the bookkeeping of autograd costs more than the arithmetic. The results agree with the reference
trainer up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from feddd.core.units import Params
from feddd.simulation.training import Trained, Training, batches


def dense_chain(model: nn.Module) -> list[str] | None:
    """The names of the linear layers if the model is [flatten,] linear, ReLU, linear, …, linear; else None."""
    if not isinstance(model, nn.Sequential):
        return None
    children = list(model.named_children())
    if children and isinstance(children[0][1], nn.Flatten):
        children = children[1:]
    kinds = [type(child) for _, child in children]
    expected: list[type[nn.Module]] = [nn.Linear, nn.ReLU] * (len(kinds) // 2) + [nn.Linear]
    linears = [(name, child) for name, child in children if isinstance(child, nn.Linear)]
    if kinds != expected or any(child.bias is None for _, child in linears):
        return None
    return [name for name, _ in linears]


@torch.no_grad()
def train_dense(
    layers: Sequence[str],
    before: Params,
    images: Tensor,
    labels: Tensor,
    training: Training,
    rng: np.random.Generator,
) -> Trained:
    """The same as `training.train` for a dense chain; the same batches from the same generator."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    weights = [after[f"{layer}.weight"] for layer in layers]
    biases = [after[f"{layer}.bias"] for layer in layers]
    flat = images.flatten(1)
    rng.integers(2**63)  # the reference trainer seeds stochastic layers with it; keep both in step
    sample_losses = []
    for index in batches(len(labels), training, rng):
        chosen = torch.from_numpy(index)
        sample_losses.append(_step(weights, biases, flat[chosen], labels[chosen], training.learning_rate))
    all_losses = torch.cat(sample_losses).double()
    return Trained(after, float(all_losses.mean()), float(all_losses.square().mean().sqrt()))


def _step(
    weights: Sequence[Tensor], biases: Sequence[Tensor], inputs: Tensor, labels: Tensor, learning_rate: float
) -> Tensor:
    """One SGD step on the mean cross-entropy, in place; returns the sample losses."""
    activations = [inputs]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        activations.append(torch.addmm(bias, activations[-1], weight.t()).relu_())
    logits = torch.addmm(biases[-1], activations[-1], weights[-1].t())
    log_probabilities = torch.log_softmax(logits, 1)
    picked = labels.unsqueeze(1)
    losses = -log_probabilities.gather(1, picked).squeeze(1)
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, picked, torch.full_like(picked, -1.0, dtype=gradient.dtype))
    step = -learning_rate / len(labels)
    for layer in range(len(weights) - 1, -1, -1):
        here = activations[layer]
        below = gradient @ weights[layer] if layer else None
        weights[layer].addmm_(gradient.t(), here, alpha=step)
        biases[layer].add_(gradient.sum(0), alpha=step)
        if below is not None:
            gradient = below.mul_(here > 0)
    return losses
