"""Fleets that misbehave: every fault has its effect, the same for every strategy and any number of workers."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import feddd
from feddd import FedAvg, FedCS, FedDD, Oort
from feddd.core.units import units
from feddd.errors import InputError, RunError
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world
from feddd.experiments.views import lines, not_counted
from feddd.reporting import print_summary
from feddd.simulation import faulty_uploads
from feddd.simulation.faults import ANSWERS, Faults, draw
from feddd.simulation.faulty_uploads import BLOCK_BYTES, FaultyTask, receive_answers
from feddd.simulation.forecast import end_seconds
from feddd.simulation.simulator import Simulation
from feddd.strategies.checks import PATIENCE, Limits, Refused, read_upload
from feddd.strategies.protocol import Task, Upload
from feddd.testbed.running import run_testbed
from feddd.wire import exchange
from feddd.wire.payload import encode
from feddd.wire.stage import At, Known
from feddd.world import models
from worlds import experiment

ALL = (FedDD(broadcast_every=3), FedAvg(), FedCS(), Oort())
REASONS = {
    "garbage": "its magic number is wrong",
    "corrupted": "the payload holds a value",
    "non_finite": "a value that is not finite",
    "wrong_model": "a model with another layer table",
    "replayed": "the answer belongs to another round",
}
EVERYTHING = Faults(**dict.fromkeys(ANSWERS, 0.08), late=0.1, slow=0.05, links=0.05, gone=0.02, deadline_seconds=400.0)


@pytest.fixture(scope="module")
def world():
    return build_world(experiment())


def records(world, strategy, faults, rounds=6, **options):
    options.setdefault("workers", 1)
    with Simulation(dataclasses.replace(world, faults=faults), **options) as simulation:
        return list(simulation.run(strategy, rounds))


def statuses(found):
    return {(record.round, row.upload.client): row.upload.status for record in found for row in record.clients}


def facts(found):
    return [
        (r.round_seconds, r.clock_seconds, [dataclasses.astuple(row) for row in r.clients], r.mask_error) for r in found
    ]


def same_model(one, other):
    return all(torch.equal(tensor, other[-1].state.model[name]) for name, tensor in one[-1].state.model.items())


def rows_of(found, client):
    return [next(row for row in record.clients if row.upload.client == client) for record in found]


# What is off stays off


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: type(s).__name__)
def test_faults_that_never_strike_change_no_bit(world, strategy):
    plain = records(world, strategy, Faults())
    # Another quorum than the default takes the whole way through the draws, which strike nobody.
    armed = records(world, strategy, Faults(quorum=2, deadline_seconds=1e9))
    assert facts(armed) == facts(plain)
    assert same_model(armed, plain)


def test_an_experiment_without_faults_does_not_mention_them():
    assert "faults" not in experiment().to_toml()
    assert build_world(experiment()).faults == Faults() == build_world(experiment(faults={})).faults


# Draws


@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(1, 30), st.integers(0, 20))
def test_a_clients_trouble_does_not_depend_on_how_many_others_there_are(seed, number, clients, more):
    few, many = (draw(EVERYTHING, seed, number, count) for count in (clients, clients + more))
    for name, values in vars(few).items():
        np.testing.assert_array_equal(values, getattr(many, name)[:clients])


@given(st.integers(0, 2**32), st.integers(1, 100), st.lists(st.floats(0, 1), min_size=8, max_size=8))
def test_kinds_that_add_up_to_the_same_share_strike_the_same_clients(seed, number, weights):
    assume(sum(weights) > 0.01)
    shares = [0.3 * weight / sum(weights) for weight in weights]
    mixed = draw(Faults(**dict(zip(ANSWERS, shares, strict=True))), seed, number, 50)
    lost = draw(Faults(lost=sum(shares)), seed, number, 50)
    np.testing.assert_array_equal(mixed.answer != "", lost.answer == "lost")


def test_shares_hold():
    trouble = draw(Faults(lost=0.2, garbage=0.1, late=0.3, late_seconds=(5.0, 9.0)), 3, 7, 10_000)
    assert (trouble.answer == "lost").mean() == pytest.approx(0.2, abs=0.02)
    assert (trouble.answer == "garbage").mean() == pytest.approx(0.1, abs=0.015)
    late = trouble.delay_seconds[trouble.delay_seconds > 0]
    assert len(late) / 10_000 == pytest.approx(0.3, abs=0.02)
    assert 5.0 <= late.min() < 5.1
    assert 8.9 < late.max() <= 9.0


def test_only_unreliable_clients_are_struck():
    faults = dataclasses.replace(EVERYTHING, unreliable=0.25)
    struck = np.zeros(40, dtype=bool)
    for number in range(1, 60):
        trouble = draw(faults, 1, number, 40)
        struck |= (trouble.answer != "") | (trouble.delay_seconds > 0)
        struck |= (trouble.compute_factor != 1) | (trouble.link_factor != 1)
    assert struck.sum() == 10


def test_spells_last_as_long_as_they_should():
    faults = Faults(slow=0.02, slow_factor=7.0, spell_rounds=4)
    slow = np.array([draw(faults, 0, number, 30).compute_factor for number in range(1, 120)])
    assert set(np.unique(slow)) == {1.0, 7.0}
    # Spells may follow each other at once, but none is shorter than four rounds, away from the ends.
    for client in range(30):
        edges = np.flatnonzero(np.diff(np.concatenate([[1.0], slow[:, client], [1.0]])))
        lengths = edges[1::2] - edges[::2]
        assert all(length >= 4 for start, length in zip(edges[::2], lengths, strict=True) if start + length < 119)


def test_who_is_gone_stays_gone():
    gone = np.array([draw(Faults(gone=0.05), 0, number, 50).answer == "gone" for number in range(1, 60)])
    assert (np.diff(gone.astype(int), axis=0) >= 0).all()
    assert 0.8 < gone[-1].mean() <= 1.0


# The same for everybody


def test_every_strategy_meets_the_same_faults(world):
    # Where a payload is hit, and so what gives it away, depends on its length.
    faults = dataclasses.replace(EVERYTHING, corrupted=0.0, deadline_seconds=None)
    seen = [statuses(records(world, strategy, faults)) for strategy in ALL]
    assert len({status for found in seen for status in found.values()}) >= 6
    for other in seen[1:]:
        assert {key: seen[0][key] for key in other} == other


@pytest.mark.parametrize("strategy", [FedDD(broadcast_every=0), Oort()], ids=lambda s: type(s).__name__)
def test_any_number_of_workers_gives_the_same_bits(world, strategy):
    one, three = (records(world, strategy, EVERYTHING, workers=workers) for workers in (1, 3))
    assert repr(facts(one)) == repr(facts(three))  # unknown losses are NaN, which is not equal to itself
    assert same_model(one, three)


def test_models_of_different_width_can_fail_too():
    small = build_world(
        experiment(data={"dataset": "synthetic-colour", "partition": "iid"}, model={"name": "heterogeneous-b/16"})
    )
    lost, garbage = (records(small, FedDD(), Faults(**{kind: 0.3}), rounds=3) for kind in ("crashed", "garbage"))
    assert same_model(lost, garbage)
    assert {status.partition(":")[0] for status in statuses(garbage).values()} == {"ok", "refused"}


@pytest.mark.parametrize("kind", [*REASONS, "lying"])
def test_values_in_a_few_bits_can_fail_too(world, kind):
    strategy = FedDD(broadcast_every=3, value_bits=8)
    found = records(world, strategy, Faults(**{kind: 0.3}))
    if kind in ("corrupted", "lying"):
        # Nearly every byte of a code is as good as another.
        assert "ok" in statuses(found).values()
        assert not same_model(found, records(world, strategy, Faults()))
    else:
        assert any(status.startswith("refused") for status in statuses(found).values())
        assert same_model(found, records(world, strategy, Faults(lost=0.3))) == (kind != "replayed")
    assert all(tensor.isfinite().all() for tensor in found[-1].state.model.values())


@pytest.mark.parametrize("bits", [32, 4])
def test_no_client_is_charged_for_longer_than_its_round(world, bits):
    for record in records(world, FedDD(value_bits=bits), EVERYTHING):
        assert all(total(row) <= record.round_seconds * (1 + 1e-12) for row in record.clients)


def test_a_faulty_run_that_was_interrupted_goes_on_with_the_same_bits(world):
    faulty, strategy = dataclasses.replace(world, faults=EVERYTHING), FedDD(broadcast_every=0)
    with Simulation(faulty, workers=1) as simulation:
        whole = list(simulation.run(strategy, 6))
        record = list(simulation.run(strategy, 3))[-1]
        snapshot = simulation.snapshot(record, simulation.holding(strategy, record.state))
    with Simulation(faulty, workers=2) as simulation:
        rest = list(simulation.run(strategy, 6, after=snapshot))
    assert repr(facts(rest)) == repr(facts(whole[3:]))
    assert same_model(rest, whole)


FEEDBACK = FedDD(value_bits=2, broadcast_every=2, error_feedback="all")


def owed_after(world, faults, rounds):
    """What every client owes after each round, and how its answer ended."""
    found = []
    with Simulation(dataclasses.replace(world, faults=faults), workers=1) as simulation:
        shard = simulation._engine._workers[0]._shard
        for record in simulation.run(FEEDBACK, rounds):
            residuals = {client: state["residual"] for client, state in shard.snapshot().items()}
            found.append((residuals, {row.upload.client: row.upload.status for row in record.clients}))
    return found


@pytest.mark.parametrize("kind", ["crashed", "garbage"])
def test_a_client_whose_answer_is_lost_on_its_way_owes_as_if_it_had_arrived(world, kind):
    # As in a deployment: a client keeps its state before it sends, and does not hear what became of its answer.
    ((fine, _),), ((struck, ends),) = (owed_after(world, faults, 1) for faults in (Faults(), Faults(**{kind: 0.4})))
    assert {status.partition(":")[0] for status in ends.values()} == {"ok", "lost" if kind == "crashed" else "refused"}
    assert all(np.array_equal(struck[client], fine[client]) for client in ends)
    assert all(residual.any() for residual in struck.values())


@pytest.mark.parametrize("kind", ["lost", "late"])
def test_a_client_that_does_not_take_part_owes_what_it_owed(world, kind):
    found = owed_after(world, Faults(**{kind: 0.4}, deadline_seconds=30.0), 4)
    away = 0
    for (before, _), (after, ends) in pairwise(found):
        for client, status in ends.items():
            if status != "ok":
                away += status == kind
                assert np.array_equal(before.get(client, 0.0), after.get(client, 0.0))
            else:
                assert not np.array_equal(before.get(client), after[client])
    assert away


@pytest.mark.parametrize("stop", [1, 2])
def test_what_clients_owe_outlives_an_interruption_also_of_those_that_never_counted(world, stop):
    faulty = dataclasses.replace(world, faults=Faults(crashed=0.4))
    with Simulation(faulty, workers=1) as simulation:
        whole = list(simulation.run(FEEDBACK, 4))
        record = list(simulation.run(FEEDBACK, stop))[-1]
        snapshot = simulation.snapshot(record, simulation.holding(FEEDBACK, record.state))
    assert any(row.upload.status != "ok" for row in record.clients)
    with Simulation(faulty, workers=2) as simulation:
        assert same_model(list(simulation.run(FEEDBACK, 4, after=snapshot)), whole)


# Answers that do not count


@pytest.mark.parametrize("kind", REASONS)
def test_a_bad_payload_is_refused_charged_and_followed_by_the_full_model(world, kind):
    found = records(world, FedDD(broadcast_every=0), Faults(**{kind: 0.25}))
    refused = {key: status for key, status in statuses(found).items() if status != "ok"}
    assert refused
    assert all(status.startswith("refused: ") and REASONS[kind] in status for status in refused.values())
    full_bytes = found[0].clients[0].upload.download_bytes
    for number, client in refused:
        row = rows_of(found, client)[number - 1]
        assert row.upload.upload_bytes > 0 < row.upload.download_bytes
        assert row.upload_seconds > 0 < row.download_seconds
        assert row.upload.mask == b""
        if number < len(found):
            assert rows_of(found, client)[number].upload.download_bytes == full_bytes
    counted = {key for key, status in statuses(found).items() if status == "ok"}
    later = [(number, client) for number, client in counted if number > 2 and (number - 1, client) in counted]
    assert any(rows_of(found, client)[number - 1].upload.download_bytes < full_bytes for number, client in later)


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: type(s).__name__)
def test_bad_payloads_have_no_effect_beyond_absence(world, strategy):
    lost = records(world, strategy, Faults(lost=0.2))
    assert "lost" in statuses(lost).values()
    for shares in ({"crashed": 0.2}, {"garbage": 0.1, "non_finite": 0.1}, {"wrong_model": 0.2}):
        assert same_model(records(world, strategy, Faults(**shares)), lost)


def test_bad_payloads_of_convolutions_have_no_effect_beyond_absence():
    small = build_world(experiment(model={"name": "cnn1"}))
    crashed, garbage = (records(small, FedDD(), Faults(**{kind: 0.3}), rounds=3) for kind in ("crashed", "garbage"))
    assert same_model(crashed, garbage)


def test_lost_clients_cost_nothing_and_crashed_ones_their_download(world):
    found = records(world, FedDD(), Faults(lost=0.2, crashed=0.2))
    plain = records(world, FedDD(), Faults(), rounds=1)
    kinds = {"lost": 0, "lost: crashed before its upload": 0}
    for record in found:
        for row in record.clients:
            if row.upload.status == "ok":
                continue
            kinds[row.upload.status] += 1
            assert (row.upload.upload_bytes, row.upload_seconds, row.upload.samples) == (0, 0.0, 0)
            there = row.upload.status != "lost"
            assert (row.upload.download_bytes > 0, row.download_seconds > 0, row.compute_seconds > 0) == (there,) * 3
            if there and record.round == 1:
                own = plain[0].clients[row.upload.client]
                assert row.upload.download_bytes == own.upload.download_bytes
                assert row.download_seconds == own.download_seconds
    assert all(kinds.values())


def test_a_client_that_left_for_good_never_answers_again(world):
    found = records(world, FedDD(), Faults(gone=0.15), rounds=8)
    for client in range(12):
        left = [row.upload.status for row in rows_of(found, client)]
        assert left == sorted(left, key=lambda status: status != "ok")
    assert "lost: left for good" in statuses(found).values()


def test_a_lie_within_the_bounds_counts_and_one_beyond_is_refused(world):
    plain, found = (records(world, FedAvg(), faults, rounds=1)[0] for faults in (Faults(), Faults(lying=0.3)))
    lies = 0
    for row, truth in zip(found.clients, plain.clients, strict=True):
        assert row.upload.status == "ok"
        factor = row.upload.samples / truth.upload.samples
        assert factor in (1.0, 10.0)
        assert row.upload.train_loss == pytest.approx(factor * truth.upload.train_loss)
        lies += factor == 10.0
    assert 0 < lies < 12
    assert not same_model([found], [plain])
    absurd = records(world, FedAvg(), Faults(lying=0.3, lie_factor=1e9), rounds=1)
    assert sum("samples are not between" in status for status in statuses(absurd).values()) == lies
    assert same_model(absurd, records(world, FedAvg(), Faults(lost=0.3), rounds=1))


def test_corruption_that_passes_the_checks_counts_as_it_came(monkeypatch):
    model = models.build("mlp", (1, 28, 28), 10, seed=0)
    table, state = units(model), dict(model.state_dict())
    stack = {name: tensor[None].clone() for name, tensor in state.items()}
    size = len(encode(state, table.full_mask(), units=table))

    class Zeros:
        """Hits the last bytes with zeros, which are numbers like any other."""

        def integers(self, high):
            return high - 1

        def bytes(self, count):
            return b"\0" * count

    monkeypatch.setattr(faulty_uploads, "stream", lambda *_: Zeros())
    honest = Upload(0, samples=5, train_loss=1.0, oort_statistic=1.0, upload_bytes=size)
    task = FaultyTask(0, fault="corrupted")
    at = At(table, [0], 1, 0, Known(state, state), [None], stack, stack, wire=True)
    update, _ = exchange.encode([task.up], [{}], at)
    (known,), arrived = receive_answers([task], [honest], update, exchange.decode(task.up, update, at), at)
    assert known.status == "ok"
    values = table.take({name: tensor[0] for name, tensor in arrived.values.items()}, table.full_mask())
    assert not values[-BLOCK_BYTES // 4 :].any()
    assert torch.equal(values[: -BLOCK_BYTES // 4], table.take(state, table.full_mask())[: -BLOCK_BYTES // 4])


def test_finite_but_absurd_values_are_refused():
    model = models.build("mlp", (1, 28, 28), 10, seed=0)
    state = dict(model.state_dict())
    table = units(model)
    name = next(iter(state))
    state[name][0, 0] = 1e30
    with pytest.raises(Refused, match="beyond"):
        read_upload(encode(state, table.full_mask(), units=table), Task(0), table, Limits())


def test_a_round_in_which_nobody_counts_leaves_the_model_as_it_was(world):
    found = records(world, FedDD(), Faults(garbage=1.0), rounds=3)
    with Simulation(world, workers=1) as simulation:
        assert all(torch.equal(found[-1].state.model[name], value) for name, value in simulation.initial.items())
    assert all(row.upload.status.startswith("refused") for record in found for row in record.clients)
    assert all(record.round_seconds > 0 for record in found)


# Time


def test_late_slow_and_badly_linked_clients_take_their_time(world):
    plain = records(world, FedDD(), Faults(), rounds=1)[0]
    faults = Faults(late=0.3, late_seconds=50.0, slow=0.3, slow_factor=20.0, links=0.3, link_factor=0.25)
    found = records(world, FedDD(), faults, rounds=1)[0]
    trouble = draw(faults, 0, 1, 12)
    kinds = (trouble.delay_seconds > 0, trouble.compute_factor > 1, trouble.link_factor < 1)
    assert all(0 < kind.sum() < 12 for kind in kinds)
    for row, usual in zip(found.clients, plain.clients, strict=True):
        late, slow, changed = (bool(kind[row.upload.client]) for kind in kinds)
        links = 4.0 if changed else 1.0
        assert row.download_seconds == pytest.approx(50.0 * late + links * usual.download_seconds)
        assert row.compute_seconds == pytest.approx((20.0 if slow else 1.0) * usual.compute_seconds)
        assert row.upload_seconds == pytest.approx(links * usual.upload_seconds)
        assert row.upload.upload_bytes == usual.upload.upload_bytes
    # Nobody is left out without a deadline: the model is the same, only later.
    assert same_model([found], [plain])
    assert found.round_seconds > plain.round_seconds


def total(row):
    return row.download_seconds + row.compute_seconds + row.upload_seconds


def test_a_deadline_ends_the_round_and_cuts_what_was_under_way(world):
    plain = records(world, FedAvg(), Faults(), rounds=1)[0]
    times = sorted(total(row) for row in plain.clients)
    deadline = (times[7] + times[8]) / 2
    found = records(world, FedAvg(), Faults(deadline_seconds=deadline), rounds=1)[0]
    assert found.round_seconds == deadline
    late = [row for row in found.clients if row.upload.status == "late"]
    assert len(late) == 4
    for row in late:
        usual = plain.clients[row.upload.client]
        assert total(row) == pytest.approx(deadline)
        sent = usual.upload.upload_bytes * row.upload_seconds / usual.upload_seconds
        assert row.upload.upload_bytes == pytest.approx(sent, abs=1)
        assert row.upload.upload_bytes < usual.upload.upload_bytes
    in_time = {row.upload.client for row in found.clients} - {row.upload.client for row in late}
    assert all(found.clients[client] == plain.clients[client] for client in in_time)


def test_a_round_waits_for_its_quorum_after_the_deadline(world):
    plain = records(world, FedAvg(), Faults(), rounds=1)[0]
    times = sorted(total(row) for row in plain.clients)
    faults = Faults(deadline_seconds=times[2], quorum=9)
    found = records(world, FedAvg(), faults, rounds=1)[0]
    assert found.round_seconds == times[8]
    assert [row.upload.status for row in found.clients].count("ok") == 9


def test_late_clients_get_the_full_model_next(world):
    faults = Faults(late=0.3, late_seconds=1e5, deadline_seconds=1e4)
    found = records(world, FedDD(broadcast_every=0), faults)
    full_bytes = max(row.upload.download_bytes for row in found[1].clients)
    late = [(number, client) for (number, client), status in statuses(found).items() if status == "late"]
    assert late
    for number, client in late:
        row = rows_of(found, client)[number - 1]
        # It was not there before the round was over.
        assert (row.upload.download_bytes, row.download_seconds) == (0, 1e4)
        after = rows_of(found, client)[number] if number < len(found) else None
        assert after is None or after.upload.status == "late" or after.upload.download_bytes == full_bytes


def test_a_quorum_that_nobody_can_meet_ends_the_run_in_one_line(world):
    with pytest.raises(RunError, match=r"^in round 1 only 0 of 12 clients answer; 1 are needed$"):
        records(world, FedDD(), Faults(lost=1.0))
    with pytest.raises(RunError, match=r"^in round 1 only \d+ of 12 clients answer within 10 s; 5 are needed$"):
        records(world, FedDD(), Faults(deadline_seconds=1.0, quorum=5))
    empty = records(world, FedDD(), Faults(lost=1.0, quorum=0, deadline_seconds=30.0), rounds=2)
    assert [record.round_seconds for record in empty] == [30.0, 30.0]


@given(
    st.lists(st.one_of(st.floats(0.1, 1e4), st.just(math.inf)), min_size=1, max_size=30),
    st.floats(1.0, 1e4),
    st.integers(0, 40),
)
def test_a_round_ends_as_early_as_its_deadline_and_quorum_allow(arrival, deadline, quorum):
    needed = min(quorum, len(arrival))
    if sum(at <= PATIENCE * deadline for at in arrival) < needed:
        with pytest.raises(RunError, match="are needed"):
            end_seconds(np.array(arrival), deadline, quorum, 1)
        return
    end = end_seconds(np.array(arrival), deadline, quorum, 1)
    assert deadline <= end <= PATIENCE * deadline
    assert sum(at <= end for at in arrival) >= needed
    # It never waits longer than that.
    assert end == deadline or sum(at < end for at in arrival) < needed


# What people see


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"losst": 0.1}, "unknown key faults.losst; did you mean 'lost'?"),
        ({"lost": 1.5}, "faults.lost: should be less than or equal to 1, not 1.5"),
        ({"lost": 0.7, "garbage": 0.6}, "exclude each other, and add up to 1.3, more than 1"),
        ({"late_seconds": [9, 3]}, "a range goes from low to high, not from 9 to 3"),
        ({"deadline_seconds": 0}, "faults.deadline_seconds: should be greater than 0"),
        ({"quorum": -1}, "faults.quorum: should be greater than or equal to 0"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_helps(section, message):
    with pytest.raises(InputError) as error:
        parse_experiment({"faults": section})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_report_and_summary_say_what_did_not_count_and_why(tmp_path, capsys):
    faults = {"lost": 0.1, "garbage": 0.1, "lying": 0.3, "lie_factor": 1e9}
    faults |= {"late": 0.2, "late_seconds": 1e4, "deadline_seconds": 900}
    results = feddd.run(experiment(faults=faults), tmp_path / "run", workers=1)
    table = results.tables["clients"].to_pylist()
    refused = sum(row["status"].startswith("refused") for row in table)
    line = next(line for line in lines([results]) if line.strategy == "feddd")
    mine = [row["status"] for row in table if row["strategy"] == "feddd"]
    reason = "refused: this is not a payload: its magic number is wrong"
    assert not_counted(line)[reason] == mine.count(reason) > 0
    page = (results.path / "report.html").read_text(encoding="utf-8")
    assert f"<td>{reason}</td><td>{mine.count(reason)}</td>" in page
    # Reasons that differ only in their numbers are one.
    assert len({status for status in mine if "samples are not between" in status}) > 1
    assert not_counted(line)["refused: … samples are not between … and …"] > 1
    print_summary(results)
    shown = " ".join(capsys.readouterr().out.split())
    absent = sum(row["status"] != "ok" for row in table)
    assert f"Of {len(table)} answers asked for, {absent} did not count: " in shown
    assert f"{refused} refused" in shown


def test_a_testbed_does_not_pretend_to_have_faults(tmp_path):
    with pytest.raises(InputError, match="for the simulator"):
        run_testbed(experiment(faults={"lost": 0.1}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
