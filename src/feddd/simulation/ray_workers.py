"""Shards as actors of a Ray cluster: beyond one machine, with the same numbers. The only module that knows Ray."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import Any

import numpy as np

from feddd.errors import InputError
from feddd.simulation.samples import Layout, from_buffer
from feddd.simulation.shard import Shard, ShardSpec
from feddd.simulation.worker_process import WORKER_ENVIRONMENT
from feddd.simulation.workers import Fill, Worker, WorkerDied, WorkerFailed

try:
    import ray
except ImportError as error:
    raise InputError('--engine ray needs Ray: pip install "feddd[ray]"') from error


class _Actor:
    """A shard on some machine of the cluster; the samples come from Ray's object store, one copy a machine."""

    def __init__(self, path: list[str], spec: ShardSpec, arrays: Any) -> None:
        sys.path[:] = [*sys.path, *(folder for folder in path if folder not in sys.path)]
        self._shard = Shard(spec, arrays)

    def call(self, method: str, *arguments: Any) -> tuple[str | None, Any]:
        """Return a trace and nothing, or nothing and the result."""
        try:
            return None, getattr(self._shard, method)(*arguments)
        except Exception:  # whatever goes wrong belongs to the coordinator, with its trace; the actor lives on
            return traceback.format_exc(), None


class RayCluster:
    """A Ray cluster: the one at `address`, else at RAY_ADDRESS; without either, one of its own on this machine.

    A Ray that this process is connected to already is used as it is, and left as it is.
    """

    def __init__(self, address: str | None = None) -> None:
        self._ours = not ray.is_initialized()
        if self._ours:
            # Defaults for a Ray that is started here; whoever has set these keeps them.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise InputError(f"cannot reach a Ray cluster: {' '.join(str(error).split())}") from error
        self.cores = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
        self._samples: Any = None
        self._class = ray.remote(num_cpus=1, runtime_env={"env_vars": WORKER_ENVIRONMENT})(_Actor)

    def load(self, layout: Layout, fill: Fill) -> None:
        """Put the samples into the object store."""
        arrays = from_buffer(np.empty(layout.nbytes, np.uint8), layout)
        fill(arrays)
        self._samples = ray.put(arrays)

    def start(self, spec: ShardSpec) -> Worker:
        """Return an actor, wherever a core is free."""
        return RayWorker(self._class.remote(sys.path, spec, self._samples))

    def prepare(self) -> None:
        """The samples are in the object store already."""

    def share(self, value: Any) -> Any:
        """Once into the object store; Ray hands each actor the value behind the reference."""
        return ray.put(value)

    def close(self) -> None:
        """End Ray if it was started here."""
        self._samples = None
        if self._ours:
            ray.shutdown()


class RayWorker:
    """A shard behind an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._answer: Any = None

    def begin(self, method: str, *arguments: object) -> None:
        """Send the call."""
        self._answer = self._actor.call.remote(method, *arguments)

    def finish(self) -> Any:
        """Wait for the answer."""
        try:
            problem, result = ray.get(self._answer)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
            raise WorkerDied(f"a Ray actor was lost ({type(error).__name__})") from error
        if problem:
            raise WorkerFailed(problem)
        return result

    def close(self) -> None:
        """End the actor."""
        with contextlib.suppress(Exception):  # it may be gone, and Ray with it
            ray.kill(self._actor)
