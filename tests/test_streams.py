"""Generators with an address."""

import random

import numpy as np
import torch

from feddd.core.streams import stream

ADDRESSES: list[tuple[str | int, ...]] = [
    (),
    ("batches",),
    ("selection",),
    ("batches", 0),
    ("batches", 1),
    ("batches", 2),
    ("batches", 1, 2),
    ("batches", 2, 1),
    ("selection", 1, 2),
    ("batches", 12),
    ("batches", 1, 2, 3),
    ("fleet", "uplink"),
    ("fleet", "downlink"),
    ("uplink", "fleet"),
]


def test_the_same_address_gives_the_same_numbers() -> None:
    for address in ADDRESSES:
        assert np.array_equal(stream(7, *address).random(5), stream(7, *address).random(5))


def test_different_addresses_and_seeds_give_different_numbers() -> None:
    draws = {tuple(stream(seed, *address).random(3)) for seed in (0, 1, 2**31) for address in ADDRESSES}
    assert len(draws) == 3 * len(ADDRESSES)


def test_no_two_of_many_clients_and_rounds_share_a_stream() -> None:
    draws = {
        stream(0, name, t, n).integers(2**63)
        for name in ("batches", "selection")
        for t in range(1, 40)
        for n in range(40)
    }
    assert len(draws) == 2 * 39 * 40


def test_streams_do_not_depend_on_what_was_drawn_before_nor_touch_global_generators() -> None:
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    expected = stream(3, "b", 2).random()
    stream(3, "b", 1).random(100)
    assert stream(3, "b", 2).random() == expected
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_numpy_integers_are_the_same_address_as_python_ones() -> None:
    assert stream(np.int64(3), "b", np.int32(2)).random() == stream(3, "b", 2).random()  # type: ignore[arg-type]
