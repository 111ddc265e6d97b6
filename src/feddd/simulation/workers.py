"""Where shards live: in this process, or in worker processes with one thread each. All share one copy of the data."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from feddd.errors import RunError
from feddd.simulation.samples import Layout, SampleArrays, from_buffer, memory_file
from feddd.simulation.shard import Shard, ShardSpec
from feddd.simulation.worker_process import WorkerPool, WorkerProcess

Fill = Callable[[SampleArrays], None]


class WorkerDied(RunError):
    """A worker ended without being asked to."""


class WorkerFailed(RuntimeError):
    """A worker raised an exception, which is a bug; the message holds its traceback."""


class Worker(Protocol):
    """Something that owns a shard: `begin` starts a call, `finish` waits for its answer."""

    def begin(self, method: str, *arguments: object) -> None:
        """Start a method of the shard."""
        ...

    def finish(self) -> Any:
        """Return its result."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Backend(Protocol):
    """Starts workers that all see the same samples."""

    def start(self, spec: ShardSpec) -> Worker:
        """Return a worker with its shard; it may still be building it."""
        ...

    def prepare(self) -> None:
        """Called once, after the workers were started and before they are asked anything."""
        ...

    def share(self, value: Any) -> Any:
        """Return what to hand to `begin` for a value that goes to every worker."""
        ...

    def close(self) -> None:
        """Let go of the samples."""
        ...


class InProcess:
    """Shards in this process."""

    def __init__(self, layout: Layout, fill: Fill) -> None:
        self._arrays = from_buffer(np.empty(layout.nbytes, np.uint8), layout)
        fill(self._arrays)

    def start(self, spec: ShardSpec) -> Worker:
        """Build the shard at once."""
        return LocalWorker(Shard(spec, self._arrays))

    def prepare(self) -> None:
        """All is ready."""

    def share(self, value: Any) -> Any:
        """Return the value itself."""
        return value

    def close(self) -> None:
        """Let go of nothing: there is nothing to close."""


class LocalWorker:
    """A shard in this process."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._result: Any = None

    def begin(self, method: str, *arguments: object) -> None:
        """Run at once."""
        self._result = getattr(self._shard, method)(*arguments)

    def finish(self) -> Any:
        """Return what `begin` computed."""
        return self._result

    def close(self) -> None:
        """Let go of nothing: there is nothing to close."""


class Processes:
    """Shards in processes of their own, on this machine; the samples lie in memory that all of them map."""

    def __init__(self, layout: Layout, fill: Fill, pool: WorkerPool) -> None:
        self._layout = layout
        self._fill = fill
        self._pool = pool
        self._descriptor = memory_file(layout.nbytes)

    def start(self, spec: ShardSpec) -> Worker:
        """Tell a process what it is; it does not look at the samples before the first call."""
        return ProcessWorker(self._pool.take(), spec, self._layout, self._descriptor)

    def prepare(self) -> None:
        """Write the samples, while the workers import what they need."""
        self._fill(mapped(self._descriptor, self._layout))

    def share(self, value: Any) -> Any:
        """Return the value itself: it is sent to each."""
        return value

    def close(self) -> None:
        """The memory goes when the last worker does."""
        os.close(self._descriptor)


class ProcessWorker:
    """A shard in a process of its own."""

    def __init__(self, process: WorkerProcess, spec: ShardSpec, layout: Layout, samples: int) -> None:
        self.process = process
        self._send((sys.path, spec, layout), samples)

    def begin(self, method: str, *arguments: object) -> None:
        """Send the call."""
        self._send((method, arguments))

    def finish(self) -> Any:
        """Wait for the answer."""
        try:
            problem, result = self.process.receive()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if problem:
            raise WorkerFailed(problem)
        return result

    def close(self) -> None:
        """The worker ends when its connection does."""
        self.process.close()

    def _send(self, message: object, descriptor: int | None = None) -> None:
        try:
            self.process.send(message, descriptor=descriptor)
        except ConnectionError as error:
            raise self._died() from error

    def _died(self) -> WorkerDied:
        return WorkerDied(f"a worker process ended unexpectedly (exit code {self.process.wait()})")


def mapped(descriptor: int, layout: Layout) -> SampleArrays:
    """Return the samples in a memory file; what one process writes, all see."""
    return from_buffer(mmap.mmap(descriptor, layout.nbytes), layout)
