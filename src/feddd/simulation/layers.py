"""The layers of several clients at once, forward and backward pass written out: one operation for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Pair = tuple[int, int]


class Layer(Protocol):
    """One layer of S clients. Images go through as [batch, S · channels, height, width], features as [S, batch, …]."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs; remembers what `backward` needs."""
        ...

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Take a step of this size against the gradient, and pass it on to the inputs.

        first: nothing below learns, so that nobody needs the inputs' gradient
        """
        ...


@dataclass
class StackedLinear:
    """weight: [S, outputs, inputs]    bias: [S, outputs]    into: where the steps go, weight and bias"""

    weight: Tensor
    bias: Tensor
    into: tuple[Tensor, Tensor]
    inputs: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._turned, self._row = self.weight.transpose(1, 2), self.bias.unsqueeze(1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.inputs = inputs
        # Adding afterwards is quicker than `baddbmm`, which first writes the bias to every row.
        return torch.bmm(inputs, self._turned).add_(self._row)

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        below = gradient if first else torch.bmm(gradient, self.weight)
        weight, bias = self.into
        weight.baddbmm_(gradient.transpose(1, 2), self.inputs, alpha=-step)
        bias.add_(gradient.sum(1), alpha=-step)
        return below


@dataclass
class StackedConv:
    """weight: [S · outputs, inputs, height, width], a pixel's channels together    bias: [S · outputs]

    into: where the steps go, weight and bias
    """

    weight: Tensor
    bias: Tensor
    into: tuple[Tensor, Tensor]
    clients: int
    stride: Pair
    padding: Pair
    dilation: Pair
    inputs: Tensor = field(init=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.inputs = inputs
        return functional.conv2d(
            inputs, self.weight, self.bias, self.stride, self.padding, self.dilation, groups=self.clients
        )

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""

        def derivative(inputs: bool, parameters: bool) -> tuple[Tensor, Tensor, Tensor]:
            wanted = [inputs, parameters, parameters]
            return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
                *(gradient, self.inputs, self.weight, [len(self.bias)], self.stride, self.padding, self.dilation),
                *(False, (0, 0), self.clients, wanted),
            )

        # Two calls: asking for both at once was slower than asking twice.
        below = gradient if first else derivative(inputs=True, parameters=False)[0]
        _, weight, bias = derivative(inputs=False, parameters=True)
        self.into[0].add_(weight, alpha=-step)
        self.into[1].add_(bias, alpha=-step)
        return below


@dataclass
class StackedPool:
    """The greatest of every window."""

    size: Pair
    stride: Pair
    inputs: Tensor = field(init=False)
    places: Tensor = field(init=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.inputs = inputs
        outputs, self.places = functional.max_pool2d(inputs, self.size, self.stride, return_indices=True)
        return outputs

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        return torch.ops.aten.max_pool2d_with_indices_backward(  # type: ignore[no-any-return]
            gradient, self.inputs, self.size, self.stride, (0, 0), (1, 1), False, self.places
        )


@dataclass
class StackedReLU:
    """What is positive, and zero elsewhere."""

    outputs: Tensor = field(init=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.outputs = inputs.relu_()  # no layer looks back at what it has put out
        return self.outputs

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        return gradient.mul_(self.outputs.sign())  # what ReLU let through is positive


@dataclass
class StackedSoftmax:
    """Over the classes: features go in and probabilities come out, both [S, batch, classes]."""

    outputs: Tensor = field(init=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.outputs = inputs.softmax(2)
        return self.outputs

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        # p_i (g_i − Σ_j p_j g_j)
        return self.outputs * (gradient - (self.outputs * gradient).sum(2, keepdim=True))


@dataclass
class StackedScale:
    """HeteroFL's scaler: factor is a number per client, in a shape that broadcasts to the layer's."""

    factor: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        return inputs.mul_(self.factor)  # in place: no layer looks back at what it has put out

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        return gradient * self.factor


@dataclass
class StackedFlatten:
    """From images to features: [batch, S · channels, …] → [S, batch, features]; features stay what they are."""

    clients: int
    shape: torch.Size = field(init=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        self.shape = inputs.shape
        if inputs.dim() == 3:
            return inputs
        batch, channels, *sides = inputs.shape
        by_client = inputs.reshape(batch, self.clients, channels // self.clients, *sides)
        return by_client.transpose(0, 1).flatten(2)

    def backward(self, gradient: Tensor, step: float, first: bool) -> Tensor:
        """Return the gradient of the inputs."""
        if len(self.shape) == 3:
            return gradient
        batch, channels, *sides = self.shape
        images = gradient.view(self.clients, batch, channels // self.clients, *sides).transpose(0, 1)
        return images.reshape(self.shape).contiguous(memory_format=torch.channels_last)
