import dataclasses
import os
import re
import signal
import struct
from itertools import pairwise
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddd import FedAvg, FedCS, FedDD, Oort, payload_size
from feddd.core.units import units
from feddd.errors import RunError
from feddd.experiments.running import build_world
from feddd.simulation import engine, worker_process
from feddd.simulation.engine import assign_blocks, block_ranges
from feddd.simulation.reduction import reduce_tree
from feddd.simulation.samples import SampleArrays, fill, lay_out, memory_file
from feddd.simulation.simulator import EverybodyDiverged, Simulation, World
from feddd.simulation.training import Samples, Training, gather
from feddd.simulation.workers import ProcessWorker, WorkerDied, WorkerFailed, mapped
from feddd.strategies.fedprox import FedProx
from feddd.strategies.protocol import Task
from feddd.strategies.scaffold import SCAFFOLD
from feddd.wire.format import coverage_size
from feddd.wire.stage import Known
from feddd.world import datasets, models
from feddd.world.fleets import Devices
from worlds import experiment

pytestmark = pytest.mark.usefixtures("torchs_generator_stays_where_it_is")

ALL = (FedDD(broadcast_every=3), FedAvg(), FedCS(), Oort(), FedProx(mu=0.1), SCAFFOLD(), SCAFFOLD(0.5))
"""The paper's, and those that change local training; the others are in test_submodel_methods.py and test_sparse.py."""


def records(world, strategy, rounds=4, **options):
    with Simulation(world, **options) as simulation:
        return list(simulation.run(strategy, rounds))


def facts(record):
    """What the tables hold of a round."""
    rows = [dataclasses.astuple(row) for row in record.clients]
    evaluation = (record.evaluation.loss_sum, record.evaluation.correct.tolist())
    return (record.round, record.round_seconds, record.clock_seconds, rows, evaluation, record.mask_error)


@pytest.fixture(scope="module")
def world():
    return build_world(experiment())


@pytest.fixture(scope="module")
def on_one_and_on_three(world):
    """Simulations on one worker and on three, for all strategies."""
    with Simulation(world, workers=1) as one, Simulation(world, workers=3) as three:
        yield one, three


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: type(s).__name__)
def test_any_number_of_workers_gives_the_same_bits(on_one_and_on_three, strategy):
    one, three = (list(simulation.run(strategy, 4)) for simulation in on_one_and_on_three)
    assert [facts(record) for record in one] == [facts(record) for record in three]
    for name, tensor in one[-1].state.model.items():
        assert torch.equal(tensor, three[-1].state.model[name])


def test_the_same_seed_twice_gives_the_same_bits_and_another_seed_does_not(world):
    first, second = (records(world, FedDD(), workers=1) for _ in range(2))
    assert [facts(record) for record in first] == [facts(record) for record in second]
    other = records(build_world(experiment(seed=1)), FedDD(), workers=1)
    assert facts(first[-1]) != facts(other[-1])


def test_sending_every_payload_for_real_changes_nothing(world):
    measured = records(world, FedDD(broadcast_every=3), workers=1)
    sent = records(world, FedDD(broadcast_every=3), workers=1, wire=True)
    assert [facts(record) for record in measured] == [facts(record) for record in sent]


def test_sending_for_real_changes_nothing_for_models_of_different_width(colour_world):
    measured = records(colour_world, FedDD(), rounds=3, workers=1)
    sent = records(colour_world, FedDD(), rounds=3, workers=1, wire=True)
    assert [facts(record) for record in measured] == [facts(record) for record in sent]


@pytest.fixture
def colour_world():
    """Five clients, one of each width of heterogeneous-b, with a few random 32 × 32 colour images."""
    rng = np.random.default_rng(0)
    data = datasets.ImageDataset(
        train_inputs=rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8),
        train_targets=np.arange(20) % 10,
        test_inputs=rng.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8),
        test_targets=np.arange(10),
        classes=10,
    )
    devices = Devices(np.linspace(1e4, 5e4, 5), np.linspace(2e5, 4e4, 5), np.ones(5))
    parts = [np.arange(client, 20, 5) for client in range(5)]
    return World(data, parts, devices, "heterogeneous-b", Training(batch_size=4), seed=0)


