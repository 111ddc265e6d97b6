"""Adapters of low rank: a unit is a rank component, and what is frozen never crosses a wire; bytes are counted."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import nn

import feddd
from adapters import LowRank, Rows, peft_rows
from feddd import FedAvg, FedDD
from feddd.core.selection import select
from feddd.core.units import units
from feddd.experiments.running import build_world
from feddd.flower import RoundFacts
from feddd.simulation.simulator import Simulation, World
from flower_grid import MemoryGrid
from test_flower import grid_of, initial, strategy_of
from worlds import experiment

PAGE = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n# (\w+)\.py\n(.*?)```\n\n```toml\n(.*?)```", PAGE, re.S)
TINY = """
name = "tiny"
rounds = 2
data = { dataset = "fashion-mnist-mini", train_limit = 120 }
fleet = { clients = 4 }
"""
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="pip install feddd[peft]")
MODELS = ["adapters:Rows", pytest.param("adapters:peft_rows", marks=needs_peft)]
HEADERS = 256
"""Bytes of a payload besides its values: digest, sizes, a bit for every unit."""


def world_of(model: str, clients: int = 6, **training: Any) -> World:
    return build_world(
        experiment(
            fleet={"clients": clients},
            data={"train_limit": 40 * clients, "partition": "iid"},
            model={"name": model},
            training={"trainer": "reference", "batch_size": 20, **training},
        )
    )


def learnt(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_a_unit_is_a_row_of_a_with_its_column_of_b():
    model = LowRank(6, 5, rank=3)
    table = units(model)
    (layer,) = table.layers
    assert (layer.name, layer.units, layer.unit_elements) == ("lora", 3, 6 + 5)
    assert table.frozen == ("base.weight", "base.bias")
    with torch.no_grad():
        model.lora_A.copy_(torch.arange(18.0).view(3, 6))
        model.lora_B.copy_(100 + torch.arange(15.0).view(5, 3))
    mask = {"lora": torch.tensor([False, True, False])}
    values = table.take(model.state_dict(), mask)
    assert values.tolist() == [*range(6, 12), *(101 + 3 * row for row in range(5))]
    other = LowRank(6, 5, rank=3).state_dict()
    before = {name: tensor.clone() for name, tensor in other.items()}
    table.put(other, mask, values)
    # What the other end has of the component is now its product in full, and nothing else has changed.
    product = other["lora_B"][:, 1:2] @ other["lora_A"][1:2]
    torch.testing.assert_close(product, model.lora_B[:, 1:2] @ model.lora_A[1:2])
    assert torch.equal(other["lora_A"][[0, 2]], before["lora_A"][[0, 2]])
    assert torch.equal(other["lora_B"][:, [0, 2]], before["lora_B"][:, [0, 2]])


def test_a_rank_as_large_as_the_outputs_is_no_different():
    (layer,) = units(LowRank(6, 3, rank=3)).layers
    assert [(slot.name, slot.axis) for slot in layer.slots] == [("lora_A", 0), ("lora_B", 1)]


def test_halves_that_do_not_fit_keep_units_along_their_first_axis():
    model = LowRank(6, 5, rank=3)
    model.lora_B = nn.Parameter(torch.zeros(5, 2))
    assert [(layer.name, layer.units) for layer in units(model).layers] == [("", 3), ("lora_B", 5)]
    model.lora_B.requires_grad_(False)
    assert [(layer.units, layer.elements) for layer in units(model).layers] == [(3, 18)]


def test_the_whole_transformer_has_its_adapters_and_its_head_as_units():
    model = Rows()
    table = units(model)
    names = [f"blocks.{n}.{part}.lora" for n in range(2) for part in ("query", "value")]
    assert [layer.name for layer in table.layers] == [*names, "head"]
    assert table.elements == learnt(model)
    assert learnt(model) < 0.05 * sum(parameter.numel() for parameter in model.parameters())


@needs_peft
def test_adapters_of_peft_have_rank_components_too():
    model = peft_rows()
    table = units(model)
    assert table.elements == learnt(model)
    inner = "body.base_model.model.h"
    assert [layer.name for layer in table.layers] == [
        *(f"{inner}.{n}.attn.c_attn.lora.default" for n in range(2)),
        "head",
    ]
    assert [layer.units for layer in table.layers] == [4, 4, 10]


@pytest.mark.parametrize("selector", ["importance", "magnitude", "delta"])
def test_selection_keeps_the_components_that_moved(selector):
    model = LowRank(6, 5, rank=4)
    table = units(model)
    with torch.no_grad():
        model.lora_B.fill_(0.1)
        model.lora_A.fill_(0.1)
    before = {slot.name: model.state_dict()[slot.name].clone() for slot in table.slots}
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["lora_A"][2] += 5.0
    after["lora_B"][:, 2] += 5.0
    mask = select(before, after, 0.75, selector=selector, units=table)
    assert mask["lora"].tolist() == [False, False, True, False]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("method", "most"), [(FedAvg(), 4.0), (FedDD(), 4.0), (FedDD(value_bits=4), 0.7)])
def test_a_simulation_sends_the_adapters_alone(model, method, most):
    world = world_of(model, optimizer="adam", learning_rate=0.01)
    numbers = learnt(world.build_model())
    with Simulation(world, workers=1, wire=True) as simulation:
        records = list(simulation.run(method, 3))
    first, last = simulation.initial, records[-1].state.model
    for name in simulation.units.frozen:
        assert torch.equal(first[name], last[name])
    for slot in simulation.units.slots:
        assert not torch.equal(first[slot.name], last[slot.name])
    for record in records[1:]:
        for row in record.clients:
            assert row.upload.upload_bytes <= most * numbers + HEADERS
            assert row.upload.download_bytes <= 4 * numbers + HEADERS
    losses = [record.evaluation.loss for record in records if record.evaluation]
    assert losses[-1] < losses[0]


class Counting(MemoryGrid):
    """Counts the bytes of every array that a message carries, both ways."""

    def __init__(self, nodes: Any) -> None:
        super().__init__(nodes)
        self.down, self.up = [], []  # type: list[int], list[int]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        asked = list(messages)
        self.down += [_array_bytes(message) for message in asked]
        return super().push_messages(asked)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = list(super().pull_messages(message_ids))
        self.up += [_array_bytes(message) for message in answers]
        return answers


def _array_bytes(message: Message) -> int:
    if message.has_error():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bits", [32, 4])
def test_on_flower_the_adapters_alone_cross_the_wire_and_the_numbers_are_the_simulators(
    model: str, bits: int, tmp_path: Path
) -> None:
    world, method = world_of(model), FedDD(broadcast_every=2, value_bits=bits)
    numbers, everything = learnt(world.build_model()), sum(p.numel() for p in world.build_model().parameters())
    with Simulation(world, workers=1) as simulation:
        records = list(simulation.run(method, 3))
    facts: list[RoundFacts] = []
    grid = Counting(grid_of(world, tmp_path).nodes)
    result = strategy_of(world, method, facts).start(grid, initial(world), 3)
    for record, fact in zip(records, facts, strict=True):
        assert [u.upload_bytes for u in fact.uploads] == [row.upload.upload_bytes for row in record.clients]
    for key, tensor in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, records[-1].state.model[key], rtol=1e-4, atol=1e-5)
    # Three rounds of six clients, and their introductions and evaluations: never more than the adapters.
    assert len([size for size in grid.up if size]) >= 18
    assert max(grid.up) <= (4 if bits == 32 else 0.7) * numbers + HEADERS
    assert max(grid.down) <= 4 * numbers + HEADERS
    assert 4 * numbers + HEADERS < 0.1 * 4 * everything


@pytest.mark.parametrize(
    ("name", "code", "settings"), [pytest.param(*one, marks=needs_peft if one[0] == "hub" else ()) for one in EXAMPLES]
)
def test_an_example_of_the_page_runs_as_it_stands(
    name: str, code: str, settings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(TINY + settings, encoding="utf-8")
    results = feddd.run(tmp_path / "experiment.toml", tmp_path / "run", workers=1, wire=True)
    made = build_world(feddd.load_experiment(tmp_path / "experiment.toml")).build_model()
    whole = sum(tensor.numel() for tensor in made.state_dict().values())
    assert max(results.tables["clients"]["upload_bytes"].to_pylist()) < 0.2 * 4 * whole


def test_the_page_has_both_examples() -> None:
    assert [name for name, _, _ in EXAMPLES] == ["rows", "hub"]
    assert len(re.findall(r"^```python", PAGE, re.M)) == 2
