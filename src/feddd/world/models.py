"""The paper's networks by name and width, an MLP of five widths, two for text, and any ``nn.Module`` by import path.

Softmax in the paper's tables is the cross-entropy on logits, unless a name ends in "+softmax". Convolutions of CNN2 and
the heterogeneous models have padding 1, so that the first linear layer fits a 32 × 32 input.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from feddd.core.granularity import tables_of
from feddd.core.units import Units
from feddd.errors import InputError, nearest
from feddd.world.dataset import Shape
from feddd.world.sequence_models import CharacterLSTM, CharacterTransformer

# Output channels of the five convolutions and outputs of the first two linear layers, one row per sub-model.
HETEROGENEOUS = {
    "heterogeneous-a": (
        ((64, 128, 256, 512, 512), (100, 100)),
        ((64, 128, 256, 256, 512), (100, 100)),
        ((64, 128, 256, 256, 512), (80, 100)),
        ((32, 128, 256, 256, 512), (80, 100)),
        ((32, 128, 128, 256, 512), (80, 100)),
    ),
    "heterogeneous-b": (
        ((64, 128, 256, 512, 512), (100, 100)),
        ((64, 128, 256, 256, 256), (100, 100)),
        ((64, 128, 256, 256, 256), (80, 80)),
        ((32, 96, 256, 256, 256), (80, 80)),
        ((32, 96, 128, 128, 256), (80, 80)),
    ),
}

# The MLP with first hidden layers as far apart as the parameter counts of the heterogeneous models: five widths where
# they are cheap. They are ours, not the paper's.
FIVE_WIDTH_MLPS = {
    "mlp-a": (250, 138, 137, 135, 107),
    "mlp-b": (250, 100, 99, 92, 38),
}

# Kernel, padding and sub-models of every network. "NAME/4" is the network with all these widths divided by four.
NETWORKS: dict[str, tuple[int, int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]]] = {
    "mlp": (0, 0, (((), (100, 64)),)),
    "cnn1": (5, 0, (((10, 20), (50,)),)),
    "cnn2": (3, 1, (((16, 32, 64), (500, 100)),)),
    **{name: (3, 1, sub_models) for name, sub_models in HETEROGENEOUS.items()},
    **{name: (0, 0, tuple(((), (first, 64)) for first in sizes)) for name, sizes in FIVE_WIDTH_MLPS.items()},
}
SEQUENCE_MODELS = ("lstm", "transformer")
MODELS = (*NETWORKS, *SEQUENCE_MODELS)
SOFTMAX = "+softmax"
"""What a network's name ends with if its last layer is Softmax, as the paper's tables have it, under the same
cross-entropy: the gradients are those of a softmax of a softmax."""


def widths(name: str) -> int:
    """Return how many sub-models a name stands for; 0 is the global model."""
    base = _split(name)[0]
    return len(NETWORKS[base][2]) if known(name) and base in NETWORKS else 1


def known(name: str) -> bool:
    """Return whether this is one of our networks, perhaps narrowed: "mlp", "heterogeneous-a/4", "mlp+softmax"."""
    base, divisor = _split(name)
    return base in MODELS and divisor >= 1


def _split(name: str) -> tuple[str, int]:
    """Return a network's name and what its widths are divided by; 0 for what is no such number."""
    base, slash, divisor = name.removesuffix(SOFTMAX).partition("/")
    return base, (int(divisor) if divisor.isascii() and divisor.isdigit() else 0) if slash else 1


