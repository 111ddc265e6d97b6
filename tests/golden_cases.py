"""Small runs of every method whose numbers are pinned: what each gives as columns, and how two results are compared.

On a machine whose digests are in `golden.json` every column must be the same to the bit. On another one the last digits
differ: a product sums in another order, and once in a while that decides which of two close units is sent. There each
column's mean, root mean square and projection on fixed random weights must agree to TOLERANCE: far above what rounding
does in a few rounds, far below what another algorithm does.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddd.errors import InputError
from feddd.experiments.cells import write_strategy
from feddd.experiments.config import Experiment, StrategySection
from feddd.experiments.results import load_results
from feddd.experiments.running import build_world
from feddd.simulation.simulator import RoundRecord, Simulation
from worlds import experiment

FILE = Path(__file__).with_name("golden.json")
REGENERATE = "python tools/golden.py"
TOLERANCE = 0.02
LOOSE = {"rounds.mask_error": 0.2}
"""A ratio of small squares: the difference of two averages over few clients."""
TABLES = ("rounds", "clients", "classes")
ROUNDS = 4

Columns = dict[str, np.ndarray[Any, Any]]

COLOUR = {"dataset": "synthetic-colour", "partition": "noniid-b", "train_limit": 120}
WORLDS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "cnn1": {"data": {"train_limit": 120}, "model": {"name": "cnn1"}},
    "cnn2/4": {"data": COLOUR, "model": {"name": "cnn2/4"}},
    "heterogeneous-b/16": {"data": COLOUR, "model": {"name": "heterogeneous-b/16"}},
    "faults": {
        "faults": {
            **{"lost": 0.1, "crashed": 0.05, "late": 0.2, "slow": 0.1, "links": 0.1, "garbage": 0.05},
            **{"corrupted": 0.1, "non_finite": 0.05, "wrong_model": 0.05, "replayed": 0.1, "lying": 0.1},
            **{"deadline_seconds": 400.0, "quorum": 2},
        }
    },
    "gone": {"faults": {"gone": 0.2, "unreliable": 0.5, "late": 0.3}},
}

METHODS: dict[str, dict[str, Any]] = {
    "feddd": {"name": "feddd", "broadcast_every": 3},
    "feddd uniform": {"name": "feddd", "rates": "uniform", "selector": "random"},
    "feddd 4 bits": {"name": "feddd", "broadcast_every": 2, "value_bits": 4},
    "fedavg": {"name": "fedavg"},
    "fedavg half": {"name": "fedavg", "participation": 0.5},
    "fedcs": {"name": "fedcs"},
    "fedcs deadline": {"name": "fedcs", "mode": "deadline", "deadline_seconds": 200.0},
    "oort": {"name": "oort"},
    "oort budget": {"name": "oort", "mode": "budget"},
    "heterofl": {"name": "heterofl"},
    "fjord": {"name": "fjord"},
    "fedrolex": {"name": "fedrolex"},
    "federated-dropout": {"name": "federated-dropout"},
    "topk": {"name": "topk", "share": 0.1},
    "stc": {"name": "stc", "share": 0.05, "download_share": 0.05},
    "fedprox": {"name": "fedprox", "mu": 0.1},
    "scaffold": {"name": "scaffold"},
    "scaffold half": {"name": "scaffold", "participation": 0.5},
}
"""On every model; a method that does not fit one is pinned by its refusal."""

ON_THE_MLP: dict[str, dict[str, Any]] = {
    **{f"selector {rule}": {"selector": rule} for rule in ("magnitude", "delta", "random", "ordered")},
    "h 0": {"broadcast_every": 0},
    "h 1": {"broadcast_every": 1},
    "h later": {"broadcast_every": 3, "broadcast_later": [[2, 1], [3, 2]]},
    "no dropout": {"budget": 1.0},
    "always send": {"always_send": ["fc3"]},
    "penalty 0": {"penalty": 0.0},
    "download fixed": {"download": "fixed"},
    "2 bits": {"broadcast_every": 2, "value_bits": 2},
    "8 bits": {"broadcast_every": 2, "value_bits": 8, "download": "fixed"},
    "feedback rounded": {"broadcast_every": 2, "value_bits": 2, "error_feedback": "rounded"},
    "feedback all": {"broadcast_every": 2, "value_bits": 4, "error_feedback": "all"},
    "auto progress": {"budget": "auto", "broadcast_error": 1e-3},
    "auto round_seconds": {"budget": "auto", "auto_target": "round_seconds", "auto_value": 100.0},
    "auto round_bytes": {"budget": "auto", "auto_target": "round_bytes", "auto_value": 1.5e6},
    "auto run_bytes": {"budget": "auto", "auto_target": "run_bytes", "auto_value": 8e6, "auto_rounds": ROUNDS},
    "leave out": {"leave_out": 0.4, "max_absence": 2},
    "leave out 4 bits": {"leave_out": 0.4, "max_absence": 2, "value_bits": 4},
}
FURTHER: dict[str, dict[str, Any]] = {
    "eden": {"name": "eden", "bits": 2},
    "fedavgm": {"name": "fedavg", "server": {"name": "fedavgm"}},
    "fedadam": {"name": "feddd", "broadcast_every": 3, "server": {"name": "fedadam"}},
}
OTHERS_IN_BITS: dict[str, dict[str, Any]] = {
    "fedavg 8 bits": {"name": "fedavg", "value_bits": 8, "participation": 0.5},
    "fedcs 4 bits": {"name": "fedcs", "value_bits": 4},
    "oort 2 bits feedback": {"name": "oort", "value_bits": 2, "error_feedback": "all"},
}


def _cases() -> dict[str, Callable[[], Columns]]:
    found: dict[str, Callable[[], Columns]] = {}

    def add(name: str, world: str, strategy: Mapping[str, Any], workers: int = 1) -> None:
        found[name] = lambda: _simulated(world, dict(strategy), workers)

    for world in ("mlp", "cnn1", "cnn2/4", "heterogeneous-b/16"):
        for method, strategy in METHODS.items():
            add(f"{world}: {method}", world, strategy)
    for method, options in ON_THE_MLP.items():
        add(f"mlp: {method}", "mlp", {"name": "feddd"} | options)
    for method, strategy in (OTHERS_IN_BITS | FURTHER).items():
        add(f"mlp: {method}", "mlp", strategy)
    for world in ("faults", "gone"):
        for method in ("feddd", "feddd 4 bits", "fedavg", "oort"):
            add(f"{world}: {method}", world, METHODS[method])
    add("two workers: feddd 4 bits", "mlp", METHODS["feddd 4 bits"], workers=2)
    add("two workers: heterofl", "mlp", METHODS["heterofl"], workers=2)
    for method in ("feddd", "feddd 4 bits", "fedavg half"):
        found[f"flower: {method}"] = lambda method=method: _deployed(METHODS[method])
    found["flower: feedback all"] = lambda: _deployed({"name": "feddd"} | ON_THE_MLP["feedback all"])
    return found


def _experiment(world: str, strategy: Mapping[str, Any]) -> Experiment:
    base = {"fleet": {"clients": 6}, "rounds": ROUNDS}
    data = {"train_limit": 240} | WORLDS[world].get("data", {})
    section = StrategySection.model_validate({"label": "it", **strategy})
    return experiment(**base | WORLDS[world] | {"data": data}).model_copy(update={"strategy": (section,)})


@cache
def _simulation(world: str, workers: int) -> Simulation:
    return Simulation(build_world(_experiment(world, METHODS["feddd"])), workers=workers)


def _simulated(world: str, strategy: dict[str, Any], workers: int) -> Columns:
    """Run a strategy and return the promised columns of its tables and its final model, or why it was refused."""
    simulation = _simulation(world, workers)
    records: list[RoundRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            write_strategy(simulation, _experiment(world, strategy), Path(folder), records.append)
        except (InputError, ValueError) as error:
            return {"refused": np.array([str(error)])}
        tables = load_results(folder).tables
    # Under the metric accuracy this column repeats the other one, which is pinned.
    assert tables["rounds"]["test_metric"].equals(tables["rounds"]["test_accuracy"])
    columns = {
        f"{name}.{column}": tables[name][column].to_numpy()
        for name in TABLES
        for column in tables[name].column_names
        if column not in ("strategy", "seed", "test_metric")  # the metric of these runs is their accuracy
    }
    return columns | {"model": _vector(records[-1].state.model)}


def _deployed(strategy: dict[str, Any]) -> Columns:
    """Run a strategy on Flower's side, on a grid in memory, and return what the server knows after each round."""
    from feddd.flower import RoundFacts
    from test_flower import grid_of, initial, small_world, strategy_of

    world, facts = small_world(), list[RoundFacts]()
    method = StrategySection.model_validate(strategy).build()
    with tempfile.TemporaryDirectory() as folder:
        result = strategy_of(world, method, facts).start(grid_of(world, Path(folder)), initial(world), ROUNDS)
    uploads = [upload for fact in facts for upload in fact.uploads]
    names = ("client", "status", "kept_share", "train_loss", "samples", "upload_bytes", "download_bytes")
    columns = {name: np.array([getattr(upload, name) for upload in uploads]) for name in names}
    return columns | {"model": _vector(result.arrays.to_torch_state_dict())}


