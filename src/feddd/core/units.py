"""Which slices of which tensors form a unit, worked out once for any ``nn.Module``.

A unit is one output channel or neuron: the slice of a layer's tensors along their output axis, weight row and bias
together. Everything else in the package is layer-blind: it sees a table of layers and slots and never asks what
kind of module a tensor came from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from feddd.core.adapters import pair_adapters

Params = Mapping[str, Tensor]
"""Tensors by name, a state_dict; of several clients at once ("a stack"), every tensor has one more axis in front."""
Mask = dict[str, Tensor]
"""Booleans by layer, [units]; of a stack, [clients, units]."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a state_dict and where its units lie.

    Plain tensors have their units along `axis`. Gates of recurrent cells and the stacked projections of attention
    repeat them: with `blocks` = b the axis holds b stacked copies, unit k at k, N + k, …. A transposed convolution
    with `groups` has its output channels spread over the groups of its first axis. With `span` = s a unit is s
    neighbours on the axis.
    """

    name: str
    shape: tuple[int, ...]
    axis: int = 0
    blocks: int = 1
    groups: int = 1
    buffer: bool = False
    span: int = 1

    @property
    def units(self) -> int:
        """Return how many units the tensor holds."""
        return self.shape[self.axis] * self.groups // (self.blocks * self.span)

    @property
    def elements(self) -> int:
        """Return how many numbers the tensor holds."""
        return torch.Size(self.shape).numel()

    @property
    def lead(self) -> int:
        """Return how many leading axes of `rows` count units (two for grouped transposed convolutions, else one)."""
        return 2 if self.groups > 1 else 1

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensor seen with its unit axes in front: always a view, so that writing to it writes to the tensor."""
        if self.groups > 1:
            grouped = tensor.view(self.groups, self.shape[0] // self.groups, *self.shape[1:])
            rows = grouped.movedim(2, 1)
        elif self.blocks > 1:
            before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
            rows = tensor.view(*before, self.blocks, self.units * self.span, *after).movedim(self.axis + 1, 0)
        else:
            rows = tensor.movedim(self.axis, 0) if self.axis else tensor
        if self.span == 1:
            return rows
        return rows.view(*rows.shape[: self.lead - 1], -1, self.span, *rows.shape[self.lead :])

    @property
    def plain(self) -> bool:
        """Return whether a unit's numbers lie together, one unit after the other."""
        return self.axis == 0 and self.blocks == 1 and self.groups == 1

    def stacked_rows(self, stack: Tensor) -> Tensor:
        """The tensors of several clients [clients, *shape] as [clients, units, numbers of a unit]; if plain, a view."""
        if self.plain:
            return stack.reshape(len(stack), self.units, -1)
        return torch.stack([self.rows(one).reshape(self.units, -1) for one in stack])

    def tensors(self, rows: Tensor) -> Tensor:
        """Return the inverse of `stacked_rows`; if plain, a view."""
        if self.plain:
            return rows.view(len(rows), *self.shape)
        stack = rows.new_empty(len(rows), *self.shape)
        for one, own in zip(stack, rows, strict=True):
            view = self.rows(one)
            view.copy_(own.reshape(view.shape))
        return stack

    def index(self, mask: Tensor) -> Tensor:
        """Return the layer's mask [units] in the shape of this tensor's leading unit axes."""
        return mask.reshape(self.groups, -1) if self.groups > 1 else mask


@dataclass(frozen=True)
class Layer:
    """The tensors of one module that share their output axis: `units` of them."""

    name: str
    units: int
    slots: tuple[Slot, ...]

    @property
    def elements(self) -> int:
        """Return how many numbers the layer holds."""
        return sum(slot.elements for slot in self.slots)

    @property
    def unit_elements(self) -> int:
        """Return how many numbers belong to one unit."""
        return self.elements // self.units

    def joined(self, count: int) -> Layer:
        """Return the layer with `count` neighbouring units as one; ValueError if some would be left over."""
        slots = tuple(dataclasses.replace(slot, span=slot.span * count) for slot in self.slots)
        if count < 1 or any(slot.shape[slot.axis] % (slot.blocks * slot.span) for slot in slots):
            raise ValueError(f"the {self.units} units of layer {self.name!r} cannot be joined {count} at a time")
        return Layer(self.name, slots[0].units, slots)


@dataclass(frozen=True)
class Units:
    """The layer table of a model.

    `fixed` are tensors with no unit axis (scalars), always sent; `aliases` name tensors that another name holds
    already (tied weights). `frozen` names the parameters that are not trained (requires_grad=False): they are part of
    no layer, and like integer tensors never sent nor averaged.
    """

    layers: tuple[Layer, ...]
    fixed: tuple[Slot, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    frozen: tuple[str, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """Eight bytes that two ends share exactly when their layer tables agree."""
        table = [
            [
                layer.name,
                layer.units,
                [[s.name, s.shape, s.axis, s.blocks, s.groups, *([s.span] if s.span > 1 else [])] for s in layer.slots],
            ]
            for layer in self.layers
        ]
        text = json.dumps([table, [slot.name for slot in self.fixed]], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:8]

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Return every tensor of the table once, in wire order: layer by layer, then the fixed ones."""
        return (*(slot for layer in self.layers for slot in layer.slots), *self.fixed)

    @cached_property
    def total_units(self) -> int:
        """K: units in all layers."""
        return sum(layer.units for layer in self.layers)

    @cached_property
    def droppable_elements(self) -> int:
        """Return numbers that a mask can leave out."""
        return sum(layer.elements for layer in self.layers)

    @cached_property
    def elements(self) -> int:
        """Return numbers in the whole model, tied ones once."""
        return self.droppable_elements + len(self.fixed)

    def full_mask(self) -> Mask:
        """Return every unit kept."""
        return {layer.name: torch.ones(layer.units, dtype=torch.bool) for layer in self.layers}

    def check_mask(self, mask: Mapping[str, Tensor]) -> None:
        """Refuse a mask that is not one boolean per unit of every layer."""
        if set(mask) != {layer.name for layer in self.layers}:
            raise ValueError(f"the mask names layers {sorted(mask)}, the model has {[x.name for x in self.layers]}")
        for layer in self.layers:
            given = mask[layer.name]
            if given.dtype != torch.bool or given.shape != (layer.units,):
                raise ValueError(
                    f"the mask of layer {layer.name!r} must be {layer.units} booleans, "
                    f"not {given.dtype} of shape {tuple(given.shape)}"
                )

    def kept_elements(self, mask: Mapping[str, Tensor]) -> int:
        """Return numbers that a payload with this mask carries, the fixed ones included."""
        kept = sum(layer.unit_elements * int(mask[layer.name].sum()) for layer in self.layers)
        return kept + len(self.fixed)

    def take(
        self, params: Params, mask: Mapping[str, Tensor], *, fixed: bool = True, out: Tensor | None = None
    ) -> Tensor:
        """Return the masked units' values as one float32 vector, contiguous per tensor, in wire order.

        out: a vector to write them to, instead of a new one
        """
        if out is None:
            out = torch.empty(self.kept_elements(mask) - (0 if fixed else len(self.fixed)))
        start = 0
        for layer in self.layers:
            kept = mask[layer.name]
            chosen = None if bool(kept.all()) else kept.nonzero().squeeze(1)
            for slot in layer.slots:
                rows = slot.rows(params[slot.name].detach())
                count = layer.units if chosen is None else len(chosen)
                part = out[start : start + slot.elements // layer.units * count]
                start += len(part)
                if chosen is None:
                    part.view(rows.shape).copy_(rows)
                elif slot.lead > 1:
                    part.view(count, *rows.shape[2:]).copy_(rows[slot.index(kept)])
                elif rows.dtype == torch.float32:
                    torch.index_select(rows, 0, chosen, out=part.view(count, *rows.shape[1:]))
                else:
                    part.view(count, *rows.shape[1:]).copy_(rows.index_select(0, chosen))
        for slot in self.fixed if fixed else ():
            out[start] = params[slot.name].detach()
            start += 1
        return out

    def put(self, params: Params, mask: Mapping[str, Tensor], values: Tensor, *, fixed: bool = True) -> None:
        """Write the values that `take` returned back into their places in `params`; the rest is left as it is."""
        start = 0
        for layer in self.layers:
            kept = mask[layer.name]
            chosen = kept.nonzero().squeeze(1)
            for slot in layer.slots:
                rows = slot.rows(params[slot.name])
                size = slot.elements // layer.units * len(chosen)
                part = values[start : start + size].to(rows.dtype)
                if len(chosen) == layer.units:
                    rows.copy_(part.reshape(rows.shape))
                elif slot.lead == 1:
                    rows.index_copy_(0, chosen, part.reshape(len(chosen), *rows.shape[1:]))
                else:
                    rows[slot.index(kept)] = part.reshape(len(chosen), *rows.shape[slot.lead :])
                start += size
        for slot in self.fixed if fixed else ():
            params[slot.name].copy_(values[start])
            start += 1

    def zeros_like(self, params: Params) -> dict[str, Tensor]:
        """Dense zeros for every tensor of the table; tied names share one tensor."""
        zeros = {slot.name: torch.zeros(slot.shape, dtype=params[slot.name].dtype) for slot in self.slots}
        return zeros | {alias: zeros[name] for alias, name in self.aliases}

    def fit(self, params: Params) -> Units:
        """This table for a model whose tensors are narrower or wider; itself where the shapes agree."""
        missing = [slot.name for slot in self.slots if slot.name not in params]
        if missing:
            raise ValueError(f"the parameters lack {missing[0]!r}, which the model's layer table has")
        if all(tuple(params[slot.name].shape) == slot.shape for slot in self.slots):
            return self

        def resized(slot: Slot) -> Slot:
            shape = tuple(params[slot.name].shape)
            if len(shape) != len(slot.shape):
                raise ValueError(f"tensor {slot.name!r} has {len(shape)} axes, the layer table says {len(slot.shape)}")
            if shape and (0 in shape or shape[slot.axis] % (slot.blocks * slot.span) or shape[0] % slot.groups):
                raise ValueError(f"tensor {slot.name!r} of shape {shape} does not divide into units")
            return dataclasses.replace(slot, shape=shape)

        layers = []
        for layer in self.layers:
            slots = tuple(resized(slot) for slot in layer.slots)
            if len({slot.units for slot in slots}) > 1:
                raise ValueError(f"the tensors of layer {layer.name!r} disagree on how many units there are")
            layers.append(Layer(layer.name, slots[0].units, slots))
        return dataclasses.replace(self, layers=tuple(layers), fixed=tuple(resized(slot) for slot in self.fixed))


def units(model: nn.Module | Params) -> Units:
    """Return the layer table of a module; for a bare state_dict, tensors grouped by name prefix, units along axis 0.

    A module's frozen parameters (requires_grad=False) are left out; a bare state_dict cannot tell them, and has all.
    """
    return _units_of_module(model) if isinstance(model, nn.Module) else _units_of_tensors(model)


def units_for(params: Params, given: Units | None) -> Units:
    """Return the table a caller gave, fitted to these tensors, or the one their names suggest."""
    return _units_of_tensors(params) if given is None else given.fit(params)


def _units_of_tensors(tensors: Params) -> Units:
    groups: dict[str, list[Slot]] = {}
    fixed = []
    for name, tensor in tensors.items():
        if not _carried(name, tensor):
            continue
        if tensor.dim() == 0:
            fixed.append(Slot(name, ()))
        else:
            groups.setdefault(_prefix(name), []).append(Slot(name, tuple(tensor.shape)))
    layers = [layer for prefix, slots in groups.items() for layer in _layers(prefix, slots)]
    return Units(tuple(layers), tuple(fixed))


def _units_of_module(model: nn.Module) -> Units:
    layers: list[Layer] = []
    fixed: list[Slot] = []
    aliases: list[tuple[str, str]] = []
    frozen: list[str] = []
    owner: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        slots = []
        for local, tensor, buffer in _own_tensors(module):
            name = f"{prefix}.{local}" if prefix else local
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                frozen.append(name)
                continue
            if not _carried(name, tensor):
                continue
            if id(tensor) in owner:
                aliases.append((name, owner[id(tensor)]))
                continue
            owner[id(tensor)] = name
            if tensor.dim() == 0:
                fixed.append(Slot(name, (), buffer=buffer))
            else:
                slots.append(_slot(module, local, Slot(name, tuple(tensor.shape), buffer=buffer)))
        made = _layers(prefix, slots, suffix=_recurrent_suffix if isinstance(module, nn.RNNBase) else None)
        if isinstance(module, _NORMALISATION) and len(made) == 1 and layers and layers[-1].units == made[0].units:
            before = layers.pop()
            made = [dataclasses.replace(before, slots=before.slots + made[0].slots)]
        layers.extend(made)
    if frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has nothing to train: all of its parameters are frozen (requires_grad=False)")
    return Units(tuple(pair_adapters(layers)), tuple(fixed), tuple(aliases), tuple(frozen))


_NORMALISATION = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor, bool]]:
    """(name, tensor, is buffer) of what the module itself puts into a state_dict."""
    parameters = [(name, p, False) for name, p in module._parameters.items() if p is not None]
    hidden = module._non_persistent_buffers_set
    buffers = [(name, b, True) for name, b in module._buffers.items() if b is not None and name not in hidden]
    return parameters + buffers


def _carried(name: str, tensor: Tensor) -> bool:
    if is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run the lazy module once before asking for its units")
    if tensor.is_complex():
        raise ValueError(f"{name!r} is complex; only real parameters can be sent")
    return tensor.is_floating_point() and tensor.numel() > 0


def _slot(module: nn.Module, local: str, plain: Slot) -> Slot:
    """Return where the output axis of this module's tensor lies; axis 0 unless the module keeps it elsewhere."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd) and local == "weight":
        return dataclasses.replace(plain, axis=1, groups=module.groups)
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and local == "weight":
        return dataclasses.replace(plain, axis=1)
    if isinstance(module, nn.MultiheadAttention):
        if local.startswith("in_proj"):
            return dataclasses.replace(plain, blocks=3)
        return dataclasses.replace(plain, axis=2) if local in ("bias_k", "bias_v") else plain
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and local.startswith(("weight_ih", "weight_hh", "bias_")):
        return dataclasses.replace(plain, blocks=plain.shape[0] // module.hidden_size)
    return plain


def _recurrent_suffix(name: str) -> str:
    """`weight_ih_l0_reverse` → `l0_reverse`: each depth and direction is a layer; a projection is one of its own."""
    kind, _, suffix = (local := name.rpartition(".")[2]).partition("_l")
    return f"l{suffix}" if kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh") else local


def _layers(prefix: str, slots: list[Slot], suffix: Callable[[str], str] | None = None) -> list[Layer]:
    """Group a module's tensors by what tells its layers apart: unit count, or depth and direction if recurrent."""
    groups: dict[tuple[str, int], list[Slot]] = {}
    for slot in slots:
        key = suffix(slot.name) if suffix else ""
        groups.setdefault((key, slot.units), []).append(slot)
    layers: list[Layer] = []
    for (key, count), members in groups.items():
        # The first group is the module itself; a further one is named after its first tensor.
        plain = members[0].name if layers else prefix
        layers.append(Layer(".".join(filter(None, (prefix, key))) if key else plain, count, tuple(members)))
    return layers


def _prefix(name: str) -> str:
    return name.rpartition(".")[0]
