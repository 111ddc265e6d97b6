"""What a round is made of: allocation beside HiGHS; selection, encoding, decoding and averaging beside memcpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from feddd.benchmarks.measuring import Figure, Settings
from feddd.core.aggregation import Aggregator
from feddd.core.allocation import Allocation, allocate
from feddd.core.selection import select
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.wire.payload import decode, encode
from feddd.wire.quantise import BITS


def allocation(settings: Settings) -> Iterator[Figure]:
    """The exact solver over the number of clients, beside HiGHS (at 100,000 clients, minutes, only with --full)."""
    largest = 100_000 if settings.full else 10_000
    import scipy.optimize  # noqa: F401 - HiGHS is not to pay for being imported

    for clients in (100, 1_000, 10_000, 100_000, 1_000_000):
        rng = np.random.default_rng(0)
        fleet = (
            rng.choice([1.0, 0.8, 0.6, 0.4, 0.2], clients) * 2.7e6,
            1 / rng.uniform(1e4, 5e4, clients) + 1 / rng.uniform(4e4, 2e5, clients),
            rng.uniform(0, 5, clients),
            rng.random(clients) / clients,
        )

        def solve(solver: str, fleet: tuple[np.ndarray, ...] = fleet) -> Allocation:
            return allocate(*fleet, budget=0.6, max_dropout=0.8, penalty=1.0, solver=solver)

        exact = _seconds(lambda: solve("exact"), 5)
        asked = 1.0 if clients == 1_000_000 else None
        yield Figure("allocation", f"allocation, {clients:,} clients", exact, "s", asked, "at most")
        if clients <= largest:
            begun = time.perf_counter()
            reference = solve("highs").objective
            highs = time.perf_counter() - begun
            gap = abs(solve("exact").objective - reference) / abs(reference)
            asked = 200.0 if clients == 100_000 else None
            what = f"allocation, {clients:,} clients, faster than HiGHS"
            yield Figure("allocation", what, highs / exact, "×", asked, detail=f"{highs:.3g} s, gap {gap:.0e}")


def throughput(settings: Settings) -> Iterator[Figure]:
    """GB of float32 parameters a second, a model of 11 million parameters, dropout 0.4, beside a plain copy."""
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 1300))
    table = units(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    after = {name: t + 0.01 * torch.randn(t.shape, generator=noise) for name, t in before.items()}
    mask = select(before, after, 0.4, units=table)
    data = encode(after, mask, units=table)
    values, _ = decode(data, after, units=table)
    source = torch.cat([tensor.flatten() for tensor in after.values()])
    target = torch.empty_like(source)
    aggregator = Aggregator(before, units=table)
    works: dict[str, Callable[[], object]] = {
        "a plain copy": lambda: target.copy_(source),
        "selection by importance": lambda: select(before, after, 0.4, units=table),
        "encoding": lambda: encode(after, mask, units=table),
        "decoding": lambda: decode(data, after, units=table),
        "averaging one client": lambda: aggregator.add(values, mask, 600.0),
        "the new global model": aggregator.result,
    }
    gigabytes = 4e-9 * table.elements
    for what, work in works.items():
        asked = None if what in ("a plain copy", "the new global model") else 1.0
        yield Figure("throughput", what, gigabytes / _seconds(work, settings.rounds), "GB/s", asked)
    difference, whole = {name: after[name] - before[name] for name in after}, table.full_mask()
    for bits in BITS:

        def code(bits: int = bits) -> bytes:
            return encode(difference, whole, units=table, bits=bits, rng=stream(0, "rounding"))

        coded = code()
        for what, work in (
            ("rounding and encoding", code),
            ("decoding", lambda coded=coded, bits=bits: decode(coded, difference, units=table, bits=bits)),
        ):
            speed = gigabytes / _seconds(work, settings.rounds)
            yield Figure("throughput", f"{what}, {bits} bits, everything sent", speed, "GB/s", 0.5)


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median of a few, after some to warm up: memory that was never touched before is slow."""
    for _ in range(3):
        work()
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