def test_clients_share_the_widths_evenly_and_are_told_the_coverage_once(colour_world):
    run = records(colour_world, FedDD(budget=0.5), rounds=3, workers=1)
    for client, row in enumerate(run[0].clients):
        table = units(models.build("heterogeneous-b", (3, 32, 32), 10, client))
        zeros = {slot.name: torch.zeros(slot.shape) for slot in table.slots}
        full = payload_size(table.full_mask(), zeros, units=table)
        assert row.upload.upload_bytes == row.upload.download_bytes == full
        # Round 2 downloads everything again (the mask was full) and, once, CR(k).
        assert run[1].clients[client].upload.download_bytes == full + coverage_size(table)
        assert run[2].clients[client].upload.download_bytes == run[1].clients[client].upload.upload_bytes
    assert run[2].clients[0].dropout > 0


def test_after_a_broadcast_and_in_rounds_one_and_two_the_download_is_full(world):
    run = records(world, FedDD(broadcast_every=3), rounds=8, workers=1)
    full = run[0].clients[0].upload.download_bytes
    complete = [all(row.upload.download_bytes == full for row in record.clients) for record in run]
    assert complete == [True, True, False, True, False, False, True, False]


def test_what_a_client_downloads_is_what_it_uploaded_before(world):
    run = records(world, FedDD(broadcast_every=0), rounds=5, workers=1)
    for before, after in pairwise(run):
        for sent, received in zip(before.clients, after.clients, strict=True):
            assert received.upload.download_bytes == sent.upload.upload_bytes


def test_the_clock_is_the_sum_of_the_slowest_clients(world):
    total = 0.0
    for record in records(world, FedDD(), workers=1):
        slowest = 0.0
        for row in record.clients:
            client = row.upload.client
            down = row.upload.download_bytes * 8 / world.devices.downlink_bits_per_s[client]
            up = row.upload.upload_bytes * 8 / world.devices.uplink_bits_per_s[client]
            slowest = max(slowest, down + world.devices.compute_seconds[client] + up)
        total += slowest
        assert record.round_seconds == pytest.approx(slowest, rel=1e-12)
        assert record.clock_seconds == pytest.approx(total, rel=1e-12)


def test_compute_time_counts_every_sample_of_every_epoch(world):
    twice = build_world(experiment(training={"epochs": 2}))
    np.testing.assert_allclose(twice.devices.compute_seconds, 2 * world.devices.compute_seconds)
    per_sample = world.devices.compute_seconds / [len(part) for part in world.parts]
    assert (per_sample >= 1e6 / 1e10).all()
    assert (per_sample <= 1e7 / 1e9).all()


def test_the_fleet_meets_its_budget_within_one_percent_from_round_two_on(world):
    full = None
    for record in records(world, FedDD(budget=0.6), rounds=5, workers=1):
        sent = sum(row.upload.upload_bytes for row in record.clients)
        full = full or sent
        if record.round > 1:
            assert sent / full == pytest.approx(0.6, rel=0.01)


def test_with_no_dropout_feddd_is_fedavg_and_its_masks_make_no_error(world):
    dropping_nothing = records(world, FedDD(budget=1.0), workers=1)
    average = records(world, FedAvg(), workers=1)
    for name, tensor in average[-1].state.model.items():
        assert torch.equal(tensor, dropping_nothing[-1].state.model[name])
    assert [record.mask_error for record in dropping_nothing] == [0.0] * 4


def test_masks_make_an_error_when_something_is_dropped(world):
    run = records(world, FedDD(), workers=1)
    assert run[0].mask_error == 0.0
    assert all(0.0 < record.mask_error < 1.0 for record in run[1:])


def test_a_client_that_diverges_is_left_out_and_gets_the_full_model_next(world):
    # One client with huge images: its loss explodes while the others train on.
    victim = 3
    first = sum(len(part) for part in world.parts[:victim])

    tensors = SampleArrays.tensors

    def poisoned(arrays, device, objective):
        train, test = tensors(arrays, device, objective)
        images = train.taken(train.inputs)
        images[first : first + len(world.parts[victim])] *= 1e30
        return Samples(images, train.targets), test

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleArrays, "tensors", poisoned)
        run = records(world, FedDD(broadcast_every=0), rounds=4, workers=1)
    clean = records(world, FedDD(broadcast_every=0), rounds=1, workers=1)
    for record in run:
        rows = {row.upload.client: row for row in record.clients}
        assert rows[victim].upload.status == "diverged"
        assert rows[victim].upload.upload_bytes == 0
        assert rows[victim].upload.download_bytes == clean[0].clients[victim].upload.download_bytes
        assert sum(row.upload.status == "ok" for row in rows.values()) == len(world.parts) - 1
        assert all(torch.isfinite(tensor).all() for tensor in record.state.model.values())


