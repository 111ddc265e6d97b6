"""Top-k with error feedback and STC: what is chosen, how it is coded, what is kept, and what a run makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feddd.core.payload import PayloadError, most_bytes
from feddd.core.sparse import (
    Chosen,
    choose,
    decode_sparse,
    dense,
    encode_sparse,
    golomb_bits,
    greatest_count,
    sparse_bytes,
)
from feddd.core.units import units
from feddd.errors import RunError
from feddd.experiments.config import construct
from feddd.experiments.running import build_world
from feddd.simulation.kept import KeptStore
from feddd.simulation.parts import sparse_sent
from feddd.simulation.simulator import RoundRecord, Simulation
from feddd.simulation.standing import pack_standing, unpack_standing
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.protocol import Sparse, Task
from feddd.strategies.stc import STC
from feddd.strategies.topk import TopK
from worlds import experiment

TABLE = units({"a.weight": torch.zeros(5, 9), "a.bias": torch.zeros(5)})


def oracle(vector: NDArray[np.float32], count: int, ternary: bool) -> list[float]:
    """STC's algorithm 1, and plain top-k, by sorting; of equal magnitudes the first."""
    order = sorted(range(len(vector)), key=lambda place: (-abs(float(vector[place])), place))[:count]
    mean = np.float32(sum(abs(float(vector[place])) for place in order) / count)
    result = [0.0] * len(vector)
    for place in order:
        sign = -1.0 if vector[place] < 0 else 1.0
        result[place] = sign * float(mean) if ternary else float(vector[place])
    return result


vectors = st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.float32)
)


