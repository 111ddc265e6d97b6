"""A server's state as a file holds it: the same to the bit, the same layout in memory, or refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from feddd.strategies.oort import Pacer
from feddd.strategies.packing import MALFORMED, CannotBeSaved, pack_state, unpack_state
from feddd.strategies.protocol import Reference, ServerState, start


def state(memory: object = None) -> ServerState:
    tied = torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    model = {
        "b.weight": tied,
        "a.weight": tied,
        "conv.weight": torch.arange(36.0).reshape(2, 2, 3, 3).to(memory_format=torch.channels_last),
        "count": torch.tensor(7),
    }
    begun = start(model, 3)
    losses = np.array([0.1, np.nan, np.inf])
    reference = Reference({name: t + 1 for name, t in model.items()}, 2, np.array([2, 1, -1]))
    begun = begun.knowing(masks=[None, b"\x00\xff\x00", b""], losses=losses)
    return dataclasses.replace(begun, round=4, memory=memory, reference=reference)


def through_a_file(before: ServerState) -> ServerState:
    tensors, document = pack_state(before)
    return unpack_state(load(save(tensors)), json.loads(json.dumps(document)), before.model)


PLAIN: list[object] = [
    *(None, Pacer(35.0, (0.1, 1e300)), {"a": [1, 2.5, None, True, "x"]}, [], 0.1, (1, [2, ()]), float("inf")),
    {"list": {"tensor": "memory.0"}},
]


@pytest.mark.parametrize("memory", PLAIN, ids=str)
def test_a_state_comes_back_as_it_was(memory: object) -> None:
    before = state(memory)
    after = through_a_file(before)
    assert (after.round, after.masks, after.memory) == (before.round, before.masks, memory)
    for name in ("losses", "oort_statistics", "samples", "label_coverage", "kept_shares", "last_round"):
        assert np.array_equal(getattr(after, name), getattr(before, name), equal_nan=name != "last_round")
    assert after.reference
    assert before.reference
    assert (after.reference.number, after.reference.held.tolist()) == (2, [2, 1, -1])
    assert all(torch.equal(after.reference.model[name], t) for name, t in before.reference.model.items())
    assert list(after.model) == list(before.model)
    for name, tensor in before.model.items():
        assert torch.equal(after.model[name], tensor)
        assert (after.model[name].dtype, after.model[name].stride()) == (tensor.dtype, tensor.stride())


def test_tensors_and_arrays_in_a_memory_come_back_as_they_were() -> None:
    moments = {"m": torch.rand(3, 2).T, "v": [torch.tensor(2, dtype=torch.int64), np.array([[1.5, np.nan]])]}
    before = state(moments)
    own = {"left_out": np.array([True, False, True])}
    before = dataclasses.replace(before, clients=before.clients.with_own(own))
    after = through_a_file(before)
    assert isinstance(after.memory, dict)
    assert torch.equal(after.memory["m"], moments["m"])  # type: ignore[arg-type]
    assert torch.equal(after.memory["v"][0], torch.tensor(2))
    assert isinstance(after.memory["v"][1], np.ndarray)
    assert np.array_equal(after.memory["v"][1], np.array([[1.5, np.nan]]), equal_nan=True)
    assert after.client_memory["left_out"].tolist() == [True, False, True]
    assert after.client_memory["left_out"].dtype == np.bool_
    after.memory["v"][1][:] = 0.0  # memory of its own, to be written to


@pytest.mark.parametrize(
    "memory", [np.float64(1.0), {1: 2}, object(), {"a": {1}}, np.array([object()])], ids=lambda one: type(one).__name__
)
def test_a_memory_that_would_come_back_as_something_else_is_refused(memory: object) -> None:
    with pytest.raises(CannotBeSaved, match="cannot hold the memory"):
        pack_state(state(memory))


@pytest.mark.parametrize(
    "change",
    [
        {"round": ...},
        {"masks": ...},
        {"masks": 3},
        {"masks": [1]},
        {"masks": ["zz"]},
        {"memory": []},
        {"memory": {}},
        {"memory": {"array": "model.count"}},
        {"memory": {"tensor": "memory.9"}},
        {"client_memory": None},
        {"client_memory": {"dict": {"a": 1}}},
    ],
    ids=str,
)
def test_a_document_that_was_never_written_is_an_expected_error(change: dict[str, Any]) -> None:
    tensors, document = pack_state(state())
    changed = {key: value for key, value in (document | change).items() if value is not ...}
    with pytest.raises(MALFORMED):
        unpack_state(tensors, changed, state().model)


def test_another_model_is_refused() -> None:
    tensors, document = pack_state(state())
    for other in ({"count": torch.tensor(7.0)}, {"b.weight": torch.zeros(2, 3)}, {"new": torch.zeros(1)}):
        with pytest.raises(ValueError, match="another model"):
            unpack_state(tensors, document, {**state().model, **other})
