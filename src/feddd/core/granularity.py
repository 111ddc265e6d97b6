"""Layer tables by a rule of one's own, checked: other units than single channels and neurons."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from torch import nn

from feddd.core.units import Layer, Slot, Units, units

Granularity = Callable[[nn.Module], Units]
"""Returns the layer table of a module: the one of `feddd.units`, with other layers."""


def tables_of(modules: Sequence[nn.Module], rule: Granularity | None = None) -> list[Units]:
    """Return the layer tables of a model and its narrower versions, by a rule of one's own if there is one.

    ValueError, in one line, for a rule that fails or whose tables do not fit the models.
    """
    if rule is None:
        return [units(module) for module in modules]
    name = getattr(rule, "__name__", type(rule).__name__)
    tables = []
    for module in modules:
        try:
            tables.append(rule(module))
        except Exception as error:  # whatever is wrong with somebody's function is one line
            reason = " ".join(str(error).split())
            raise ValueError(f"units {name!r} raised {type(error).__name__}: {reason}") from error
        problem = _problem(tables[-1], units(module))
        if problem:
            raise ValueError(f"units {name!r} do not fit the model: {problem}")
    for table, module in zip(tables[1:], modules[1:], strict=True):
        with contextlib.suppress(ValueError):
            if tables[0].fit(module.state_dict()).digest == table.digest:
                continue
        raise ValueError(f"units {name!r} must divide narrower models as they divide the global one")
    return tables


def _problem(found: object, plain: Units) -> str:
    """Return what is wrong with a table, in words; "" if nothing is. plain: the table of `feddd.units`"""
    if not isinstance(found, Units):
        return f"they are a {type(found).__name__}, and not a table as feddd.units returns it"
    if not all(isinstance(layer, Layer) for layer in found.layers):
        return "layers must be a tuple of layers"
    if dataclasses.replace(found, layers=()) != dataclasses.replace(plain, layers=()):
        return "scalars, tied and frozen tensors must be left as feddd.units has them"
    names = [layer.name for layer in found.layers]
    if len(set(names)) < len(names):
        return "two layers have the same name"
    problems = (_layer_problem(layer) for layer in found.layers)
    return _tensor_problem(found, plain) or next(filter(None, problems), "")


def _tensor_problem(found: Units, plain: Units) -> str:
    """Return which tensor is not there exactly once and as it is, in words."""
    wanted = {slot.name: (slot.shape, slot.buffer) for layer in plain.layers for slot in layer.slots}
    given = [slot for layer in found.layers for slot in layer.slots]
    for slot in given:
        if wanted.pop(slot.name, None) != (slot.shape, slot.buffer):
            return f"tensor {slot.name!r} is there twice, is not the model's, or has another shape"
    return f"tensor {next(iter(wanted))!r} is in no layer" if wanted else ""


def _layer_problem(layer: Layer) -> str:
    for slot in layer.slots:
        if not _divides(slot):
            return f"tensor {slot.name!r} of shape {slot.shape} does not divide into units"
        if slot.units != layer.units:
            return f"layer {layer.name!r} has {layer.units} units, its tensor {slot.name!r} has {slot.units}"
    return "" if layer.slots else f"layer {layer.name!r} holds no tensor"


def _divides(slot: Slot) -> bool:
    if not (0 <= slot.axis < len(slot.shape) and min(slot.blocks, slot.groups, slot.span) >= 1):
        return False
    if slot.groups > 1 and (slot.axis != 1 or slot.blocks > 1 or slot.shape[0] % slot.groups):
        return False
    return slot.shape[slot.axis] % (slot.blocks * slot.span) == 0