def _vector(model: Mapping[str, torch.Tensor]) -> np.ndarray[Any, Any]:
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in model.values()]).numpy()


CASES = _cases()


# Comparing


def digests(columns: Columns) -> dict[str, str]:
    """Return what changes with the last bit of a column."""
    return {name: hashlib.sha256(_bytes(values)).hexdigest()[:10] for name, values in columns.items()}


def _bytes(values: np.ndarray[Any, Any]) -> bytes:
    if values.dtype.kind in "OUS":
        return json.dumps([None if value is None else str(value) for value in values.tolist()]).encode()
    return f"{values.dtype.str}{values.shape}".encode() + np.ascontiguousarray(values).tobytes()


def fingerprint(columns: Columns) -> dict[str, list[float] | str]:
    """Return a few numbers of each column that rounding hardly moves; of text columns a digest."""
    return {
        name: digests({name: values})[name] if values.dtype.kind in "OUS" else _moments(values)
        for name, values in columns.items()
    }


def _moments(values: np.ndarray[Any, Any]) -> list[float]:
    numbers = np.nan_to_num(values.astype(np.float64))
    weights = np.random.default_rng(0).uniform(-1, 1, len(numbers))
    size = max(1, len(numbers))
    found = (
        len(values),
        numbers.sum() / size,
        math.sqrt((numbers**2).sum() / size),
        weights @ numbers / math.sqrt(size),
    )
    return [float(f"{one:.9g}") for one in found]


def changed_columns(found: Mapping[str, Any], pinned: Mapping[str, Any]) -> list[str]:
    """Return the columns whose digests, or whose numbers beyond the tolerance, differ."""
    return [name for name in {**pinned, **found} if not _agree(name, found.get(name), pinned.get(name))]


def _agree(name: str, found: Any, pinned: Any) -> bool:
    if isinstance(found, list) and isinstance(pinned, list):
        apart = LOOSE.get(name, TOLERANCE) * max(abs(found[2]), abs(pinned[2]))
        return found[0] == pinned[0] and all(abs(a - b) <= apart for a, b in zip(found, pinned, strict=True))
    return bool(found == pinned)


def machine() -> str:
    """Name what the last digits depend on: the processor, its widest instructions, and torch."""
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8").splitlines() if info.is_file() else ():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    model = [facts.get(key, platform.machine()) for key in ("model name", "cpu family", "model", "stepping")]
    flags = set(facts.get("flags", "").split())
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in flags]
    return " | ".join([" ".join(model), " ".join(wide), f"torch {torch.__version__}"])


def read_golden() -> dict[str, Any]:
    """Return the pinned numbers: fingerprints by case, and digests by machine and case."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
