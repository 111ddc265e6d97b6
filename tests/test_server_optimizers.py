"""Server optimisers against their published rules, written out number by number, around methods of any kind."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from typing import Any

import numpy as np
import pytest
import torch

from feddd.core.units import units
from feddd.errors import InputError
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.feddd import FedDD
from feddd.strategies.packing import pack_state, unpack_state
from feddd.strategies.protocol import Fleet, Plan, ServerState, Upload, digest, make_fleet, start
from feddd.strategies.server_optimizers import FedAdam, FedAvgM, WithServerOptimizer, take_step
from worlds import experiment

NET = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
DELTAS = [0.5, -0.25, 0.0, 1.0]


def fleet() -> Fleet:
    links = np.ones(2)
    return make_fleet(links, links, links, [units(NET)] * 2, units(NET))


def initial() -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in NET.state_dict().items()}


def after_rounds(strategy: Any, state: ServerState, averages: list[dict[str, torch.Tensor]]) -> ServerState:
    for average in averages:
        plan = strategy.plan(state, fleet(), np.random.default_rng(0))
        uploads = [Upload(client, samples=1, train_loss=1.0, kept_share=1.0) for client in range(2)]
        state = strategy.absorb(state, fleet(), plan, uploads, average)
    return state


def test_momentum_follows_the_rule_of_hsu_et_al() -> None:
    weight, velocity, optimizer, memory = 1.0, 0.0, FedAvgM(momentum=0.5, learning_rate=2.0), {}
    model = {"w": torch.tensor([1.0])}
    for delta in DELTAS:
        velocity = 0.5 * velocity + delta
        weight += 2.0 * velocity
        model, memory = take_step(optimizer, model, {"w": model["w"] + delta}, memory, frozenset())
        assert model["w"].item() == pytest.approx(weight, rel=1e-6)


def test_adam_follows_the_rule_of_reddi_et_al() -> None:
    weight, mean, square, memory = 1.0, 0.0, 0.1**2, {}
    optimizer, model = FedAdam(learning_rate=0.3, beta1=0.8, beta2=0.9, tau=0.1), {"w": torch.tensor([1.0])}
    for delta in DELTAS:
        mean = 0.8 * mean + 0.2 * delta
        square = 0.9 * square + 0.1 * delta * delta
        weight += 0.3 * mean / (math.sqrt(square) + 0.1)
        model, memory = take_step(optimizer, model, {"w": model["w"] + delta}, memory, frozenset())
        assert model["w"].item() == pytest.approx(weight, rel=1e-5)


def test_without_momentum_and_at_full_pace_the_model_is_the_average_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    model, average = ({"w": torch.randn(10_000, generator=generator)} for _ in range(2))
    moved, _ = take_step(FedAvgM(momentum=0.0), model, average, {}, frozenset())
    assert torch.equal(moved["w"], average["w"])


def test_running_statistics_and_counters_take_the_average_and_weights_take_a_step() -> None:
    first = initial()
    average = {name: tensor + 1 for name, tensor in first.items()}
    after = after_rounds(WithServerOptimizer(FedAvg(), FedAvgM(0.0, 0.5)), start(first, 2), [average])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(after.model[name], average[name])
    for name in ("0.weight", "0.bias", "1.weight"):
        assert torch.allclose(after.model[name], first[name] + 0.5)


def test_what_nobody_sent_goes_on_in_its_direction_and_ever_slower() -> None:
    optimizer, memory, model = FedAvgM(momentum=0.5), {}, {"w": torch.zeros(1)}
    model, memory = take_step(optimizer, model, {"w": torch.ones(1)}, memory, frozenset())
    places = []
    for _ in range(3):
        model, memory = take_step(optimizer, model, model, memory, frozenset())
        places.append(model["w"].item())
    assert places == [1.5, 1.75, 1.875]


def test_a_round_in_which_nobody_counted_moves_nothing() -> None:
    strategy, first = WithServerOptimizer(FedAvg(), FedAvgM()), initial()
    state = after_rounds(strategy, start(first, 2), [{name: tensor + 1 for name, tensor in first.items()}])
    plan = strategy.plan(state, fleet(), np.random.default_rng(0))
    lost = strategy.absorb(state, fleet(), plan, [Upload(0, status="lost")], state.model)
    assert all(torch.equal(lost.model[name], tensor) for name, tensor in state.model.items())


@dataclasses.dataclass(frozen=True)
class Counting:
    """Counts its rounds in its memory, and refuses anybody else's."""

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        assert state.memory is None or state.memory == {"rounds": state.round}
        return Plan(state.round + 1, ())

    def absorb(self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Any, model: Any) -> ServerState:
        assert state.memory is None or state.memory == {"rounds": state.round}
        return digest(state, plan, uploads, model, {"rounds": plan.round})


def test_the_method_sees_its_own_memory_and_a_checkpoint_holds_both() -> None:
    strategy, first = WithServerOptimizer(Counting(), FedAdam()), initial()
    averages = [{name: tensor + step for name, tensor in first.items()} for step in (1, 2, 3)]
    state = after_rounds(strategy, start(first, 2), averages[:2])
    kept = unpack_state(*pack_state(state), first)
    whole, resumed = (after_rounds(strategy, one, averages[2:]) for one in (state, kept))
    assert whole.memory["method"] == {"rounds": 3}  # type: ignore[index]
    assert all(torch.equal(whole.model[name], resumed.model[name]) for name in first)


@pytest.mark.parametrize("method", [FedAvg(participation=0.5), FedDD(broadcast_every=3), FedDD(value_bits=4)])
def test_around_any_method_the_neutral_optimiser_changes_nothing(method: Any) -> None:
    world = build_world(experiment(fleet={"clients": 4}, data={"train_limit": 100}))
    with Simulation(world, workers=1) as simulation:
        plain, wrapped = (
            [record.state.model for record in simulation.run(strategy, 3)]
            for strategy in (method, WithServerOptimizer(method, FedAvgM(momentum=0.0)))
        )
    assert all(torch.equal(one[name], other[name]) for one, other in zip(plain, wrapped, strict=True) for name in one)


def test_a_toml_names_it_and_the_resolved_config_says_everything() -> None:
    given = {"name": "fedavg", "server": {"name": "fedavgm", "momentum": 0.5}}
    found = parse_experiment({"strategy": [given, {"name": "feddd", "server": {"name": f"{__name__}:halfway"}}]})
    assert found.strategy[0].options["server"] == {"name": "fedavgm", "momentum": 0.5, "learning_rate": 1.0}
    assert found.strategy[0].build() == WithServerOptimizer(FedAvg(), FedAvgM(0.5))
    assert found.strategy[1].build() == WithServerOptimizer(FedDD(), FedAvgM(0.0, 0.5))
    assert found.import_paths == [f"{__name__}:halfway"]
    assert parse_experiment(tomllib.loads(found.to_toml())) == found
    assert "server" not in parse_experiment({"strategy": [{"name": "fedavg"}]}).to_toml()


def halfway() -> FedAvgM:
    return FedAvgM(0.0, 0.5)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"name": "fedavgn"}, "did you mean 'fedavgm'"),
        ({"name": "fedavgm", "momentun": 0.9}, "server: unknown key momentun; did you mean 'momentum'"),
        ({"name": "fedavgm", "momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"name": "fedadam", "tau": 0.0}, "tau must be finite and above 0"),
        ("fedavgm", "server needs a name"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(server: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_experiment({"strategy": [{"name": "fedavg", "server": server}]})
    assert "\n" not in str(caught.value)
