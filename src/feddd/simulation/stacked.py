"""Several clients trained at once: their parameters stacked, one batched product or grouped convolution for all.

Small layers leave a core idle between operations; ten clients in one operation do not. A client with fewer batches
steps out when it is done, and a short last batch counts only its own samples, so that everybody gets the gradients
of training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from feddd.simulation.training import Start, Trained, Training, batches

Step = Callable[[Tensor, Sequence[Tensor], int], Tensor]


@dataclass(frozen=True)
class Chain:
    """A network as steps on stacked activations.

    Images of S clients go through as [batch, S · channels, height, width], features as [S, batch, features].
    names: the parameters in the order in which the steps take them, two each for `linear` or convolution
    """

    names: tuple[str, ...]
    steps: tuple[tuple[Step, int], ...]
    dense: bool

    def forward(self, inputs: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Logits [S, batch, classes] of inputs [S, batch, channels, height, width]."""
        clients = len(inputs)
        if not self.dense:
            inputs = inputs.transpose(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
        start = 0
        for step, count in self.steps:
            inputs = step(inputs, parameters[start : start + count], clients)
            start += count
        return inputs


def chain(model: nn.Module) -> Chain | None:
    """The model as a chain, if it is [convolutions,] flatten, linear layers with ReLU between; else None."""
    if not isinstance(model, nn.Sequential):
        return None
    names: list[str] = []
    steps: list[tuple[Step, int]] = []
    children = list(model.named_children())
    kinds = [type(layer) for _, layer in children]
    if nn.Flatten not in kinds or nn.Linear in kinds[: kinds.index(nn.Flatten)]:
        return None
    dense = not any(kind in (nn.Conv2d, nn.MaxPool2d) for kind in kinds)
    for name, layer in children:
        step = _step(layer, dense)
        if step is None:
            return None
        own = [f"{name}.weight", f"{name}.bias"] if isinstance(layer, nn.Linear | nn.Conv2d) else []
        names += own
        steps.append((step, len(own)))
    return Chain(tuple(names), tuple(steps), dense)


def _step(layer: nn.Module, dense: bool) -> Step | None:
    """What the layer does to a stack of clients; None for a layer that is not known here."""
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        return lambda x, p, _: torch.baddbmm(p[1].unsqueeze(1), x, p[0].transpose(1, 2))
    if isinstance(layer, nn.ReLU):
        return lambda x, _p, _s: functional.relu(x)
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return (
            (lambda x, _p, _s: x.flatten(2)) if dense else (lambda x, _p, s: x.reshape(len(x), s, -1).transpose(0, 1))
        )
    if isinstance(layer, nn.MaxPool2d) and layer.padding == 0 and layer.dilation == 1 and not layer.ceil_mode:
        return lambda x, _p, _s: functional.max_pool2d(x, layer.kernel_size, layer.stride)
    if isinstance(layer, nn.Conv2d) and layer.bias is not None and layer.groups == 1 and layer.padding_mode == "zeros":
        return lambda x, p, s: functional.conv2d(
            x,
            p[0].flatten(0, 1).contiguous(memory_format=torch.channels_last),
            p[1].flatten(),
            layer.stride,
            layer.padding,
            layer.dilation,
            s,
        )
    return None


def train_stacked(network: Chain, starts: Sequence[Start], training: Training) -> list[Trained]:
    """The same as training each client alone, up to rounding; results in the given order."""
    schedules = [_schedule(len(start.labels), training, start.rng) for start in starts]
    # Longest first: those still at work are always the first of the stack.
    order = sorted(range(len(starts)), key=lambda client: -len(schedules[client]))
    stack = [torch.stack([starts[client].before[name] for client in order]) for name in network.names]
    images = torch.cat([starts[client].images for client in order])
    labels = torch.cat([starts[client].labels for client in order])
    offsets = np.cumsum([0, *(len(starts[client].labels) for client in order)])
    losses: list[list[Tensor]] = [[] for _ in order]
    update = _dense_step if network.dense else _autograd_step
    for number in range(len(schedules[order[0]])):
        chosen = [schedules[client][number] for client in order if number < len(schedules[client])]
        index, weight = _padded(chosen, offsets)
        active = [values[: len(chosen)] for values in stack]
        each = update(network, active, images[index], labels[index], weight, training.learning_rate)
        for place, batch in enumerate(chosen):
            losses[place].append(each[place, : len(batch)])
    results: list[Trained | None] = [None] * len(starts)
    for place, client in enumerate(order):
        after = dict(starts[client].before)
        after |= {name: values[place] for name, values in zip(network.names, stack, strict=True)}
        results[client] = Trained.from_losses(after, torch.cat(losses[place]))
    return [trained for trained in results if trained is not None]


def _autograd_step(
    network: Chain, stack: Sequence[Tensor], images: Tensor, labels: Tensor, weight: Tensor, learning_rate: float
) -> Tensor:
    """One step for the clients of the stack, in place; returns the sample losses [clients, batch]."""
    parameters = [values.detach().requires_grad_() for values in stack]
    logits = network.forward(images, parameters)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    gradients = torch.autograd.grad((losses * weight).sum(), parameters)
    with torch.no_grad():
        for values, gradient in zip(stack, gradients, strict=True):
            values.add_(gradient, alpha=-learning_rate)
    return losses.detach()


@torch.no_grad()
def _dense_step(
    _network: Chain, stack: Sequence[Tensor], images: Tensor, labels: Tensor, weight: Tensor, learning_rate: float
) -> Tensor:
    """The same for linear layers with ReLU between, written out: the gradient goes straight into the weights."""
    weights, biases = stack[0::2], stack[1::2]
    activations = [images.flatten(2)]
    for layer, bias in zip(weights[:-1], biases[:-1], strict=True):
        activations.append(torch.baddbmm(bias.unsqueeze(1), activations[-1], layer.transpose(1, 2)).relu_())
    logits = torch.baddbmm(biases[-1].unsqueeze(1), activations[-1], weights[-1].transpose(1, 2))
    log_probabilities = torch.log_softmax(logits, 2)
    picked = labels.unsqueeze(2)
    losses = -log_probabilities.gather(2, picked).squeeze(2)
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(2, picked, gradient.new_full(picked.shape, -1.0))
    gradient *= weight.unsqueeze(2)
    for number in range(len(weights) - 1, -1, -1):
        here = activations[number]
        below = torch.bmm(gradient, weights[number]) if number else None
        weights[number].baddbmm_(gradient.transpose(1, 2), here, alpha=-learning_rate)
        biases[number].add_(gradient.sum(1), alpha=-learning_rate)
        if below is not None:
            gradient = below.mul_(here > 0)
    return losses


def _schedule(samples: int, training: Training, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    rng.integers(2**63)  # the reference trainer seeds stochastic layers with it; keep all in step
    return list(batches(samples, training, rng))


def _padded(chosen: Sequence[NDArray[np.int64]], offsets: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Sample numbers [clients, batch], short batches padded with anything, and each sample's weight (0 for padding)."""
    longest = max(len(batch) for batch in chosen)
    index = np.zeros((len(chosen), longest), dtype=np.int64)
    weight = np.zeros((len(chosen), longest), dtype=np.float32)
    for place, batch in enumerate(chosen):
        index[place, : len(batch)] = batch + offsets[place]
        weight[place, : len(batch)] = 1.0 / len(batch)
    return torch.from_numpy(index), torch.from_numpy(weight)
