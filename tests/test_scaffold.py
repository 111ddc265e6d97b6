"""SCAFFOLD against the published algorithm, what it costs, and that it survives workers, wires and interruptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from feddd import FedAvg, FedDD, InputError
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation, World
from feddd.simulation.snapshot import pack_snapshot, unpack_snapshot
from feddd.simulation.training import batches
from feddd.strategies.protocol import draw_clients
from feddd.strategies.scaffold import CONTROL, SCAFFOLD, ControlVariates
from feddd.strategies.with_rules import Momentum, WithRules
from feddd.wire.chosen import everything, zeros
from feddd.wire.exchange import chain, write
from feddd.wire.stage import Update
from feddd.world.models import build
from worlds import experiment

ROUNDS = 3


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(experiment(fleet={"clients": 6}, data={"train_limit": 240}, training={"epochs": 2}))


def records(world: World, strategy: Any, rounds: int = ROUNDS, **options: Any) -> list[RoundRecord]:
    with Simulation(world, **{"workers": 1} | options) as simulation:
        return list(simulation.run(strategy, rounds))


def same(left: RoundRecord, right: RoundRecord) -> bool:
    pairs = [(left.state.model, right.state.model)]
    pairs += [(own, right.state.vectors[name]) for name, own in left.state.vectors.items()]
    return all(torch.equal(one[name], other[name]) for one, other in pairs for name in one)


def published(world: World, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run algorithm 1 with option II in a plain loop; models are averaged by samples, the changes of c evenly."""
    data, training, clients = world.dataset, world.training, len(world.parts)
    model = build(world.model, data.image_shape, data.classes, seed=world.seed)
    x = {name: own.detach().clone() for name, own in model.named_parameters()}
    c = {name: torch.zeros_like(own) for name, own in x.items()}
    c_i = [dict(c) for _ in range(clients)]
    scale, shift = (torch.from_numpy(one).float().view(-1, 1, 1) for one in (data.scale, data.shift))
    for number in range(1, ROUNDS + 1):
        chosen = draw_clients(clients, share, stream(world.seed, "strategy", number))
        total = sum(len(world.parts[client]) for client in chosen)
        new_x = {name: torch.zeros_like(own) for name, own in x.items()}
        change = {name: torch.zeros_like(own) for name, own in x.items()}
        for client in chosen:
            part, rng = world.parts[client], stream(world.seed, "batches", number, client)
            images = torch.from_numpy(data.train_images[part]).float() * scale + shift
            labels = torch.from_numpy(data.train_labels[part]).long()
            model.load_state_dict(x)
            rng.integers(2**63)
            steps = 0
            for index in batches(len(part), training, rng):
                loss = functional.cross_entropy(model(images[index]), labels[index])
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for (name, y), gradient in zip(model.named_parameters(), gradients, strict=True):
                        y.sub_(training.learning_rate * (gradient - c_i[client][name] + c[name]))
                steps += 1
            for name, y in model.named_parameters():
                new = c_i[client][name] - c[name] + (x[name] - y.detach()) / (steps * training.learning_rate)
                change[name] += (new - c_i[client][name]) / clients
                c_i[client] = c_i[client] | {name: new}
                new_x[name] += y.detach() * len(part) / total
        x, c = new_x, {name: own + change[name] for name, own in c.items()}
    return x, c


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_it_is_the_published_algorithm(world: World, share: float) -> None:
    state = records(world, SCAFFOLD(share))[-1].state
    model, control = published(world, share)
    for name in model:
        torch.testing.assert_close(state.model[name], model[name], rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(state.vectors[CONTROL][name], control[name], rtol=1e-3, atol=2e-4)


def test_the_first_round_is_fedavg_and_later_ones_are_not(world: World) -> None:
    found, plain = records(world, SCAFFOLD()), records(world, FedAvg())
    for name, own in plain[0].state.model.items():
        torch.testing.assert_close(found[0].state.model[name], own, rtol=1e-4, atol=1e-5)
    assert float((found[1].state.model["fc1.weight"] - plain[1].state.model["fc1.weight"]).abs().max()) > 1e-4


def test_a_second_vector_travels_both_ways_and_is_charged(world: World) -> None:
    table = units(build(world.model, world.dataset.image_shape, world.dataset.classes))
    payload = len(write(chain(), Update(zeros(table, 1), everything(table, 1)), 0, table))
    (found,), (plain,) = records(world, SCAFFOLD(), 1), records(world, FedAvg(), 1)
    for row, other in zip(found.clients, plain.clients, strict=True):
        assert row.upload.upload_bytes == other.upload.upload_bytes + payload == 2 * payload
        assert row.upload.download_bytes == other.upload.download_bytes + payload == 2 * payload
        assert row.upload_seconds == pytest.approx(2 * other.upload_seconds)
        assert row.download_seconds == pytest.approx(2 * other.download_seconds)


@pytest.mark.parametrize("options", [{"workers": 2}, {"wire": True}], ids=str)
def test_workers_and_a_real_wire_change_nothing(world: World, options: dict[str, Any]) -> None:
    assert same(records(world, SCAFFOLD(0.5))[-1], records(world, SCAFFOLD(0.5), **options)[-1])


def test_a_checkpoint_holds_both_ends_control_variates(world: World) -> None:
    whole = records(world, SCAFFOLD(0.5), 4)
    with Simulation(world, workers=1) as simulation:
        half = list(simulation.run(SCAFFOLD(0.5), 2))[-1]
        snapshot = simulation.snapshot(half, simulation.holding(SCAFFOLD(0.5), half.state))
    assert all(CONTROL in state for state in snapshot.clients.values())
    assert snapshot.clients
    restored = unpack_snapshot(*pack_snapshot(snapshot), like=dict(half.state.model))
    with Simulation(world, workers=1) as simulation:
        rest = list(simulation.run(SCAFFOLD(0.5), 4, after=restored))
    assert [record.round for record in rest] == [3, 4]
    assert same(rest[-1], whole[-1])


def test_clients_that_never_answer_leave_their_mark_nowhere(world: World) -> None:
    lossy = build_world(
        experiment(fleet={"clients": 6}, data={"train_limit": 240}, faults={"lost": 0.4, "garbage": 0.2})
    )
    rows = [row for record in records(lossy, SCAFFOLD()) for row in record.clients]
    assert {row.upload.status.split(":")[0] for row in rows} >= {"ok", "lost", "refused"}
    assert all(np.isfinite(row.upload_seconds) for row in rows)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (WithRules(FedDD(), (ControlVariates(),)), "does not travel whole and in float32"),
        (WithRules(FedAvg(value_bits=4), (ControlVariates(),)), "does not travel whole and in float32"),
        (WithRules(SCAFFOLD(), (Momentum(),)), "ControlVariates beside Momentum"),
        (WithRules(SCAFFOLD(), (ControlVariates(),)), "ControlVariates beside ControlVariates"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(world: World, strategy: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        records(world, strategy, 1)
    assert "\n" not in str(caught.value)


def test_it_knows_no_bits() -> None:
    with pytest.raises(InputError, match="unknown key value_bits"):
        parse_experiment({"strategy": [{"name": "scaffold", "value_bits": 4}]})


def test_a_deployment_is_told_that_it_cannot() -> None:
    with pytest.raises(NotImplementedError, match="ControlVariates is for simulations"):
        _ = ControlVariates().config