@given(vectors, st.floats(0.01, 1.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_greatest_elements_are_chosen_and_of_equal_ones_the_first(
    vector: NDArray[np.float32], share: float, ternary: bool
) -> None:
    count = greatest_count(len(vector), share)
    chosen = choose(vector, count, ternary=ternary)
    assert len(chosen.places) == count
    assert dense(chosen, len(vector)).tolist() == pytest.approx(oracle(vector, count, ternary))


@given(vectors, st.floats(0.01, 1.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_sparse_payload_arrives_as_it_was_and_has_the_size_charged(
    vector: NDArray[np.float32], share: float, ternary: bool
) -> None:
    chosen = choose(vector, greatest_count(len(vector), share), ternary=ternary)
    data = encode_sparse(chosen, len(vector), TABLE)
    assert len(data) == sparse_bytes(chosen, len(vector))
    found = decode_sparse(data, len(vector), TABLE, ternary=ternary)
    assert found.places.tolist() == chosen.places.tolist()
    assert dense(found, len(vector)).tolist() == dense(chosen, len(vector)).tolist()


def test_golomb_codes_are_those_of_the_paper() -> None:
    golden = (math.sqrt(5) + 1) / 2
    for share in (0.5, 0.1, 0.01, 1 / 400):
        wanted = max(0, 1 + math.floor(math.log2(math.log(golden - 1) / math.log(1 - share))))
        assert golomb_bits(int(10_000 * share), 10_000) == wanted
    assert [golomb_bits(n, 100) for n in (100, 60, 10, 1)] == [0, 0, 3, 6]
    # Places 2 and 12 of 100, b = 5: the gaps' d − 1 are 2 and 9, each a zero and five bits, lowest first.
    chosen = Chosen(np.array([2, 12]), np.array([1.5, -1.5], np.float32), True)
    bits = "0" + "01000" + "0" + "10010"
    coded = np.packbits([int(bit) for bit in bits], bitorder="little").tobytes()
    data = encode_sparse(chosen, 100, TABLE)
    assert data[16:] == (2).to_bytes(4, "little") + np.float32(1.5).tobytes() + coded + bytes([0b10])


@pytest.mark.parametrize("share", [0.57, 0.1, 0.01])
def test_places_take_about_their_entropy_and_never_more_than_a_bitmap_or_a_list(share: float) -> None:
    elements = 85_614
    vector = np.random.default_rng(0).normal(size=elements).astype(np.float32)
    count = greatest_count(elements, share)
    places = 8 * (sparse_bytes(choose(vector, count, ternary=False), elements) - 20 - 4 * count)
    entropy = elements * (-share * math.log2(share) - (1 - share) * math.log2(1 - share))
    assert entropy * 0.99 <= places <= 1.05 * entropy
    assert places <= min(elements + 8, 17 * count)


def test_damaged_sparse_payloads_are_refused() -> None:
    vector = np.random.default_rng(0).normal(size=50).astype(np.float32)
    for ternary in (False, True):
        data = encode_sparse(choose(vector, 6, ternary=ternary), 50, TABLE)
        with pytest.raises(PayloadError):
            decode_sparse(data, 50, TABLE, ternary=not ternary)
        for bad in (data[:18], data[:-1], data + b"\0", data[:16] + b"\xff\xff\xff\xff" + data[20:], b"x" + data[1:]):
            with pytest.raises(PayloadError):
                decode_sparse(bad, 50, TABLE, ternary=ternary)
        rng = np.random.default_rng(1)
        for _ in range(200):
            at = int(rng.integers(16, len(data)))
            changed = data[:at] + rng.bytes(1) + data[at + 1 :]
            try:
                found = decode_sparse(changed, 50, TABLE, ternary=ternary)
            except PayloadError:
                continue
            assert encode_sparse(found, 50, TABLE) == changed


@pytest.mark.parametrize("ternary", [False, True])
def test_nothing_of_an_update_is_lost_it_is_sent_or_kept(ternary: bool) -> None:
    kept, rng = KeptStore(None, TABLE.elements), np.random.default_rng(0)
    tasks = [Task(client, sparse=Sparse(0.2, ternary)) for client in (3, 7)]
    base = {slot.name: torch.zeros(slot.shape) for slot in TABLE.slots}
    updates, sent = np.zeros((2, TABLE.elements)), np.zeros((2, TABLE.elements))
    for _ in range(4):
        before, after = (
            {slot.name: torch.from_numpy(rng.normal(size=(2, *slot.shape)).astype(np.float32)) for slot in TABLE.slots}
            for _ in "ab"
        )
        part = sparse_sent(before, after, base, tasks, kept, TABLE)
        updates += np.concatenate([(after[s.name] - before[s.name]).reshape(2, -1).numpy() for s in TABLE.slots], 1)
        arrived = np.concatenate([part.values[s.name].reshape(2, -1).numpy() for s in TABLE.slots], 1)
        assert (np.count_nonzero(arrived, axis=1) == 10).all()
        sent += arrived
        residual = np.stack([kept[client].values.numpy() for client in (3, 7)])
        assert np.allclose(sent + residual, updates, atol=1e-5)
    assert np.abs(residual).max() > 0.1


# In the simulator

METHODS: dict[str, Any] = {
    "topk": TopK(0.1),
    "some": TopK(0.01, participation=0.5),
    "stc": STC(),
    "stc-some": STC(0.05, 0.02, participation=0.5),
}


def same(records: list[RoundRecord], others: list[RoundRecord]) -> bool:
    models = zip(records[-1].state.model.values(), others[-1].state.model.values(), strict=True)
    rows = [record.clients for record in records] == [record.clients for record in others]
    return rows and all(torch.equal(one, other) for one, other in models)


@pytest.fixture(scope="module")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Simulation]]:
    """On one worker, with every payload sent for real, on two workers, with files; for all methods."""
    world = build_world(experiment(data={"train_limit": 240}))
    files = {"workers": 1, "state_dir": tmp_path_factory.mktemp("states")}
    ways: list[dict[str, Any]] = [{"workers": 1}, {"workers": 1, "wire": True}, {"workers": 2}, files]
    with ExitStack() as stack:
        yield [stack.enter_context(Simulation(world, **way)) for way in ways]


@pytest.mark.parametrize("name", METHODS)
def test_workers_the_wire_files_and_a_resume_change_nothing(name: str, simulations: list[Simulation]) -> None:
    method = METHODS[name]
    records, *others = (list(simulation.run(method, 6)) for simulation in simulations)
    assert all(same(records, other) for other in others)
    simulation = simulations[0]
    half = list(simulation.run(method, 3))
    tensors, document = pack_standing(simulation.standing(half[-1], simulation.holding(method, half[-1].state)))
    assert len(tensors["kept"]) == sum(half[-1].state.last_round > 0) * simulation.units.elements
    # In processes that have seen nothing of it
    with Simulation(simulation.world, workers=2) as simulation:
        standing = unpack_standing(tensors, json.loads(json.dumps(document)), simulation.initial)
        assert same(records[3:], list(simulation.run(method, 6, after=standing)))


def test_sending_every_element_is_fedavg() -> None:
    world = build_world(experiment(data={"train_limit": 240}))
    with Simulation(world, workers=1) as simulation:
        ours, plain = (list(simulation.run(method, 3))[-1] for method in (TopK(1.0), FedAvg()))
    for name, tensor in plain.state.model.items():
        assert torch.allclose(ours.state.model[name], tensor, atol=1e-6)


def test_what_was_left_behind_counts_later() -> None:
    """Without error feedback the elements that are never among the greatest would never move."""
    world = build_world(experiment(data={"partition": "iid"}))
    with Simulation(world, workers=1) as simulation:
        moved = []
        for record in simulation.run(TopK(0.02), 12):
            pairs = [(record.state.model[slot.name], simulation.initial[slot.name]) for slot in simulation.units.slots]
            moved.append(sum(int((new != old).sum()) for new, old in pairs))
    assert moved[-1] > 2 * moved[0]


def test_stc_clients_hold_the_reference_and_the_server_what_was_not_sent_yet() -> None:
    world = build_world(experiment(data={"train_limit": 240}))
    with Simulation(world, workers=1) as simulation:
        table = simulation.units
        before: RoundRecord | None = None
        for record in simulation.run(STC(0.05, 0.02), 4):
            reference = record.state.reference
            assert reference is not None
            assert reference.number == len(reference.sizes) == record.round - 1
            if before is None:
                assert all(row.upload.download_bytes == most_bytes(table) for row in record.clients)
                before = record
                continue
            old = before.state.reference
            assert old is not None
            behind = [(before.state.model[s.name] - old.model[s.name]).reshape(-1) for s in table.slots]
            move = [(reference.model[s.name] - old.model[s.name]).reshape(-1) for s in table.slots]
            wanted = oracle(torch.cat(behind).numpy(), greatest_count(table.elements, 0.02), ternary=True)
            assert torch.cat(move).tolist() == pytest.approx(wanted, abs=1e-6)
            assert {row.upload.download_bytes for row in record.clients} == {reference.sizes[-1]}
            before = record


def test_stc_clients_that_missed_rounds_are_charged_for_them_or_for_the_model() -> None:
    world = build_world(experiment(data={"train_limit": 240}, fleet={"clients": 6}))
    for share, dear in ((0.01, False), (0.5, True)):
        with Simulation(world, workers=1) as simulation:
            whole, held, caught_up = most_bytes(simulation.units), {}, 0
            for record in simulation.run(STC(0.01, share, participation=0.5), 14):
                reference = record.state.reference
                assert reference is not None
                for row in record.clients:
                    client = row.upload.client
                    missed = reference.sizes[held[client] :] if client in held else ()
                    wanted = min(whole, sum(missed)) if client in held else whole
                    assert row.upload.download_bytes == wanted
                    caught_up += len(missed) > 1
                    held[client] = reference.number
            assert caught_up > 0, dear


def test_wrong_options_and_worlds_are_refused() -> None:
    for name, wrong in (("topk", {"share": 0.0}), ("stc", {"download_share": 1.5}), ("stc", {"participation": 2.0})):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            construct(name, wrong)
    mixed = experiment(model={"name": "heterogeneous-b/16"}, data={"dataset": "synthetic-colour", "train_limit": 120})
    with Simulation(build_world(mixed), workers=1) as simulation:
        with pytest.raises(ValueError, match="width"):
            next(simulation.run(STC(), 1))
        assert next(simulation.run(TopK(), 1)).round == 1
    faulty = build_world(experiment(faults={"lost": 0.1}))
    with Simulation(faulty, workers=1) as simulation, pytest.raises(RunError, match="sparse"):
        next(simulation.run(TopK(), 1))