def test_when_everybody_diverges_the_run_stops_with_an_explanation():
    wild = build_world(experiment(training={"learning_rate": 1e30, "epochs": 3}))
    with pytest.raises(EverybodyDiverged, match=r"round 1 .* smaller learning rate than 1e\+30"):
        records(wild, FedAvg(), workers=1)


def test_a_new_strategy_starts_with_clients_that_remember_nothing(world):
    with Simulation(world, workers=1) as simulation:
        first = [facts(record) for record in simulation.run(FedDD(), 3)]
        list(simulation.run(FedAvg(), 2))
        assert [facts(record) for record in simulation.run(FedDD(), 3)] == first


def test_rounds_without_evaluation_have_none_but_the_last_has(world):
    with Simulation(world, workers=1) as simulation:
        run = list(simulation.run(FedAvg(), 5, evaluate_every=2))
    assert [record.evaluation is not None for record in run] == [False, True, False, True, True]


def test_blocks_do_not_depend_on_workers_and_cover_everybody():
    for clients in (1, 7, 16, 100, 1003):
        blocks = block_ranges(clients)
        assert [client for block in blocks for client in block] == list(range(clients))
        assert len(blocks) == min(clients, 48 if clients >= 384 else 12)
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=16), workers=st.integers(1, 20))
def test_workers_get_neighbouring_blocks_and_nobody_goes_without(costs, workers):
    shares = assign_blocks(costs, workers)
    assert len(shares) == min(workers, len(costs))
    assert [block for share in shares for block in share] == list(range(len(costs)))
    assert all(shares)


