"""Models that users bring: each looks like a chain of plain layers and is not, or has settings of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

SIDE = 28


def _mlp(**changes: nn.Module) -> nn.Sequential:
    layers: dict[str, nn.Module] = {
        "flatten": nn.Flatten(),
        "one": nn.Linear(SIDE * SIDE, 24),
        "relu": nn.ReLU(),
        "two": nn.Linear(24, 10),
    }
    model = nn.Sequential()
    for name, layer in (layers | changes).items():
        model.add_module(name, layer)
    return model


class StandardisedConv(nn.Conv2d):
    """Weight standardisation: the same type by isinstance, another function."""

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(inputs, weight, self.bias)


def standardised() -> nn.Module:
    return nn.Sequential(StandardisedConv(1, 4, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))


def linear_used_twice() -> nn.Module:
    again = nn.Linear(24, 24)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), again, nn.ReLU(), again, nn.ReLU(), nn.Linear(24, 10)
    )


def relu_used_twice() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 24), relu, nn.Linear(24, 24), relu, nn.Linear(24, 10))


class Residual(nn.Sequential):
    """A container with a forward of its own."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self[1](self[0](inputs)))
        return self[3](self[2](hidden) + hidden)  # type: ignore[no-any-return]


def own_forward() -> nn.Module:
    return Residual(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))


def frozen_first_layer() -> nn.Module:
    model = _mlp()
    model.one.requires_grad_(False)
    return model


def forward_hook() -> nn.Module:
    model = _mlp()
    model.one.register_forward_hook(lambda _, __, outputs: outputs.tanh())
    return model


def gradient_hook() -> nn.Module:
    model = _mlp()
    model.one.weight.register_hook(lambda gradient: 0.1 * gradient)  # type: ignore[operator]
    return model


def tied() -> nn.Module:
    model = _mlp(one=nn.Linear(784, 24), two=nn.Linear(24, 24), relu2=nn.ReLU(), three=nn.Linear(24, 24))
    model.three.weight = model.two.weight
    model.add_module("relu3", nn.ReLU())
    model.add_module("head", nn.Linear(24, 10))
    return model


def weight_norm() -> nn.Module:
    return _mlp(one=nn.utils.parametrizations.weight_norm(nn.Linear(784, 24)))


def old_weight_norm() -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return _mlp(one=nn.utils.weight_norm(nn.Linear(784, 24)))


def evaluation_mode() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(144, 10)
    )
    model[1].eval()
    return model


class KeepsItsMode(nn.Module):
    """The other way to keep a layer in evaluation mode, and the view that channels_last cannot give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.Linear(4 * 24 * 24, 10)

    def train(self, mode: bool = True) -> KeepsItsMode:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.norm(self.conv(inputs)).relu()
        return self.head(maps.view(len(maps), -1))  # type: ignore[no-any-return]


def patched_forward() -> nn.Module:
    model = _mlp()
    model.relu.forward = torch.tanh  # type: ignore[method-assign, assignment]
    return model


def circular_padding() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2, padding_mode="circular"), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(196, 10)
    )


def rounded_up_pooling() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5), nn.MaxPool2d(5, ceil_mode=True), nn.Flatten(), nn.Linear(100, 10))


def plain_with_odd_settings() -> nn.Module:
    """All of it is implemented: strides, dilation, rectangular pooling, ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(1, 4, (5, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(inplace=True),
        nn.MaxPool2d((2, 3), stride=(3, 2)),
        nn.Flatten(),
        nn.Linear(4 * 4 * 11, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


NOT_PLAIN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "standardised": (standardised, "is a StandardisedConv"),
    "linear_used_twice": (linear_used_twice, "module '3' is also used as module '5'"),
    "relu_used_twice": (relu_used_twice, "module '2' is also used as module '4'"),
    "own_forward": (own_forward, "it is a Residual"),
    "frozen_first_layer": (frozen_first_layer, "'one.weight' is frozen"),
    "forward_hook": (forward_hook, "module 'one' has a hook"),
    "gradient_hook": (gradient_hook, "'one.weight' has a hook"),
    "tied": (tied, "module 'two' shares a parameter with module 'three'"),
    "weight_norm": (weight_norm, "is a ParametrizedLinear"),
    "old_weight_norm": (old_weight_norm, "module 'one' has"),
    "evaluation_mode": (evaluation_mode, "is a BatchNorm2d"),
    "KeepsItsMode": (KeepsItsMode, "it is a KeepsItsMode"),
    "patched_forward": (patched_forward, "a forward of its own"),
    "circular_padding": (circular_padding, "padding_mode 'circular'"),
    "rounded_up_pooling": (rounded_up_pooling, "ceil_mode True"),
}
"""Models that no fast trainer can take, and words of the reason."""
