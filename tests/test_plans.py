"""Plans are carried out task by task or refused; planning and absorbing leave their arguments as they were."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import feddd
from feddd import FedAvg, FedCS, FedDD, Oort
from feddd.errors import InputError
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.strategies.federated_dropout import FederatedDropout
from feddd.strategies.fedrolex import FedRolex
from feddd.strategies.fjord import FjORD
from feddd.strategies.heterofl import HeteroFL
from feddd.strategies.protocol import Plan, Task, check_plan, digest
from feddd.strategies.stc import STC
from feddd.strategies.topk import TopK
from feddd.wire.difference import Difference
from feddd.wire.down import Moves, SubModel, Values
from feddd.wire.exchange import chain
from feddd.wire.format import pack_mask
from feddd.wire.quantised import Bits
from feddd.wire.select import Blocks
from worlds import experiment

METHODS: dict[str, Any] = {
    "feddd": FedDD(broadcast_every=2),
    "uniform": FedDD(rates="uniform", selector="random"),
    "4 bits": FedDD(broadcast_every=2, value_bits=4, error_feedback="all"),
    "progress": FedDD(budget="auto", broadcast_error=1e-3),
    "seconds": FedDD(budget="auto", auto_target="round_seconds", auto_value=20.0),
    "bytes": FedDD(budget="auto", auto_target="run_bytes", auto_value=1e6, auto_rounds=4),
    "leave out": FedDD(leave_out=0.4, max_absence=2),
    "fedavg": FedAvg(participation=0.5, value_bits=8),
    "fedcs": FedCS(),
    "deadline": FedCS(mode="deadline", deadline_seconds=1e9),
    "oort": Oort(),
    "oort budget": Oort(mode="budget"),
    "heterofl": HeteroFL(),
    "fjord": FjORD(),
    "fedrolex": FedRolex(),
    "federated dropout": FederatedDropout(),
    "top-k": TopK(),
    "stc": STC(),
}


def small_world(**changes: Any) -> Any:
    return build_world(experiment(fleet={"clients": 6}, data={"train_limit": 180}, **changes))


@pytest.fixture(scope="module")
def simulation() -> Any:
    with Simulation(small_world(), workers=1) as simulation:
        yield simulation


@dataclass(frozen=True)
class Twice:
    """Calls a strategy twice, and looks whether it has changed anything that it was given."""

    strategy: Any

    def plan(self, state: Any, fleet: Any, rng: np.random.Generator) -> Plan:
        given = (state, fleet)
        before, again = copy.deepcopy(given), copy.deepcopy(rng)
        first = self.strategy.plan(state, fleet, rng)
        assert first == self.strategy.plan(state, fleet, again)
        assert_same(given, before)
        return first  # type: ignore[no-any-return]

    def absorb(self, *given: Any) -> Any:
        before = copy.deepcopy(given)
        first = self.strategy.absorb(*given)
        kept = copy.deepcopy(first)
        assert_same(self.strategy.absorb(*given), first)
        assert_same(first, kept)
        assert_same(given, before)
        return first


def assert_same(a: Any, b: Any) -> None:
    """Two trees of facts hold the same, to the bit."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert repr(a) == repr(b)


@pytest.mark.parametrize("name", METHODS)
def test_planning_and_absorbing_twice_gives_the_same_and_changes_nothing(name: str, simulation: Simulation) -> None:
    assert len(list(simulation.run(Twice(METHODS[name]), 4))) == 4


# Plans whose tasks differ


@dataclass(frozen=True)
class Some(FedAvg):
    """The tasks of another strategy for some clients, of a third for the others."""

    these: Any = None
    those: Any = None
    first: int = 3

    def plan(self, state: Any, fleet: Any, rng: Any) -> Plan:
        left, right = (one.plan(state, fleet, copy.deepcopy(rng)) for one in (self.these, self.those))
        mine = [task for task in left.tasks if task.client < self.first]
        return dataclasses.replace(left, tasks=(*mine, *(task for task in right.tasks if task.client >= self.first)))


def uploads_of(simulation: Simulation, strategy: Any, rounds: int) -> list[dict[int, Any]]:
    return [{row.upload.client: row.upload for row in record.clients} for record in simulation.run(strategy, rounds)]


@pytest.mark.parametrize(
    ("these", "those"),
    [
        (TopK(0.1), FedAvg()),
        (FedAvg(), TopK(0.1)),
        (HeteroFL(), FedAvg()),
        (FedDD(), HeteroFL()),
        (TopK(0.1), TopK(0.3)),
        (FedDD(value_bits=4), FedDD(value_bits=4, error_feedback="rounded")),
    ],
    ids=str,
)
def test_a_mixed_plan_gives_everybody_its_own_task(these: Any, those: Any, simulation: Simulation) -> None:
    mixed = uploads_of(simulation, Some(these=these, those=those), 1)
    alone = {True: uploads_of(simulation, these, 1), False: uploads_of(simulation, those, 1)}
    for client, upload in mixed[0].items():
        own = alone[client < 3][0][client]
        assert (upload.upload_bytes, upload.download_bytes, upload.kept_share) == (
            own.upload_bytes,
            own.download_bytes,
            own.kept_share,
        )
        assert upload.train_loss == pytest.approx(own.train_loss, rel=1e-5)
    assert len({upload.upload_bytes for upload in mixed[0].values()}) > 1 or these.value_bits < 32


