"""Low-rank adapters (LoRA): B·A beside a frozen weight, where a unit is a rank component.

Row k of A and column k of B mean nothing without each other: B·A is the sum over k of their products. So they are one
unit, sent together or not at all. Pairs are recognised by the names that loralib and peft give them and by shapes that
fit; everything else keeps the units that it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from feddd.core.units import Layer, Slot

PAIRS = {"lora_A": "lora_B", "lora_embedding_A": "lora_embedding_B"}
"""The two halves, A first: A is [rank, inputs, …] and B is [outputs, rank, …]."""


def pair_adapters(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers with every pair of A and B as one layer of rank components, where A was."""
    slots = {slot.name: slot for layer in layers for slot in layer.slots}
    partner = {name: other for name, slot in slots.items() if (other := _other_half(slot, slots)) is not None}
    taken = {*partner, *(other.name for other in partner.values())}
    found: list[Layer] = []
    for layer in layers:
        for slot in layer.slots:
            if slot.name in partner:
                pair = (slot, dataclasses.replace(partner[slot.name], axis=1))
                found.append(dataclasses.replace(layer, name=_joint_name(slot.name), units=slot.units, slots=pair))
        rest = tuple(slot for slot in layer.slots if slot.name not in taken)
        if rest:
            found.append(dataclasses.replace(layer, slots=rest))
    return found


def _other_half(slot: Slot, slots: dict[str, Slot]) -> Slot | None:
    """Return B for a tensor that is A; None if it is not, or if the two do not fit."""
    parts = slot.name.split(".")
    half = next((part for part in parts if part in PAIRS), None)
    if half is None or not slot.plain or len(slot.shape) < 2:
        return None
    other = slots.get(".".join(PAIRS[part] if part == half else part for part in parts))
    if other is None or other.blocks > 1 or other.groups > 1 or len(other.shape) < 2:
        return None
    return other if other.shape[1] == slot.shape[0] else None


def _joint_name(name: str) -> str:
    """`x.lora_A.default.weight` → `x.lora.default`."""
    joint = ".".join("lora" if part in PAIRS else part for part in name.split("."))
    return joint.removesuffix(".weight")
