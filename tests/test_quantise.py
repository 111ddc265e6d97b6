"""A few bits a value: unbiased, within one step, packed as said, and the same at both ends."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import feddd
from feddd.core.units import Params, Units, units
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.fedcs import FedCS
from feddd.strategies.feddd import FedDD
from feddd.strategies.oort import Oort
from feddd.wire.format import PayloadError
from feddd.wire.quantise import BITS, Coded, dequantise, greatest_code, pack_codes, quantise_stack, unpack_codes
from test_payload import masks, net
from worlds import experiment


def quantise(params: Params, table: Units, bits: int, rng: np.random.Generator) -> Coded:
    """A stack of one."""
    return quantise_stack({slot.name: params[slot.name][None] for slot in table.slots}, table, bits, [rng])


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_unbiased_and_within_one_step(bits: int) -> None:
    table, params = net()
    sums = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in table.slots}
    draws = 400
    for seed in range(draws):
        coded = quantise(params, table, bits, np.random.default_rng(seed))
        for name, value in dequantise(coded, table).items():
            sums[name] += value[0]
    for layer in table.layers:
        step = float(coded.scales[layer.name].max())
        for slot in layer.slots:
            bias = (sums[slot.name] / draws - params[slot.name]).abs().max()
            # The mean of that many roundings of at most half a step's deviation, with five deviations to spare.
            assert float(bias) <= 5 * 0.5 * step / draws**0.5 + 1e-4 * step
            off = (dequantise(coded, table)[slot.name][0] - params[slot.name]).abs().max()
            assert float(off) <= step * (1 + 1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_the_greatest_value_of_a_unit_is_exact_and_zero_stays_zero(bits: int) -> None:
    params = {"a.weight": torch.tensor([[0.5, -4.0, 0.0], [0.0, 0.0, 0.0]]), "a.bias": torch.tensor([1.0, 0.0])}
    table = units(params)
    restored = dequantise(quantise(params, table, bits, np.random.default_rng(0)), table)
    assert restored["a.weight"][0, 0, 1] == -4.0
    assert restored["a.weight"][0, 0, 2] == 0.0
    assert not restored["a.weight"][0, 1].any()


def test_a_stack_is_coded_as_its_clients_one_by_one() -> None:
    table, params = net()
    clients = [{name: t * (1 + n) if t.is_floating_point() else t for name, t in params.items()} for n in range(3)]
    stack = {slot.name: torch.stack([one[slot.name] for one in clients]) for slot in table.slots}
    together = quantise_stack(stack, table, 4, [np.random.default_rng(n) for n in range(3)])
    for n, one in enumerate(clients):
        alone = quantise(one, table, 4, np.random.default_rng(n))
        assert all(torch.equal(alone.codes[s.name][0], together.codes[s.name][n]) for s in table.slots)
        assert all(torch.equal(alone.scales[x.name][0], together.scales[x.name][n]) for x in table.layers)


@given(st.data(), st.sampled_from(BITS))
@settings(max_examples=60, deadline=None)
def test_codes_survive_packing(data: st.DataObject, bits: int) -> None:
    most = greatest_code(bits)
    codes = np.array(data.draw(st.lists(st.integers(-most, most), max_size=50)), np.float32)
    packed = pack_codes(codes, bits)
    assert len(packed) == -(-len(codes) * bits // 8)
    assert unpack_codes(packed, len(codes), bits).tolist() == codes.tolist()


def test_codes_are_packed_lowest_bits_first() -> None:
    assert pack_codes(np.array([1, -1, 7], np.float32), 4) == bytes([0xF1, 0x07])
    assert pack_codes(np.array([1, -1, 0, 1, -1], np.float32), 2) == bytes([0b01001101, 0b11])


@given(st.data(), st.sampled_from(BITS))
@settings(max_examples=40, deadline=None)
def test_a_payload_in_a_few_bits_arrives_as_it_was_rounded(data: st.DataObject, bits: int) -> None:
    table, params = net()
    mask = data.draw(masks(table))
    payload = feddd.encode(params, mask, units=table, bits=bits, rng=np.random.default_rng(7))
    assert len(payload) == feddd.payload_size(mask, params, units=table, bits=bits)
    arrived, told = feddd.decode(payload, params, units=table, bits=bits, finite=True)
    stack = dequantise(quantise(params, table, bits, np.random.default_rng(7)), table)
    rounded = {name: own[0] for name, own in stack.items()}
    assert all(torch.equal(told[name], mask[name]) for name in mask)
    expected = table.zeros_like(params)
    table.put(expected, mask, table.take(rounded, mask))
    assert all(torch.equal(arrived[slot.name], expected[slot.name]) for slot in table.slots)


def test_encodings_are_not_mixed_up_and_damage_is_refused() -> None:
    table, params = net()
    full, rng = table.full_mask(), np.random.default_rng(0)
    payload = feddd.encode(params, full, units=table, bits=4, rng=rng)
    for other in (32, 8, 2):
        with pytest.raises(PayloadError, match="value encoding 2"):
            feddd.decode(payload, params, units=table, bits=other)
    with pytest.raises(ValueError, match="needs rng"):
        feddd.encode(params, full, units=table, bits=4)
    with pytest.raises(ValueError, match="not 3"):
        feddd.encode(params, full, units=table, bits=3, rng=rng)
    start_of_scales = len(payload) - -(-4 * table.droppable_elements // 8) - 4 * (table.total_units + len(table.fixed))
    for scale in (float("nan"), float("inf"), -1.0):
        bad = bytearray(payload)
        bad[start_of_scales : start_of_scales + 4] = np.float32(scale).tobytes()
        with pytest.raises(PayloadError, match="scale"):
            feddd.decode(bytes(bad), params, units=table, bits=4)
    with pytest.raises(PayloadError, match="out of range"):
        feddd.decode(payload[:-1] + bytes([(payload[-1] & 0xF0) | 8]), params, units=table, bits=4)
    with pytest.raises(PayloadError, match="bytes"):
        feddd.decode(payload[:-1], params, units=table, bits=4)


# In the simulator

METHODS: dict[str, Any] = {
    "feddd": FedDD(value_bits=4, broadcast_every=2),
    "fixed": FedDD(value_bits=8, download="fixed"),
    "fedavg": FedAvg(value_bits=2),
    "some": FedAvg(0.5, value_bits=4),
    "fedcs": FedCS(value_bits=4),
    "oort": Oort(value_bits=8),
    "feedback": FedDD(value_bits=2, broadcast_every=2, error_feedback="all"),
    "some with feedback": FedAvg(0.5, value_bits=2, error_feedback="rounded"),
}


@pytest.fixture(scope="module")
def simulations() -> Iterator[Callable[[str], list[Simulation]]]:
    """Of a model: on one worker, with every payload sent for real, on two workers; for all methods."""
    with ExitStack() as stack:

        @cache
        def of(model: str) -> list[Simulation]:
            changes: dict[str, Any] = {"model": {"name": model}}
            if model != "mlp":
                changes["data"] = {"dataset": "synthetic-colour", "train_limit": 120}
            world = build_world(experiment(fleet={"clients": 6}, **changes))
            ways: list[dict[str, Any]] = [{"workers": 1}, {"workers": 1, "wire": True}, {"workers": 2}]
            return [stack.enter_context(Simulation(world, **way)) for way in ways]

        yield of


# What sub-models change, two methods show.
@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, "mlp") for name in METHODS), *((name, "heterogeneous-b/16") for name in ("feedback", "some"))],
)
def test_workers_and_the_wire_change_nothing(
    name: str, model: str, simulations: Callable[[str], list[Simulation]]
) -> None:
    plain, *others = (list(simulation.run(METHODS[name], 5)) for simulation in simulations(model))
    for other in others:
        assert [record.clients for record in other] == [record.clients for record in plain]
        assert all(torch.equal(t, other[-1].state.model[key]) for key, t in plain[-1].state.model.items())


def test_error_feedback_needs_something_to_feed_back() -> None:
    with pytest.raises(ValueError, match="needs value_bits below 32"):
        FedAvg(error_feedback="all")
    with pytest.raises(ValueError, match="'all' does not go with leave_out"):
        FedDD(value_bits=4, error_feedback="all", leave_out=0.2)


def test_clients_that_were_away_owe_what_they_owed() -> None:
    world = build_world(experiment(fleet={"clients": 4}, faults={"lost": 0.5}))
    owed: dict[int, Any] = {}
    stayed = 0
    with Simulation(world, workers=1) as simulation:
        shard = simulation._engine._workers[0]._shard  # type: ignore[attr-defined]
        for record in simulation.run(FedDD(value_bits=4, error_feedback="all"), 5):
            now = {client: state["residual"] for client, state in shard.snapshot().items()}
            for row in record.clients:
                client = row.upload.client
                if row.upload.status == "lost" and client in owed:
                    stayed += 1
                    assert np.array_equal(now[client], owed[client])
                elif row.upload.status == "ok" and client in owed:
                    assert not np.array_equal(now[client], owed[client])
            owed = now
    assert stayed


def test_a_few_bits_cost_a_few_bits_and_learn_as_well() -> None:
    world = build_world(experiment(fleet={"clients": 6}, data={"partition": "iid"}))
    with Simulation(world, workers=1) as simulation:
        runs = {bits: list(simulation.run(FedDD(value_bits=bits, broadcast_every=2), 8)) for bits in (32, 8, 4)}
    sent = {bits: sum(row.upload.upload_bytes for row in run[-1].clients) for bits, run in runs.items()}
    assert sent[8] / sent[32] == pytest.approx(8 / 32, rel=0.05)
    assert sent[4] / sent[32] == pytest.approx(4 / 32, rel=0.10)
    losses = {bits: run[-1].evaluation.loss for bits, run in runs.items() if run[-1].evaluation}
    assert losses[8] == pytest.approx(losses[32], rel=0.1)
    assert losses[4] == pytest.approx(losses[32], rel=0.2)


def test_the_allocation_may_know_that_the_coming_download_is_fixed() -> None:
    world = build_world(experiment(fleet={"clients": 6}))
    with Simulation(world, workers=1) as simulation:
        paper, fixed = (list(simulation.run(FedDD(download=way), 3)) for way in ("paper", "fixed"))  # type: ignore[arg-type]
        shares = [[1 - row.dropout for row in record.clients] for record in fixed]
        assert sum(shares[2]) / 6 == pytest.approx(0.6, abs=0.01)
        assert shares[2] != [1 - row.dropout for row in paper[2].clients]


@pytest.mark.parametrize("wrong", [{"value_bits": 3}, {"value_bits": 4, "broadcast_every": 0}, {"download": "x"}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"value_bits|download"):
        FedDD(**wrong)
