"""Frozen parameters, strategies' memory and absent nodes on Flower: what follows a client and what never moves."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from feddd import FedAvg, FedDD
from feddd.core.units import units
from feddd.experiments.running import build_world
from feddd.flower import FedDDStrategy, FixedLinks, Link, RoundFacts, feddd_mod
from feddd.flower.checkpoint import load_checkpoint
from feddd.flower.registry import grown
from feddd.simulation.simulator import Simulation
from feddd.strategies.protocol import digest, start
from flower_grid import MemoryGrid
from test_flower import grid_of, initial, small_world, strategy_of
from worlds import experiment


def adapter(base: float = 1.0) -> nn.Module:
    """A large frozen base and a small head."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(base)
        model[1].weight.fill_(0.1)
    model[0].requires_grad_(False)
    return model


def adapter_app(folder: Path, bases: dict[int, float]) -> ClientApp:
    """The base of each client, by its number; a client with another one must not be trained without a word."""

    def made(context_base: list[float]) -> nn.Module:
        return adapter(context_base[0])

    current = [1.0]
    app = ClientApp(mods=[_sets(current, bases), feddd_mod(lambda: made(current), store=folder)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        after = message.content["arrays"].to_torch_state_dict()
        assert float(after["0.weight"][0, 0]) == 1.0  # the base is there, though it never travelled
        after["1.weight"] = after["1.weight"] + 0.1
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 5})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    return app


def _sets(current: list[float], bases: dict[int, float]) -> Any:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        current[0] = bases.get(int(context.node_config["partition-id"]), 1.0)
        return call_next(message, context)  # type: ignore[no-any-return]

    return mod


def run_adapters(folder: Path, bases: dict[int, float], **method: Any) -> tuple[list[RoundFacts], dict[str, Any]]:
    grid = MemoryGrid({100 + n: (adapter_app(folder, bases), {"partition-id": n}) for n in range(3)})
    facts: list[RoundFacts] = []
    links = FixedLinks({str(n): Link(1e4, 1e4) for n in range(3)})
    model = adapter()
    strategy = FedDDStrategy(
        FedDD(**method), model, links=links, deadline_seconds=5.0, poll_seconds=0.01, on_round=facts.append
    )
    result = strategy.start(grid, ArrayRecord(dict(model.state_dict())), 3)
    return facts, dict(result.arrays.to_torch_state_dict())


@pytest.mark.parametrize("bits", [32, 4])
def test_only_what_is_trained_crosses_the_wire(bits: int, tmp_path: Path) -> None:
    facts, after = run_adapters(tmp_path, {}, value_bits=bits)
    head = 4 * (50 * 3 + 3)
    for fact in facts:
        for upload in fact.uploads:
            assert upload.status == "ok"
            assert 0 < upload.upload_bytes <= head + 64
            assert 0 < upload.download_bytes <= 2 * (head + 64)
    assert torch.equal(after["0.weight"], torch.ones(50, 40))
    assert float(after["1.weight"].mean()) > 0.3
    assert units(adapter()).frozen == ("0.weight", "0.bias")


def test_a_client_with_other_frozen_values_is_refused_with_the_reason(tmp_path: Path) -> None:
    facts, after = run_adapters(tmp_path, {2: 1.5})
    for fact in facts:
        assert [upload.status for upload in fact.uploads[:2]] == ["ok", "ok"]
        assert "frozen parameters of this client's network are not those of the server's" in fact.uploads[2].status
    assert torch.equal(after["0.weight"], torch.ones(50, 40))


def test_a_deployment_of_a_frozen_model_gives_the_simulators_numbers(tmp_path: Path) -> None:
    world = build_world(
        experiment(
            fleet={"clients": 6},
            training={"trainer": "reference"},
            data={"train_limit": 240},
            model={"name": "own_models:frozen_first_layer"},
        )
    )
    method = FedDD(broadcast_every=3)
    with Simulation(world, workers=1) as simulation:
        records = list(simulation.run(method, 4))
    facts: list[RoundFacts] = []
    result = strategy_of(world, method, facts).start(grid_of(world, tmp_path), initial(world), 4)
    for record, fact in zip(records, facts, strict=True):
        assert [u.upload_bytes for u in fact.uploads] == [row.upload.upload_bytes for row in record.clients]
        assert [u.mask for u in fact.uploads] == [row.upload.mask for row in record.clients]
    for key, tensor in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, records[-1].state.model[key], rtol=1e-5, atol=1e-6)


