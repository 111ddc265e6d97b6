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

from feddd.core.units import Params
from feddd.simulation.training import Local, Samples, Trained, Training, batches, gather

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


def stack_trainer(network: Chain) -> Callable[[Params, Samples, Sequence[Local], Training], Trained]:
    """The same as training each client alone, up to rounding."""
    update = _dense_step if network.dense else _autograd_step

    def train(before: Params, samples: Samples, clients: Sequence[Local], training: Training) -> Trained:
        # Longest first: those still at work are always the first of the stack.
        order = sorted(range(len(clients)), key=lambda place: -clients[place].count)
        index, weight = _schedule([clients[place] for place in order], training)
        steps = (weight[:, :, 0] > 0).sum(1).tolist()
        places = torch.tensor(order, device=samples.labels.device)
        stack = [before[name].index_select(0, places) for name in network.names]
        sums = torch.zeros(2, len(order), dtype=torch.float64, device=samples.labels.device)
        for step in range(max(steps)):
            active = sum(count > step for count in steps)
            longest = int((weight[:active, step] > 0).sum(1).max())
            shares = torch.from_numpy(weight[:active, step, :longest]).to(places.device)
            chosen = torch.from_numpy(index[:active, step, :longest])
            images, labels = gather(samples, chosen.flatten())
            losses = update(
                network,
                [values[:active] for values in stack],
                images.unflatten(0, chosen.shape),
                labels.view(chosen.shape),
                shares,
                training.learning_rate,
            )
            counted = losses.double() * (shares > 0)
            sums[0, :active] += counted.sum(1)
            sums[1, :active] += counted.square().sum(1)
        back = torch.empty_like(places).scatter_(0, places, torch.arange(len(order), device=places.device))
        after = {name: values.index_select(0, back) for name, values in zip(network.names, stack, strict=True)}
        seen = np.array([training.epochs * client.count for client in clients])
        mean, mean_square = sums.index_select(1, back).cpu().numpy() / seen
        return Trained(after, mean, np.sqrt(mean_square))

    return train


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


def _schedule(
    clients: Sequence[Local], training: Training
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sample numbers [clients, steps, batch] and each sample's weight in its batch; what is padding has weight 0."""
    size = training.batch_size
    steps = training.epochs * -(-clients[0].count // size)
    index = np.zeros((len(clients), steps, size), dtype=np.int64)
    weight = np.zeros((len(clients), steps, size), dtype=np.float32)
    for place, client in enumerate(clients):
        client.rng.integers(2**63)  # the reference trainer seeds stochastic layers with it; keep all in step
        for step, batch in enumerate(batches(client.count, training, client.rng)):
            index[place, step, : len(batch)] = batch + client.first
            weight[place, step, : len(batch)] = 1.0 / len(batch)
    return index, weight
