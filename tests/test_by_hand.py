"""FedDD written out with plain loops gives the library's numbers, round by round."""

import importlib.util
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from feddd.simulation.shard import single_thread
from feddd.simulation.simulator import RoundRecord, Simulation, World
from feddd.simulation.training import Training
from feddd.strategies.feddd import FedDD
from feddd.wire.format import unpack_mask
from feddd.world.fleets import Devices

SCRIPT = Path(__file__).parents[1] / "examples" / "feddd_by_hand.py"
ROUNDS, BROADCAST_EVERY = 5, 3


@pytest.fixture(scope="module")
def by_hand() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("feddd_by_hand", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def ours(by_hand: ModuleType) -> list[Any]:
    with single_thread():
        return list(by_hand.run(ROUNDS, broadcast_every=BROADCAST_EVERY))


@pytest.fixture(scope="module")
def library(by_hand: ModuleType) -> tuple[Simulation, list[RoundRecord]]:
    world = World(
        dataset=by_hand.DATA,
        parts=by_hand.PARTS,
        devices=Devices(by_hand.UPLINK_BITS_PER_S, by_hand.DOWNLINK_BITS_PER_S, by_hand.COMPUTE_SECONDS),
        model="mlp",
        training=Training(by_hand.EPOCHS, by_hand.BATCH_SIZE, by_hand.LEARNING_RATE, trainer="reference"),
        seed=by_hand.SEED,
    )
    strategy = FedDD(by_hand.BUDGET, by_hand.MAX_DROPOUT, by_hand.PENALTY, BROADCAST_EVERY)
    with Simulation(world, workers=1) as simulation:
        return simulation, list(simulation.run(strategy, ROUNDS))


def test_the_global_models_agree(ours: list[Any], library: tuple[Simulation, list[RoundRecord]]) -> None:
    for record, expected in zip(ours, library[1], strict=True):
        state = expected.state.model
        for layer, rows in zip(("fc1", "fc2", "fc3"), record.model, strict=True):
            joined = torch.cat([state[f"{layer}.weight"], state[f"{layer}.bias"][:, None]], 1)
            np.testing.assert_allclose(rows, joined, rtol=0, atol=1e-5)
        assert expected.evaluation is not None
        assert record.accuracy == pytest.approx(expected.evaluation.accuracy, abs=2e-3)


def test_the_models_moved_and_learnt_something(ours: list[Any]) -> None:
    assert all(not torch.equal(a.model[0], b.model[0]) for a, b in pairwise(ours))
    assert ours[-1].accuracy > 0.2


def test_the_masks_are_the_same_units(ours: list[Any], library: tuple[Simulation, list[RoundRecord]]) -> None:
    simulation, records = library
    for record, expected in zip(ours, records, strict=True):
        for mask, packed in zip(record.masks, expected.state.masks, strict=True):
            assert packed is not None
            theirs = unpack_mask(packed, simulation.units)
            assert dict(zip(("fc1", "fc2", "fc3"), mask, strict=True)) == {k: v.tolist() for k, v in theirs.items()}


def test_the_bytes_agree_exactly_both_ways(ours: list[Any], library: tuple[Simulation, list[RoundRecord]]) -> None:
    for record, expected in zip(ours, library[1], strict=True):
        assert record.upload_bytes == [row.upload.upload_bytes for row in expected.clients]
        assert record.download_bytes == [row.upload.download_bytes for row in expected.clients]


def test_downloads_are_full_in_rounds_1_and_2_and_after_the_broadcast(ours: list[Any]) -> None:
    full = 16 + 4 * 6 + 4 * 85_614
    is_full = [all(size == full for size in record.download_bytes) for record in ours]
    assert is_full == [True, True, False, True, False]


def test_the_dropout_rates_agree(ours: list[Any], library: tuple[Simulation, list[RoundRecord]]) -> None:
    for record, expected in zip(ours, library[1], strict=True):
        np.testing.assert_allclose(record.rates, [row.dropout for row in expected.clients], rtol=0, atol=1e-6)
    assert ours[0].rates == [0.0] * 10
    assert all(len({round(rate, 6) for rate in record.rates}) > 2 for record in ours[1:])


def test_the_simulated_clocks_agree(ours: list[Any], library: tuple[Simulation, list[RoundRecord]]) -> None:
    expected = [record.clock_seconds for record in library[1]]
    np.testing.assert_allclose([record.clock_seconds for record in ours], expected, rtol=1e-9)


def test_the_script_stays_short_enough_to_read_at_once() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 150