# Memory


def test_who_was_left_out_follows_the_clients_that_are_there() -> None:
    state = start({"w": torch.zeros(2)}, 6)
    own = {"left_out": np.arange(6) == 5, "seen": np.arange(6), "norm": np.arange(6.0)}
    state = dataclasses.replace(state, clients=state.clients.with_own(own))
    some = state.clients.take([2, 3, 5])
    assert some["left_out"].tolist() == [False, False, True]
    assert some["seen"].tolist() == [2, 3, 5]
    more = grown(state, 8)
    assert more.client_memory["left_out"].tolist() == [False] * 5 + [True, False, False]
    assert more.client_memory["seen"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert np.isnan(more.client_memory["norm"][6:]).all()


def test_leaving_out_clients_while_nodes_are_offline_addresses_the_right_ones(tmp_path: Path) -> None:
    world, facts = small_world(), list[RoundFacts]()
    grid = grid_of(world, tmp_path)

    def watch(fact: RoundFacts) -> None:
        facts.append(fact)
        grid.offline = {1000, 1001} if fact.round in (2, 3, 4) else set()

    method = FedDD(broadcast_every=4, leave_out=0.4, max_absence=3)
    strategy_of(world, method, facts, on_round=watch).start(grid, initial(world), 6)
    full = max(upload.download_bytes for upload in facts[0].uploads)
    asked = [{upload.client for upload in fact.uploads} for fact in facts]
    assert asked[0] == asked[4] | {0, 1} == set(range(6))  # everybody who is there takes part in a broadcast
    assert all(len(one) < 6 for one in asked[1:4])
    assert all(not one & {0, 1} for one in asked[2:5])
    assert all(upload.status == "ok" for fact in facts for upload in fact.uploads)
    for fact in facts[2:]:
        for upload in fact.uploads:
            # The full model for a broadcast (round 5), for who was away then, and for who holds a full mask since.
            away = fact.round == 6 and upload.client in (0, 1)
            since = [one.round for one in facts[: fact.round - 1] if upload.client in {u.client for u in one.uploads}]
            everything = fact.round == 5 or away or since[-1] == 1
            assert (upload.download_bytes == full) == everything, (fact.round, upload.client)


@dataclass(frozen=True)
class Momentum(FedAvg):
    """Remembers a tensor and an array."""

    def absorb(self, state: Any, fleet: Any, plan: Any, uploads: Any, model: Any) -> Any:
        before = state.memory["step"] if state.memory else {name: torch.zeros_like(t) for name, t in model.items()}
        step = {name: 0.5 * before[name] + model[name] - state.model[name] for name in model}
        seen = state.client_memory.get("seen", np.zeros(len(state.masks), dtype=np.int64)).copy()
        for upload in uploads:
            seen[upload.client] += 1
        new = {name: state.model[name] + step[name] for name in model}
        return digest(state, plan, uploads, new, {"step": step}, {"seen": seen})


def test_a_memory_of_tensors_is_saved_and_a_killed_server_goes_on_with_it(tmp_path: Path) -> None:
    world, file = small_world(), tmp_path / "server.safetensors"
    whole = strategy_of(world, Momentum(), []).start(grid_of(world, tmp_path / "a"), initial(world), 4)
    grid = grid_of(world, tmp_path / "b")
    strategy_of(world, Momentum(), [], checkpoint=file).start(grid, initial(world), 2)
    kept = load_checkpoint(file, dict(initial(world).to_torch_state_dict())).state
    assert kept.client_memory["seen"].tolist() == [2] * 6
    resumed = strategy_of(world, Momentum(), [], checkpoint=file).start(grid, initial(world), 4)
    for key, tensor in whole.arrays.to_torch_state_dict().items():
        assert torch.equal(tensor, resumed.arrays.to_torch_state_dict()[key])


@dataclass(frozen=True)
class Unsaveable(FedAvg):
    def absorb(self, *given: Any) -> Any:
        return digest(given[0], given[2], given[3], given[4], memory=object())


def test_a_memory_that_no_file_can_hold_is_a_warning_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, facts = small_world(), list[RoundFacts]()
    options = {"checkpoint": tmp_path / "server.safetensors"}
    strategy_of(world, Unsaveable(), facts, **options).start(grid_of(world, tmp_path), initial(world), 3)
    assert len(facts) == 3
    assert caplog.text.count("no more checkpoints") == 1
    assert "(object)" in caplog.text