def test_full_models_beside_top_k_are_averaged_as_what_they_are(simulation: Simulation) -> None:
    """One client sends k elements, added to the server's model; the others all: the average is that of the parts."""
    strategy = Some(these=TopK(0.1), those=FedAvg(), first=1)
    (record,) = simulation.run(strategy, 1)
    (full,) = simulation.run(FedAvg(), 1)
    (top,) = simulation.run(Some(these=TopK(0.1), those=FedAvg(), first=6), 1)
    assert record.mask_error is None
    assert not torch.equal(record.state.model["fc1.weight"], full.state.model["fc1.weight"])
    assert not torch.equal(record.state.model["fc1.weight"], top.state.model["fc1.weight"])
    # Alone, each client's part shows; all of them weighted by their samples are the mixed average.
    numerator, weight = 0.0, 0
    for client in range(6):
        method = TopK(0.1) if client == 0 else FedAvg()
        (alone,) = simulation.run(Only(method=method, client=client), 1)
        samples = alone.clients[0].upload.samples
        numerator, weight = numerator + samples * alone.state.model["fc1.weight"].double(), weight + samples
    torch.testing.assert_close(record.state.model["fc1.weight"], (numerator / weight).float(), rtol=1e-4, atol=1e-6)


@dataclass(frozen=True)
class Only(FedAvg):
    """One client of a method's plan."""

    method: Any = None
    client: int = 0

    def plan(self, state: Any, fleet: Any, rng: Any) -> Plan:
        plan = self.method.plan(state, fleet, rng)
        return dataclasses.replace(plan, tasks=tuple(task for task in plan.tasks if task.client == self.client))


def _impossible(simulation: Simulation) -> dict[str, Plan]:
    full = simulation.units.full_mask()
    mask = pack_mask(full, simulation.units)
    full[simulation.units.layers[0].name][0] = False
    other = pack_mask(full, simulation.units)
    return {
        "another sub-model than the one that it is sent": Plan(1, (Task(0, chain(Blocks(mask)), SubModel(other)),)),
        "client 1 for another sub-model": Plan(1, (Task(0), Task(1, chain(Blocks(mask))))),
        "client 2 for another sub-model": Plan(1, (Task(2, down=SubModel(mask)),)),
        "a difference, but the server": Plan(1, (Task(0, chain(Difference()), Values(mask)),)),
        "a difference, but": Plan(1, (Task(0, chain(Difference(), Blocks(mask)), SubModel(mask)),)),
        "moves of one reference": Plan(1, (Task(0), Task(1, down=Moves(coding=chain(Bits(4)))))),
        "something else than the others": Plan(
            1, (Task(0, down=Moves(coding=chain(Bits(4)))), Task(1, down=Moves(coding=chain(Bits(8)))))
        ),
        "to all, or to nobody": Plan(
            1,
            (
                Task(0, down=Moves(coding=chain(Bits(4)), broadcast=True)),
                Task(1, down=Moves(coding=chain(Bits(4)))),
            ),
        ),
        "each of its clients once": Plan(1, (Task(0), Task(0))),
        "numbers from 0 to 5": Plan(1, (Task(6),)),
    }


def test_what_excludes_each_other_is_refused_before_the_round(simulation: Simulation) -> None:
    for words, plan in _impossible(simulation).items():
        with pytest.raises(ValueError, match=words):
            check_plan(plan, 6, simulation.units)
        with pytest.raises(InputError, match=f"in round 1 .*{words}"):
            list(simulation.run(Fixed(plan=plan), 1))


@dataclass(frozen=True)
class Fixed(FedAvg):
    plan_: Any = None

    def __init__(self, plan: Plan) -> None:
        object.__setattr__(self, "plan_", plan)

    def plan(self, state: Any, fleet: Any, rng: Any) -> Plan:
        return self.plan_  # type: ignore[no-any-return]


def differences_of_sub_models() -> Any:
    @dataclass(frozen=True)
    class Differences(HeteroFL):
        def plan(self, state: Any, fleet: Any, rng: Any) -> Plan:
            plan = super().plan(state, fleet, rng)
            tasks = (dataclasses.replace(task, up=chain(Difference(), *task.up.stages)) for task in plan.tasks)
            return dataclasses.replace(plan, tasks=tuple(tasks))

    return Differences()


def test_an_impossible_plan_of_ones_own_strategy_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    wrong = experiment(strategy=[{"name": "test_plans:differences_of_sub_models", "label": "own"}])
    with pytest.raises(InputError, match="strategy 'own': in round 1 the plan asks client 0 for a difference, but"):
        feddd.run(wrong, tmp_path / "run", workers=1)
    assert not (tmp_path / "run").exists()


def test_memory_of_clients_has_a_number_for_each_of_them(simulation: Simulation) -> None:
    (record,) = simulation.run(FedAvg(), 1)
    with pytest.raises(ValueError, match="client_memory 'seen'"):
        digest(record.state, Plan(2, ()), [], {}, client_memory={"seen": np.zeros(5)})
