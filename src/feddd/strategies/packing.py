"""A server's state as tensors and a JSON document, and back: what the checkpoints of simulator and deployment share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddd.errors import InputError
from feddd.strategies.clients import FACTS, ClientTable
from feddd.strategies.oort import Pacer
from feddd.strategies.protocol import ServerState
from feddd.wire.down import Reference

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""What `unpack_state` raises for something that `pack_state` never made."""
_ARRAYS = tuple(name for name in FACTS if name != "masks")


class CannotBeSaved(InputError):
    """A strategy's memory is something that a file cannot hold."""


def pack_state(state: ServerState) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors, none of which share memory with each other, and a document that JSON can hold."""
    first: dict[int, str] = {}
    tensors = {}
    reference = state.reference
    named = {f"model.{name}": tensor for name, tensor in state.model.items()}
    named |= {f"reference.{name}": tensor for name, tensor in reference.model.items()} if reference else {}
    for name, tensor in named.items():
        tied = first.setdefault(tensor.data_ptr() or id(tensor), name) != name
        tensors[name] = tensor.detach().clone() if tied else tensor.detach().contiguous()
    tensors |= {f"state.{name}": torch.from_numpy(np.array(state.clients[name])) for name in _ARRAYS}
    document = {
        "round": state.round,
        "masks": [None if mask is None else mask.hex() for mask in state.masks],
        "memory": _packed_memory(state.memory, tensors),
        "client_memory": _packed_memory(state.client_memory, tensors),
        "mask_error": None if math.isnan(state.mask_error) else state.mask_error,
        "reference": _packed(reference) if reference else None,
        "vectors": _packed_memory({name: dict(own) for name, own in state.vectors.items()}, tensors),
    }
    return tensors, document


def unpack_state(tensors: Mapping[str, Tensor], document: Mapping[str, Any], like: Mapping[str, Tensor]) -> ServerState:
    """Return the inverse, or one of MALFORMED; `like` is the model that it has to fit."""
    number = document["round"]
    expect(type(number) is int and number >= 0, "round")
    masks = tuple(None if mask is None else bytes.fromhex(mask) for mask in document["masks"])
    columns = {name: tensors[f"state.{name}"].numpy() for name in _ARRAYS}
    for name, column in columns.items():
        expect(column.dtype == FACTS[name] and column.shape == (len(masks),), name)
    own = _memory_of(document["client_memory"], tensors)
    expect(isinstance(own, dict), "memory")
    return ServerState(
        round=number,
        model=_model("model.", tensors, like),
        clients=ClientTable({"masks": np.array(masks, dtype=object)} | columns).with_own(own),
        memory=_memory_of(document["memory"], tensors),
        vectors=_vectors(_memory_of(document.get("vectors", {"dict": {}}), tensors), like),
        reference=_reference(document["reference"], tensors, like, len(masks)),
        mask_error=math.nan if document["mask_error"] is None else float(document["mask_error"]),
    )


def expect(right: bool, what: str) -> None:
    """Refuse a part of a file that nobody has written so."""
    if not right:
        raise ValueError(f"its {what} make no sense")


def _packed(reference: Reference) -> dict[str, Any]:
    packed = {"number": reference.number, "held": reference.held.tolist()}
    return packed | ({"sizes": list(reference.sizes)} if reference.sizes else {})


def _reference(
    document: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], clients: int
) -> Reference | None:
    if document is None:
        return None
    number, held = document["number"], np.array(document["held"])
    expect(type(number) is int and held.shape == (clients,) and (not clients or held.dtype == np.int64), "reference")
    sizes = document.get("sizes", [])
    expect(all(type(size) is int and size > 0 for size in sizes) and len(sizes) in (0, number), "reference")
    return Reference(_model("reference.", tensors, like), number, held.astype(np.int64), tuple(sizes))


def _vectors(found: Any, like: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the vectors beside a model, if they are tensors of its names and shapes."""
    expect(isinstance(found, dict) and all(isinstance(own, dict) for own in found.values()), "vectors")
    for own in found.values():
        fits = all(isinstance(x, Tensor) and name in like and x.shape == like[name].shape for name, x in own.items())
        expect(fits, "vectors")
    return found  # type: ignore[no-any-return]


def _model(prefix: str, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model in the same order and memory layout, so that what is computed from it is the same to the bit."""
    model = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if _form(model) != _form(like):
        raise ValueError("belongs to another model")
    return {name: torch.empty_like(other).copy_(model[name]) for name, other in like.items()}


def _form(model: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.items()}


def _packed_memory(memory: object, tensors: dict[str, Tensor]) -> Any:
    """Write a strategy's memory as JSON; what is a tensor or an array goes into `tensors`.

    Plain values stay what they are, everything else becomes {kind: content}, so that all comes back as it was.
    """
    if memory is None or type(memory) in (bool, int, str):
        return memory
    if type(memory) is float:
        return memory if math.isfinite(memory) else {"float": repr(memory)}
    if isinstance(memory, Pacer):
        return {"pacer": dataclasses.asdict(memory)}
    if type(memory) in (list, tuple):
        return {type(memory).__name__: [_packed_memory(item, tensors) for item in memory]}  # type: ignore[attr-defined]
    if type(memory) is dict and all(type(key) is str for key in memory):
        return {"dict": {key: _packed_memory(item, tensors) for key, item in memory.items()}}
    tensor = memory if isinstance(memory, Tensor) else None
    if isinstance(memory, np.ndarray) and memory.dtype.kind in "biuf":
        tensor = torch.from_numpy(np.array(memory))
    if tensor is None:
        raise CannotBeSaved(
            f"a checkpoint cannot hold the memory of this strategy ({type(memory).__name__}); None, numbers, strings, "
            "arrays, tensors, and lists, tuples and dicts with string keys of them can be saved"
        )
    name = f"memory.{sum(key.startswith('memory.') for key in tensors)}"
    tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return {"tensor" if tensor is memory else "array": name}


def _memory_of(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_packed_memory`."""
    if not isinstance(document, dict):
        expect(document is None or type(document) in (bool, int, float, str), "memory")
        return document
    ((kind, content),) = document.items()
    if kind == "float":
        return float(content)
    if kind in ("list", "tuple"):
        items = [_memory_of(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _memory_of(item, tensors) for key, item in content.items()}
    if kind == "pacer":
        return _pacer(content)
    expect(kind in ("tensor", "array") and type(content) is str and content.startswith("memory."), "memory")
    return tensors[content].clone() if kind == "tensor" else tensors[content].numpy().copy()


def _pacer(document: Mapping[str, Any]) -> Pacer:
    percentile, gained = document["percentile"], tuple(document["gained"])
    expect(type(percentile) is float and 0 <= percentile <= 100, "pacer")
    expect(all(type(one) in (int, float) and math.isfinite(one) for one in gained), "pacer")
    return Pacer(percentile, gained)
