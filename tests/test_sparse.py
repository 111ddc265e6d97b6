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

from feddd.core.units import Units, units
from feddd.errors import RunError
from feddd.experiments.methods import construct
from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation
from feddd.simulation.snapshot import pack_snapshot, unpack_snapshot
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.stc import STC
from feddd.strategies.topk import TopK
from feddd.wire import difference, quantised, select
from feddd.wire.chosen import flat
from feddd.wire.down import whole_bytes
from feddd.wire.exchange import Chain, chain, decode, encode, payload_sizes, read, write
from feddd.wire.format import PayloadError
from feddd.wire.sparse import golomb_bits, greatest_count
from feddd.wire.stage import At, Known, Update
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


def table_of(elements: int) -> Units:
    return units({"a.weight": torch.zeros(1, elements)})


def sparse(share: float, ternary: bool) -> Chain:
    return chain(select.TopK(share), *([quantised.Ternary()] if ternary else []))


def sent(vector: NDArray[np.float32], line: Chain) -> tuple[Update, Units]:
    """One client's numbers at the end of a chain."""
    table = table_of(len(vector))
    stack = {"a.weight": torch.from_numpy(vector)[None, None]}
    at = At(table, [0], 1, 0, Known({}, {}), [None], stack, stack, wire=True)
    return encode([line], [{}], at)[0], table


def arrives(update: Update, table: Units) -> list[float]:
    values: list[float] = flat(update.values, table)[0].tolist()
    return values


vectors = st.lists(st.integers(-4, 4).map(lambda n: n / 2), min_size=1, max_size=60).map(
    lambda values: np.array(values, np.float32)
)


@given(vectors, st.floats(0.01, 1.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_the_greatest_elements_are_chosen_and_of_equal_ones_the_first(
    vector: NDArray[np.float32], share: float, ternary: bool
) -> None:
    count = greatest_count(len(vector), share)
    update, table = sent(vector, sparse(share, ternary))
    assert update.chosen.numbers(table).tolist() == [count]
    assert arrives(update, table) == pytest.approx(oracle(vector, count, ternary))


@given(vectors, st.floats(0.01, 1.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_sparse_payload_arrives_as_it_was_and_has_the_size_charged(
    vector: NDArray[np.float32], share: float, ternary: bool
) -> None:
    line = sparse(share, ternary)
    update, table = sent(vector, line)
    data = write(line, update, 0, table)
    assert len(data) == payload_sizes(line, update, table)[0]
    found = read(line, data, table)
    assert [own.tolist() for own in found.chosen.places] == [own.tolist() for own in update.chosen.places]  # type: ignore[attr-defined]
    assert arrives(found, table) == arrives(update, table)


def test_golomb_codes_are_those_of_the_paper() -> None:
    golden = (math.sqrt(5) + 1) / 2
    for share in (0.5, 0.1, 0.01, 1 / 400):
        wanted = max(0, 1 + math.floor(math.log2(math.log(golden - 1) / math.log(1 - share))))
        assert golomb_bits(int(10_000 * share), 10_000) == wanted
    assert [golomb_bits(n, 100) for n in (100, 60, 10, 1)] == [0, 0, 3, 6]
    # Places 2 and 12 of 100, b = 5: the gaps' d − 1 are 2 and 9, each a zero and five bits, lowest first.
    vector = np.zeros(100, np.float32)
    vector[[2, 12]] = 1.5, -1.5
    line = sparse(0.02, True)
    update, table = sent(vector, line)
    bits = "0" + "01000" + "0" + "10010"
    coded = np.packbits([int(bit) for bit in bits], bitorder="little").tobytes()
    data = write(line, update, 0, table)
    assert data[16:] == (2).to_bytes(4, "little") + np.float32(1.5).tobytes() + coded + bytes([0b10])


@pytest.mark.parametrize("share", [0.57, 0.1, 0.01])
def test_places_take_about_their_entropy_and_never_more_than_a_bitmap_or_a_list(share: float) -> None:
    elements = 85_614
    vector = np.random.default_rng(0).normal(size=elements).astype(np.float32)
    count = greatest_count(elements, share)
    line = sparse(share, False)
    places = 8 * (int(payload_sizes(line, *sent(vector, line))[0]) - 20 - 4 * count)
    entropy = elements * (-share * math.log2(share) - (1 - share) * math.log2(1 - share))
    assert entropy * 0.99 <= places <= 1.05 * entropy
    assert places <= min(elements + 8, 17 * count)


def test_damaged_sparse_payloads_are_refused() -> None:
    vector = np.random.default_rng(0).normal(size=50).astype(np.float32)
    for ternary in (False, True):
        line, other = sparse(0.12, ternary), sparse(0.12, not ternary)
        update, table = sent(vector, line)
        data = write(line, update, 0, table)
        with pytest.raises(PayloadError):
            read(other, data, table)
        for bad in (data[:18], data[:-1], data + b"\0", data[:16] + b"\xff\xff\xff\xff" + data[20:], b"x" + data[1:]):
            with pytest.raises(PayloadError):
                read(line, bad, table)
        rng = np.random.default_rng(1)
        accepted = 0
        for _ in range(200):
            at = int(rng.integers(16, len(data)))
            changed = data[:at] + rng.bytes(1) + data[at + 1 :]
            try:
                found = read(line, changed, table)
            except PayloadError:
                continue
            accepted += 1
            if not ternary:
                assert write(line, found, 0, table) == changed
        assert accepted


@pytest.mark.parametrize("ternary", [False, True])
def test_nothing_of_an_update_is_lost_it_is_sent_or_kept(ternary: bool) -> None:
    line, rng = (
        chain(difference.Difference(), difference.Feedback(), *sparse(0.2, ternary).stages),
        np.random.default_rng(0),
    )
    updates, arrived = np.zeros((2, TABLE.elements)), np.zeros((2, TABLE.elements))
    states: list[Any] = [{}, {}]
    for number in range(1, 5):
        model = {slot.name: torch.from_numpy(rng.normal(size=slot.shape).astype(np.float32)) for slot in TABLE.slots}
        after = {
            slot.name: torch.from_numpy(rng.normal(size=(2, *slot.shape)).astype(np.float32)) for slot in TABLE.slots
        }
        at = At(TABLE, [3, 7], number, 0, Known(model, model), [None, None], after, after)
        update, states = encode([line, line], states, at)
        base = flat({name: tensor[None] for name, tensor in model.items()}, TABLE).numpy()
        updates += flat(after, TABLE).numpy() - base
        came = flat(decode(line, update, at).values, TABLE).numpy() - base
        assert (np.count_nonzero(np.abs(came) > 1e-6, axis=1) == 10).all()
        arrived += came
        residual = np.stack([state["residual"].numpy() for state in states])
        assert np.allclose(arrived + residual, updates, atol=1e-5)
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
    tensors, document = pack_snapshot(simulation.snapshot(half[-1], simulation.holding(method, half[-1].state)))
    assert len(tensors["kept.residual"]) == sum(half[-1].state.last_round > 0) * simulation.units.elements
    # In processes that have seen nothing of it
    with Simulation(simulation.world, workers=2) as simulation:
        snapshot = unpack_snapshot(tensors, json.loads(json.dumps(document)), simulation.initial)
        assert same(records[3:], list(simulation.run(method, 6, after=snapshot)))


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
                assert all(row.upload.download_bytes == whole_bytes(table) for row in record.clients)
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
            whole, held, caught_up = whole_bytes(simulation.units), {}, 0
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
    with Simulation(faulty, workers=1) as simulation, pytest.raises(RunError, match="depends on the numbers"):
        next(simulation.run(TopK(), 1))
