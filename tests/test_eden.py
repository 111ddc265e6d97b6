"""EDEN against the published rule: the normal's best quantiser, unbiased, errors as predicted, bytes as charged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import norm

from feddd.core.units import units
from feddd.experiments.methods import construct
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.strategies.eden import Eden as EdenMethod
from feddd.wire.difference import Difference, Feedback
from feddd.wire.eden import BLOCK, CENTROIDS, Eden, block_sizes, compress, hadamard, restore
from feddd.wire.exchange import Chain, chain, encode, payload_sizes, read, through_bytes, write
from feddd.wire.format import PayloadError
from feddd.wire.quantised import Bits
from feddd.wire.select import Blocks, Select, TopK
from feddd.wire.stage import At, Known, Update
from worlds import experiment

NET = torch.nn.Sequential(torch.nn.Linear(70, 60), torch.nn.Linear(60, 9))
TABLE = units(NET)
CHAINS = [
    chain(Difference(), Eden(1)),
    chain(Difference(), Select(0.4), Eden(2)),
    chain(Difference(), Feedback(), TopK(0.05), Eden(3)),
    chain(Eden(4)),
]


def stack(clients: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {slot.name: torch.randn(clients, *slot.shape, generator=generator) for slot in TABLE.slots}


def sent(line: Chain, clients: int = 3) -> Update:
    known = {name: tensors[0] for name, tensors in stack(1, 9).items()}
    before, after = {name: t.expand(clients, *t.shape) for name, t in known.items()}, stack(clients, 1)
    at = At(TABLE, range(clients), 2, 0, Known(known, known), [None] * clients, before, after)
    return encode([line] * clients, [{}] * clients, at)[0]


@pytest.mark.parametrize("bits", CENTROIDS)
def test_centroids_are_the_means_of_their_cells(bits: int) -> None:
    centroids = CENTROIDS[bits].astype(np.float64)
    edges = [-np.inf, *(centroids[1:] + centroids[:-1]) / 2, np.inf]
    for centroid, (low, high) in zip(centroids, itertools.pairwise(edges), strict=True):
        assert centroid == pytest.approx(norm.expect(lb=low, ub=high, conditional=True, func=lambda z: z), abs=1e-5)


def test_the_transform_is_the_matrix_of_signs() -> None:
    matrix = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)], np.float32)
    rows = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    assert np.allclose(hadamard(rows), rows @ matrix, atol=1e-5)
    assert np.allclose(hadamard(hadamard(rows)), 16 * rows, atol=1e-4)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_the_error_is_the_predicted_one(bits: int) -> None:
    vector = np.random.default_rng(1).standard_t(3, size=8 * BLOCK).astype(np.float32)
    edges = [-np.inf, *(CENTROIDS[bits][1:] + CENTROIDS[bits][:-1]) / 2, np.inf]
    kept = float((CENTROIDS[bits].astype(np.float64) ** 2) @ np.diff(norm.cdf(edges)))
    error = np.mean(
        [np.sum((restore(*compress(vector, seed, bits), seed, len(vector), bits) - vector) ** 2) for seed in range(4)]
    )
    assert error / np.sum(vector**2) == pytest.approx(1 / kept - 1, rel=0.03)
    if bits == 1:
        assert 1 / kept - 1 == pytest.approx(np.pi / 2 - 1, rel=1e-3)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_the_mean_over_rotations_is_the_vector(bits: int) -> None:
    vector, draws = np.random.default_rng(2).normal(size=300).astype(np.float32), 2000
    found = np.array([restore(*compress(vector, seed, bits), seed, len(vector), bits) for seed in range(draws)])
    spread = found.std(0) / np.sqrt(draws)
    assert np.abs((found.mean(0) - vector) / spread).max() < 5
    # Along the vector itself there is no error at all, whatever the rotation: that is what the scale is for.
    assert np.allclose(found @ vector, vector @ vector, rtol=1e-4)


@pytest.mark.parametrize("bits", CENTROIDS)
def test_where_few_numbers_hold_most_of_the_norm_the_mean_is_nearly_the_vector(bits: int) -> None:
    vector, draws = np.random.default_rng(2).lognormal(size=300).astype(np.float32), 2000
    found = np.array([restore(*compress(vector, seed, bits), seed, len(vector), bits) for seed in range(draws)])
    chance = (found.var(0) / draws).sum()
    assert ((found.mean(0) - vector) ** 2).sum() - chance < 1e-3 * (vector**2).sum()


@pytest.mark.parametrize("count", [0, 1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1])
def test_any_number_of_numbers_and_zeros_come_back(count: int) -> None:
    assert sum(block_sizes(count)) >= count
    zeros = np.zeros(count, np.float32)
    assert np.array_equal(restore(*compress(zeros, 3, 2), 3, count, 2), zeros)
    one = np.full(count, 2.0, np.float32)
    assert restore(*compress(one, 3, 4), 3, count, 4).shape == (count,)


@pytest.mark.parametrize("line", CHAINS, ids=lambda line: line.name)
def test_bytes_hold_what_memory_holds_and_are_as_many_as_charged(line: Chain) -> None:
    update = sent(line)
    again = through_bytes([line] * 3, update, TABLE)
    assert all(torch.equal(again.values[name], update.values[name]) for name in again.values)
    lengths = [len(write(line, update, place, TABLE)) for place in range(3)]
    assert lengths == payload_sizes(line, update, TABLE).tolist()
    planned = line.planned_bytes(TABLE)
    assert planned is None or {planned} == set(lengths)


def test_a_stack_gives_each_client_what_it_gets_alone() -> None:
    together = sent(CHAINS[0], 3)
    own = {name: tensors[:1] for name, tensors in stack(3, 1).items()}
    known = {name: tensors[0] for name, tensors in stack(1, 9).items()}
    at = At(TABLE, [0], 2, 0, Known(known, known), [None], {name: t[None] for name, t in known.items()}, own)
    assert write(CHAINS[0], encode([CHAINS[0]], [{}], at)[0], 0, TABLE) == write(CHAINS[0], together, 0, TABLE)


def test_what_nobody_writes_is_refused() -> None:
    line = chain(Eden(1))
    data = bytearray(write(line, sent(line), 0, TABLE))
    with pytest.raises(PayloadError):
        read(line, bytes(data[:-1]), TABLE)
    place = data.index(write(line, sent(line), 0, TABLE)[-sum(block_sizes(TABLE.elements)) // 8 :]) - 4
    data[place : place + 4] = np.array([np.nan], "<f4").tobytes()
    with pytest.raises(PayloadError, match="scale"):
        read(line, bytes(data), TABLE)


def test_it_stands_where_numbers_are_written() -> None:
    with pytest.raises(ValueError, match="1, 2, 3 or 4 bits, not 5"):
        chain(Eden(5))
    with pytest.raises(ValueError, match="written once"):
        chain(Bits(4), Eden(1))
    with pytest.raises(ValueError, match="1, 2, 3 or 4"):
        construct("eden", {"bits": 0})
    assert chain(Blocks(b""), Eden(1)).encoding == 7


def test_it_learns_and_really_written_payloads_give_the_same_rounds() -> None:
    world = build_world(experiment(fleet={"clients": 4}, data={"train_limit": 200}))
    results = []
    for wire in (False, True):
        with Simulation(world, workers=1, wire=wire) as simulation:
            results.append(list(simulation.run(EdenMethod(bits=2), 3)))
    plain, written = results
    assert [r.clients for r in plain] == [r.clients for r in written]
    assert all(torch.equal(plain[-1].state.model[n], t) for n, t in written[-1].state.model.items())
    assert plain[-1].evaluation.loss < plain[0].evaluation.loss