def build(
    name: str,
    input_shape: Shape,
    classes: int | None,
    width: int = 0,
    *,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the network, with initial weights that follow from the seed alone.

    input_shape: of one sample, by name where there are several inputs    classes: None to predict one number
    width: which sub-model, 0 being the global model
    arguments: what the function of an import path is called with, by keyword
    """
    # Layers initialise themselves from torch's global generator: lend it the seed and put it back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if ":" in name:
            return _imported(name, {"input_shape": input_shape, "classes": classes}, arguments or {})
        return _build(name, input_shape, classes, width)


def _imported(name: str, facts: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    """Call the function of an import path with the arguments given, and with those of the facts that it asks for."""
    make = import_object(name)
    try:
        parameters = inspect.signature(make).parameters
        told = {key: value for key, value in facts.items() if key in parameters} | dict(arguments)
        inspect.signature(make).bind(**told)
    except TypeError as error:
        known_ones = ", ".join(inspect.signature(make).parameters) or "no arguments"
        given = "with model.arguments" if arguments else "without arguments"
        raise InputError(f"model {name!r} must be callable {given}: {error}; it takes {known_ones}") from error
    model = make(**told)
    if not isinstance(model, nn.Module):
        raise InputError(f"model {name!r} returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def _build(name: str, input_shape: Shape, classes: int | None, width: int) -> nn.Module:
    if not known(name):
        raise InputError(f"unknown model {name!r}; {nearest(name, (*MODELS, 'package.module:function'))}")
    base, divisor = _split(name)
    if isinstance(input_shape, dict):
        raise InputError(
            f"model {name!r} takes one input, the samples have {', '.join(input_shape)}: use one of your own"
        )
    if base in SEQUENCE_MODELS:
        return _sequence_model(name, base, divisor, input_shape, classes)
    kernel, padding, sub_models = NETWORKS[base]
    if kernel and len(input_shape) != 3:
        raise InputError(f"model {name!r} takes images (channels, height, width), not samples of shape {input_shape}")
    channels, hidden = ([max(1, round(size / divisor)) for size in sizes] for sizes in sub_models[width])
    outputs = 1 if classes is None else classes
    model = _network(input_shape, channels, hidden, outputs, kernel=kernel, padding=padding)
    if name.endswith(SOFTMAX):
        model.add_module("softmax", nn.Softmax(1))
    return model


def _sequence_model(name: str, base: str, divisor: int, shape: Sequence[int], tokens: int | None) -> nn.Module:
    if len(shape) != 1 or tokens is None:
        raise InputError(f"model {name!r} takes sequences of tokens (length), not samples of shape {tuple(shape)}")
    if base == "lstm":
        return CharacterLSTM(tokens, hidden=max(1, round(128 / divisor)))
    heads = max(1, 4 // divisor)
    return CharacterTransformer(tokens, shape[0], width=16 * heads, heads=heads)


def layer_tables(modules: Sequence[nn.Module], path: str | None) -> list[Units]:
    """Return the layer tables of a model and its narrower versions.

    path: of a function that makes a table of a module; None for `feddd.units`
    """
    if path is None:
        return tables_of(modules)
    try:
        return tables_of(modules, import_object(path))
    except ValueError as error:
        raise InputError(f"model.{error}") from error


def import_from(folder: Path) -> None:
    """Let modules of a folder be found, before those of the current folder and, like those, in workers too."""
    if str(folder) not in sys.path:
        current = [at for at, place in enumerate(sys.path) if place in ("", os.getcwd())]
        sys.path.insert(current[0] if current else len(sys.path), str(folder))


def import_folder(path: str) -> Path | None:
    """Return the folder in which the package of "package.module:function" was found; None if it was not imported."""
    package, _, _ = path.partition(":")[0].partition(".")
    module = sys.modules.get(package)
    source = next(iter(getattr(module, "__path__", ())), getattr(module, "__file__", None))
    return None if source is None else Path(source).absolute().parent


def import_object(path: str) -> Callable[..., Any]:
    """Return what "package.module:function" names; modules of the current folder are found too."""
    module_name, _, attribute = path.partition(":")
    current = os.getcwd()
    if current not in sys.path:
        sys.path.append(current)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        raise InputError(f"cannot import {path!r}: {error}") from error
    if not callable(found):
        raise InputError(f"{path!r} is not a function")
    return found  # type: ignore[no-any-return]


def _network(
    input_shape: Sequence[int],
    channels: Sequence[int],
    hidden: Sequence[int],
    classes: int,
    *,
    kernel: int,
    padding: int,
) -> nn.Sequential:
    """Convolutions, each with 2 × 2 pooling and ReLU, then linear layers with ReLU between."""
    inputs, height, width = input_shape if len(input_shape) == 3 else (math.prod(input_shape), 1, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, outputs in enumerate(channels, 1):
        height, width = ((side + 2 * padding - kernel + 1) // 2 for side in (height, width))
        if height < 1 or width < 1:
            raise InputError(f"images of shape {tuple(input_shape)} are too small for {len(channels)} convolutions")
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, kernel, padding=padding)
        # The maximum of rectified values is the rectified maximum: pooling first leaves a quarter of them to rectify.
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"relu_conv{number}"] = nn.ReLU()
        inputs = outputs
    layers["flatten"] = nn.Flatten()
    inputs = inputs * height * width
    for number, outputs in enumerate((*hidden, classes), 1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        if number <= len(hidden):
            layers[f"relu_fc{number}"] = nn.ReLU()
        inputs = outputs
    return nn.Sequential(layers)