def test_blocks_are_spread_by_cost():
    assert assign_blocks([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [[0], [1, 2, 3, 4, 5]]
    assert assign_blocks([1.0] * 16, 2) == [list(range(8)), list(range(8, 16))]


@given(leaves=st.integers(1, 40), data=st.data())
def test_the_tree_adds_in_the_same_order_however_the_leaves_are_shared(leaves, data):
    def merge(left, right):
        return f"({left}+{right})"

    whole = reduce_tree({(0, leaf): str(leaf) for leaf in range(leaves)}, leaves, merge)
    owners = data.draw(st.lists(st.integers(0, 3), min_size=leaves, max_size=leaves))
    parts = {}
    for worker in range(4):
        mine = {(0, leaf): str(leaf) for leaf in range(leaves) if owners[leaf] == worker}
        parts |= reduce_tree(mine, leaves, merge)
    assert reduce_tree(parts, leaves, merge) == whole
    assert len(whole) == 1
    assert sorted(map(int, re.findall(r"\d+", next(iter(whole.values()))))) == list(range(leaves))


def test_a_worker_that_owns_half_of_the_blocks_sends_one_sum():
    mine = {(0, leaf): 1 for leaf in range(8, 16)}
    assert reduce_tree(mine, 16, int.__add__) == {(3, 1): 8}


def kill(simulation, place):
    worker = simulation._engine._workers[place]
    assert isinstance(worker, ProcessWorker)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()


# With broadcast_every=3 a worker lost in round 6 has to repeat rounds 4 and 5; without broadcasts, all before.
@pytest.mark.parametrize(
    "strategy", [FedDD(broadcast_every=3), FedDD(broadcast_every=0), FedCS()], ids=["every 3", "never", "fedcs"]
)
def test_a_lost_worker_is_rebuilt_and_the_numbers_stay_the_same(world, strategy, caplog):
    undisturbed = [facts(record) for record in records(world, strategy, rounds=7, workers=1)]
    with Simulation(world, workers=2) as simulation:
        run = simulation.run(strategy, 7)
        disturbed = [facts(next(run)) for _ in range(5)]
        kill(simulation, 1)
        disturbed += [facts(record) for record in run]
    assert disturbed == undisturbed
    assert "exit code -9" in caplog.text


def test_a_worker_lost_after_many_rounds_goes_on_from_a_snapshot(world, monkeypatch):
    monkeypatch.setattr(engine, "REPLAY", 2)
    undisturbed = [facts(record) for record in records(world, FedDD(broadcast_every=0), rounds=6, workers=1)]
    with Simulation(world, workers=2) as simulation:
        run = simulation.run(FedDD(broadcast_every=0), 6)
        disturbed = [facts(next(run)) for _ in range(5)]
        assert len(simulation._engine._rounds) <= 2
        kill(simulation, 0)
        assert disturbed + [facts(record) for record in run] == undisturbed


def test_a_worker_lost_after_a_resume_goes_on_from_what_was_restored(world):
    strategy = FedDD(broadcast_every=0)
    undisturbed = [facts(record) for record in records(world, strategy, rounds=6, workers=1)]
    with Simulation(world, workers=1) as simulation:
        record = list(zip(range(3), simulation.run(strategy, 6), strict=False))[-1][1]
        snapshot = simulation.snapshot(record, simulation.holding(strategy, record.state))
    with Simulation(world, workers=2) as simulation:
        run = simulation.run(strategy, 6, after=snapshot)
        resumed = [facts(next(run))]
        kill(simulation, 0)
        assert resumed + [facts(record) for record in run] == undisturbed[3:]


def test_half_a_message_means_that_the_other_end_is_gone():
    ours, theirs = Pipe()
    with ours:
        os.write(theirs.fileno(), struct.pack("!i", 1000) + b"the first of a thousand bytes")
        theirs.close()
        with pytest.raises(EOFError, match="during message"):
            worker_process.receive(ours)


def test_a_coordinator_that_leaves_while_it_speaks_ends_a_worker_without_a_trace(capfd):
    worker = worker_process.WorkerProcess()
    os.write(worker._connection.fileno(), struct.pack("!i", 1000) + b"the first of a thousand bytes")
    worker._connection.close()
    assert worker.wait() == 0
    assert capfd.readouterr().err == ""


def test_a_worker_that_always_dies_is_a_clear_error(world, monkeypatch):
    with Simulation(world, workers=2) as simulation:
        run = simulation.run(FedAvg(), 3)
        next(run)
        monkeypatch.setattr(worker_process, "WORKER_ENVIRONMENT", {"PYTHONHOME": "/nowhere"})
        kill(simulation, 0)
        with pytest.raises(WorkerDied, match="exit code") as caught:
            next(run)
    assert isinstance(caught.value, RunError)


def test_kept_values_in_files_change_nothing_and_leave_nothing_behind(world, tmp_path):
    in_memory = [facts(record) for record in records(world, FedDD(), rounds=4, workers=2)]
    with Simulation(world, workers=2, state_dir=tmp_path) as simulation:
        assert [facts(record) for record in simulation.run(FedDD(), 4)] == in_memory
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("channels_last", [False, True])
def test_workers_share_one_copy_of_the_samples(world, channels_last):
    data = world.dataset
    layout = lay_out(data, sum(map(len, world.parts)), len(data.test_labels), channels_last=channels_last)
    descriptor = memory_file(layout.nbytes)
    try:
        writer, reader = mapped(descriptor, layout), mapped(descriptor, layout)
        fill(writer, data, world.parts)
        train, test = reader.tensors("cpu")
    finally:
        os.close(descriptor)
    # What one mapping wrote the other sees, and a tensor is that memory: nothing was copied.
    assert train.inputs.data_ptr() == reader.arrays["train_inputs"].ctypes.data
    order = np.concatenate(world.parts)
    assert np.array_equal(train.targets.numpy(), data.train_labels[order])
    some = torch.tensor([0, 7, len(order) - 1])
    assert np.array_equal(gather(train, some).numpy(), data.inputs(data.train_images[order[some]]))
    assert np.array_equal(test.inputs.numpy(), data.test_images)


def test_after_a_full_broadcast_nobody_has_state_of_its_own(world):
    with Simulation(world, workers=1) as simulation:
        run = simulation.run(FedDD(broadcast_every=3), 4)
        shard = simulation._engine._workers[0]._shard
        held = [sum(len(state["own"]) for state in shard.snapshot().values()) for _ in run]
        # Nothing is dropped in round 1; a share of every model from then on.
        assert held[0] == 0
        assert all(0 < total < 0.5 * len(world.parts) * simulation.units.elements for total in held[1:])
        table = simulation.units
        everybody = [Task(client) for client in range(len(world.parts))]
        model = {slot.name: simulation.initial[slot.name] for slot in table.slots}
        states = [shard._states.get(task.client) for task in everybody]
        assert all(len(state["own"]) for state in states)
        local = shard._download(everybody, states, Known(model, model), table)
        assert all(torch.equal(own, model[name]) for name, stack in local.items() for own in stack)


def test_a_worker_that_raises_says_what_and_where(world):
    with Simulation(world, workers=2) as simulation:
        worker = simulation._engine._workers[0]
        worker.begin("train", "no such arguments")
        with pytest.raises(WorkerFailed, match="TypeError"):
            worker.finish()
