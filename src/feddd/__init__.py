"""FedDD: federated learning over slow, unequal links, with differential parameter dropout."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Looked up on first use, so that `import feddd` and `feddd --help` do not wait for torch.
_HOMES = {
    "Aggregator": "feddd.core.aggregation",
    "Allocation": "feddd.core.allocation",
    "Dataset": "feddd.world.dataset",
    "FedAvg": "feddd.strategies.fedavg",
    "FedCS": "feddd.strategies.fedcs",
    "FedDD": "feddd.strategies.feddd",
    "InputError": "feddd.errors",
    "Oort": "feddd.strategies.oort",
    "PayloadError": "feddd.wire.format",
    "Results": "feddd.experiments.results",
    "SweepResults": "feddd.sweeps.results",
    "Units": "feddd.core.units",
    "allocate": "feddd.core.allocation",
    "decode": "feddd.wire.payload",
    "encode": "feddd.wire.payload",
    "load_experiment": "feddd.experiments.loading",
    "load_results": "feddd.experiments.results",
    "load_sweep": "feddd.sweeps.results",
    "payload_size": "feddd.wire.payload",
    "resume": "feddd.experiments.running",
    "resume_sweep": "feddd.sweeps.running",
    "run": "feddd.experiments.running",
    "select": "feddd.core.selection",
    "sweep": "feddd.sweeps.running",
    "units": "feddd.core.units",
}

if TYPE_CHECKING:
    from feddd.core.aggregation import Aggregator
    from feddd.core.allocation import Allocation, allocate
    from feddd.core.selection import select
    from feddd.core.units import Units, units
    from feddd.errors import InputError
    from feddd.experiments.loading import load_experiment
    from feddd.experiments.results import Results, load_results
    from feddd.experiments.running import resume, run
    from feddd.strategies.fedavg import FedAvg
    from feddd.strategies.fedcs import FedCS
    from feddd.strategies.feddd import FedDD
    from feddd.strategies.oort import Oort
    from feddd.sweeps.results import SweepResults, load_sweep
    from feddd.sweeps.running import resume_sweep, sweep
    from feddd.wire.format import PayloadError
    from feddd.wire.payload import decode, encode, payload_size
    from feddd.world.dataset import Dataset

__all__ = [
    "Aggregator",
    "Allocation",
    "Dataset",
    "FedAvg",
    "FedCS",
    "FedDD",
    "InputError",
    "Oort",
    "PayloadError",
    "Results",
    "SweepResults",
    "Units",
    "__version__",
    "allocate",
    "decode",
    "encode",
    "load_experiment",
    "load_results",
    "load_sweep",
    "payload_size",
    "resume",
    "resume_sweep",
    "run",
    "select",
    "sweep",
    "units",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'feddd' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
