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
from feddd.simulation.training import Local, Samples, Trained, Training, batches, gather_images

Step = Callable[[Tensor, Sequence[Tensor], int], Tensor]
Update = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Images, labels and weights of a batch per client, [clients, batch, …] → the sample losses [clients, batch]."""


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
    make_update = _dense_update if network.dense else _autograd_update

    def train(before: Params, samples: Samples, clients: Sequence[Local], training: Training) -> Trained:
        device = samples.labels.device
        # Longest first: those still at work are always the first of the stack.
        order = sorted(range(len(clients)), key=lambda place: -clients[place].count)
        numbers, sizes = _schedule([clients[place] for place in order], training)
        index = torch.from_numpy(numbers).to(device)
        labels = samples.labels.index_select(0, index.flatten()).view(index.shape)
        counted = torch.arange(training.batch_size, device=device) < torch.from_numpy(sizes).to(device).unsqueeze(2)
        weight = counted / torch.from_numpy(np.maximum(sizes, 1).astype(np.float32)).to(device).unsqueeze(2)
        places = torch.tensor(order, device=device)
        stack = [before[name].index_select(0, places) for name in network.names]
        losses = torch.zeros(index.shape, device=device)
        still = 0
        for step, (active, longest) in enumerate(zip((sizes > 0).sum(0).tolist(), sizes.max(0).tolist(), strict=True)):
            if active != still:
                update, still = make_update(network, [values[:active] for values in stack], training.learning_rate), active
            batch = (slice(active), step, slice(longest))
            images = gather_images(samples, index[batch].flatten()).unflatten(0, (active, longest))
            losses[batch] = update(images, labels[batch], weight[batch])
        back = torch.empty_like(places).scatter_(0, places, torch.arange(len(order), device=device))
        after = {name: values.index_select(0, back) for name, values in zip(network.names, stack, strict=True)}
        each = (losses.double() * counted).index_select(0, back).flatten(1)
        seen = np.array([training.epochs * client.count for client in clients])
        mean, mean_square = each.sum(1).cpu().numpy() / seen, each.square().sum(1).cpu().numpy() / seen
        return Trained(after, mean, np.sqrt(mean_square))

    return train


def _autograd_update(network: Chain, stack: Sequence[Tensor], learning_rate: float) -> Update:
    """One step for the clients of the stack, in place, by torch's own gradients."""
    parameters = [values.detach().requires_grad_() for values in stack]

    def update(images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        logits = network.forward(images, parameters)
        losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        gradients = torch.autograd.grad((losses * weight).sum(), parameters)
        with torch.no_grad():
            for values, gradient in zip(stack, gradients, strict=True):
                values.add_(gradient, alpha=-learning_rate)
        return losses.detach()

    return update


def _dense_update(_network: Chain, stack: Sequence[Tensor], learning_rate: float) -> Update:
    """The same for linear layers with ReLU between, written out: the gradient goes straight into the weights."""
    weights, biases = stack[0::2], stack[1::2]
    turned = [weight.transpose(1, 2) for weight in weights]
    rows = [bias.unsqueeze(1) for bias in biases]
    last = len(weights) - 1

    @torch.no_grad()
    def update(images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        activations = [images.flatten(2)]
        for layer in range(last):
            activations.append(torch.baddbmm(rows[layer], activations[-1], turned[layer]).relu_())
        log_probabilities = torch.baddbmm(rows[last], activations[-1], turned[last]).log_softmax(2)
        target = labels.unsqueeze(2)
        losses = log_probabilities.gather(2, target).squeeze(2).neg_()
        # (probability − one for the right class) / batch size
        gradient = log_probabilities.exp_().scatter_add_(2, target, torch.full_like(target, -1, dtype=images.dtype))
        gradient *= weight.unsqueeze(2)
        for layer in range(last, -1, -1):
            here = activations[layer]
            below = torch.bmm(gradient, weights[layer]) if layer else None
            weights[layer].baddbmm_(gradient.transpose(1, 2), here, alpha=-learning_rate)
            biases[layer].add_(gradient.sum(1), alpha=-learning_rate)
            if below is not None:
                gradient = below.mul_(here.sign())  # what ReLU let through is positive
        return losses

    return update


def _schedule(clients: Sequence[Local], training: Training) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample numbers [clients, steps, batch], short batches padded with the first sample, and their sizes."""
    steps = training.epochs * -(-clients[0].count // training.batch_size)
    numbers = np.zeros((len(clients), steps, training.batch_size), dtype=np.int64)
    sizes = np.zeros((len(clients), steps), dtype=np.int64)
    for place, client in enumerate(clients):
        client.rng.integers(2**63)  # the reference trainer seeds stochastic layers with it; keep all in step
        for step, batch in enumerate(batches(client.count, training, client.rng)):
            numbers[place, step, : len(batch)] = batch + client.first
            sizes[place, step] = len(batch)
    return numbers, sizes
