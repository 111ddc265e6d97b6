"""What FedDD chooses by itself: the budget for a target, when to broadcast, and who stays out of a round."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation
from feddd.strategies.feddd import FedDD
from feddd.strategies.feddd_rules import (
    STEP,
    TRIALS,
    BytesBudget,
    Coming,
    FixedBudget,
    ProgressBudget,
    RunBytesBudget,
    SecondsBudget,
)
from feddd.strategies.protocol import Plan, Task, Upload, start
from test_protocol import fleet_of, state_of
from worlds import experiment


@pytest.fixture(scope="module")
def simulation() -> Iterator[Simulation]:
    with Simulation(build_world(experiment(fleet={"clients": 8}, data={"train_limit": 240})), workers=1) as made:
        yield made


def run(simulation: Simulation, rounds: int = 8, **options: Any) -> list[RoundRecord]:
    return list(simulation.run(FedDD(**options), rounds))


def sent(record: RoundRecord) -> float:
    return sum(row.upload.upload_bytes + row.upload.download_bytes for row in record.clients)


def coming(seconds_at: Callable[[float], float] = lambda budget: budget, **known: Any) -> Coming:
    """Round 2 of ten clients that each upload 80 bits that can be dropped and 8 that cannot, and are sent the same."""
    fleet = dataclasses.replace(fleet_of([10.0] * 10), droppable_bits=np.full(10, 80.0), fixed_bits=np.full(10, 8.0))
    return Coming(state_of(fleet, **known), fleet, np.ones(10, dtype=np.bool_), 0.2, seconds_at)


@given(st.floats(0.2, 1.0), st.floats(1.0, 100.0))
def test_the_budget_for_a_time_is_the_largest_that_keeps_it(wanted: float, scale: float) -> None:
    found = SecondsBudget(scale * wanted).choose(coming(lambda budget: scale * budget))
    assert found == pytest.approx(wanted, abs=1e-6)
    assert scale * found <= scale * wanted * (1 + 1e-9)
    assert SecondsBudget(0.0).choose(coming(lambda budget: scale * budget)) == 0.2


def test_the_budget_for_bytes_leaves_room_for_what_comes_down() -> None:
    # 110 bytes come down, 10 go up in any case, 100 if nothing is dropped.
    assert BytesBudget(170.0).choose(coming()) == pytest.approx(0.5)
    assert BytesBudget(80.0).choose(coming()) == 0.2
    assert BytesBudget(1e9).choose(coming()) == 1.0


def test_a_runs_bytes_are_shared_by_the_rounds_that_are_left() -> None:
    rule = RunBytesBudget(1000.0, rounds=6)
    upload = Upload(0, upload_bytes=40, download_bytes=10)
    spent = rule.remember({"spent": 100.0}, Plan(1, ()), [upload], coming().fleet)
    assert spent == {"spent": 150.0}
    assert rule.choose(coming(memory=spent)) == BytesBudget(850.0 / 5).choose(coming())
    assert rule.choose(coming(memory={"spent": 2000.0})) == 0.2


@pytest.mark.parametrize("better", ["below", "above"])
def test_trials_move_to_the_budget_that_brings_more_per_second(better: str) -> None:
    rule, fleet = ProgressBudget(0.2), coming().fleet
    tried = [rule.choose(coming(round=number)) for number in (0, 1)]
    assert tried == [0.6 / STEP, 0.6 * STEP]
    memory: dict[str, Any] = {}
    loss = 10.0
    for number in range(1, 2 * TRIALS + 2):
        upload = Upload(0, train_loss=loss, samples=1, upload_bytes=1, download_bytes=1)
        memory = rule.remember(memory, Plan(number, ()), [upload], fleet)
        tried_below = number % 2 == 1
        loss -= 0.2 if tried_below == (better == "below") else 0.1
    assert memory["budget"] == pytest.approx(0.6 / STEP if better == "below" else 0.6 * STEP)
    assert memory["gains"] == [[0.0, 0.0, 0], [0.0, 0.0, 0]]
    assert rule.remember(memory, Plan(99, ()), [], fleet) == memory


def test_fedds_fields_make_its_rules() -> None:
    assert FedDD(budget=0.4).budget_rule == FixedBudget(0.4)
    assert FedDD(budget="auto", max_dropout=0.75).budget_rule == ProgressBudget(0.25)
    rules = {"round_seconds": SecondsBudget(5.0), "round_bytes": BytesBudget(5.0), "run_bytes": RunBytesBudget(5.0, 7)}
    for target, rule in rules.items():
        made: Any = FedDD(budget="auto", auto_target=target, auto_value=5.0, auto_rounds=7)  # type: ignore[arg-type]
        assert made.budget_rule == rule


def test_a_round_keeps_to_its_time(simulation: Simulation) -> None:
    plain = run(simulation)
    wanted = 0.8 * np.mean([record.round_seconds for record in plain[2:]])
    timed = run(simulation, budget="auto", auto_target="round_seconds", auto_value=float(wanted), download="fixed")
    # Masks are rounded to whole units, so that a round may take a little more than was planned.
    assert all(record.round_seconds <= 1.1 * wanted for record in timed[2:] if record.round % 5 != 1)
    assert np.mean([record.round_seconds for record in timed[2:]]) < np.mean([r.round_seconds for r in plain[2:]])


def test_a_round_keeps_to_its_bytes_and_a_run_to_its(simulation: Simulation) -> None:
    whole = sent(run(simulation, 2)[0])
    rounds = run(simulation, budget="auto", auto_target="round_bytes", auto_value=0.6 * whole)
    settled = [record for record in rounds[2:] if record.round % 5 != 1]
    assert all(sent(record) == pytest.approx(0.6 * whole, rel=0.05) for record in settled)
    spread = run(simulation, 12, budget="auto", auto_target="run_bytes", auto_value=8 * whole, auto_rounds=12)
    assert sum(sent(record) for record in spread) == pytest.approx(8 * whole, rel=0.05)


def test_progress_tries_two_budgets_in_turn(simulation: Simulation) -> None:
    rounds = run(simulation, 6, budget="auto")
    shares = [np.mean([row.upload.kept_share for row in record.clients]) for record in rounds]
    assert shares[2] == pytest.approx(0.6 / STEP, rel=0.05)
    assert shares[3] == pytest.approx(0.6 * STEP, rel=0.05)


def test_errors_of_the_masks_call_for_a_broadcast(simulation: Simulation) -> None:
    never = run(simulation, broadcast_every=0)
    errors = [record.mask_error or 0.0 for record in never]
    limit = sum(errors[:4]) * 1.0001  # rounds 1 to 4 stay below it, round 5 passes it
    rounds = run(simulation, broadcast_every=0, broadcast_error=limit)
    full = max(row.upload.download_bytes for row in rounds[0].clients)
    broadcast = [all(row.upload.download_bytes == full for row in record.clients) for record in rounds]
    assert broadcast[:6] == [True, True, False, False, False, True]  # round 2 downloads what round 1 sent: all


def test_those_that_bring_least_stay_out_but_not_for_long(simulation: Simulation) -> None:
    rounds = run(simulation, 12, leave_out=0.25, max_absence=2)
    taking_part = [{row.upload.client for row in record.clients} for record in rounds]
    assert taking_part[0] == set(range(8))
    assert all(len(there) == 6 for there in taking_part[1:4])
    assert all(len(taking_part[number]) == 8 for number in (5, 10)), "somebody would miss a broadcast"
    for client in range(8):
        away = "".join("." if client in there else "x" for there in taking_part)
        assert "xxx" not in away
    plain = run(simulation, 4)
    for left_out, everybody in zip(rounds[2:4], plain[2:4], strict=True):
        kept = sum(row.upload.upload_bytes for row in left_out.clients)
        assert kept == pytest.approx(sum(row.upload.upload_bytes for row in everybody.clients), rel=0.05)


def test_whoever_comes_back_goes_on_from_what_it_sent_last(simulation: Simulation) -> None:
    rounds = run(simulation, 8, leave_out=0.25, max_absence=2, broadcast_every=0)
    sent_last: dict[int, int] = {}
    came_back = 0
    for before, record in pairwise(rounds):
        sent_last |= {row.upload.client: row.upload.upload_bytes for row in before.clients}
        for row in record.clients:
            assert row.upload.download_bytes == sent_last[row.upload.client]
            came_back += row.upload.client not in {row.upload.client for row in before.clients}
    assert came_back > 0


def test_whoever_fails_gets_the_full_model_also_after_staying_out(simulation: Simulation) -> None:
    strategy, fleet = FedDD(leave_out=0.5, broadcast_every=0), simulation.fleet
    state = start(simulation.initial, len(fleet))

    def after(number: int, asked: Sequence[int], status: str) -> list[int]:
        nonlocal state
        plan = Plan(number, tuple(Task(client) for client in asked))
        uploads = [Upload(client, status, samples=1, train_loss=1.0) for client in asked]
        state = strategy.absorb(state, fleet, plan, uploads, state.model)
        tasks = dataclasses.replace(strategy, leave_out=0.0).plan(state, fleet, np.random.default_rng(0)).tasks
        return [task.client for task in tasks if task.down.mask is None]

    assert after(1, range(8), "ok") == []
    assert after(2, [0, 1], "ok") == []
    assert after(3, [1, 2], "lost") == [1, 2]
    assert after(4, [2, 3], "lost") == [1, 2, 3]
    assert after(5, [1, 2, 3], "ok") == []


WRONG = [
    {"budget": "auto", "auto_target": "round_seconds"},
    {"budget": "auto", "auto_target": "run_bytes", "auto_value": 1.0},
    {"budget": "auto", "rates": "uniform"},
    {"auto_target": "x"},
    {"broadcast_error": 0.0},
    {"leave_out": 1.0},
    {"max_absence": 0},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"auto|broadcast_error|leave_out"):
        FedDD(**wrong)


def test_the_memory_of_choices_is_plain() -> None:
    from feddd.strategies.packing import pack_state, unpack_state

    world = build_world(experiment(fleet={"clients": 4}, data={"train_limit": 120}))
    with Simulation(world, workers=1) as simulation:
        *_, record = simulation.run(FedDD(budget="auto", broadcast_error=1.0), 4)
        tensors, document = pack_state(record.state)
        assert unpack_state(tensors, document, simulation.initial).memory == record.state.memory
        assert record.mask_error is not None
        assert record.state.mask_error == record.mask_error > 0
