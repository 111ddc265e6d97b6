"""Where shards live: in this process, or in worker processes with one thread each. All share one copy of the data."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from feddd.errors import RunError
from feddd.simulation.samples import Layout, SampleArrays, from_buffer, memory_file
from feddd.simulation.shard import Shard, ShardSpec

Fill = Callable[[SampleArrays], None]

# One thread each; and memory that is freed stays with the process: a round frees and takes the same megabytes for every
# client, and handing them back to the system and zeroing them anew cost more than scoring the units.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


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
        """Its result."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Backend(Protocol):
    """Starts workers that all see the same samples."""

    def start(self, spec: ShardSpec) -> Worker:
        """A worker with its shard; it may still be building it."""
        ...

    def prepare(self) -> None:
        """Called once, after the workers were started and before they are asked anything."""
        ...

    def share(self, value: Any) -> Any:
        """What to hand to `begin` for a value that goes to every worker."""
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
        """The value itself."""
        return value

    def close(self) -> None:
        """Nothing to let go of."""


class LocalWorker:
    """A shard in this process."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._result: Any = None

    def begin(self, method: str, *arguments: object) -> None:
        """Run at once."""
        self._result = getattr(self._shard, method)(*arguments)

    def finish(self) -> Any:
        """What `begin` computed."""
        return self._result

    def close(self) -> None:
        """Nothing to let go of."""


class Processes:
    """Shards in processes of their own, on this machine; the samples lie in memory that all of them map."""

    def __init__(self, layout: Layout, fill: Fill) -> None:
        self._layout = layout
        self._fill = fill
        self._descriptor = memory_file(layout.nbytes)

    def start(self, spec: ShardSpec) -> Worker:
        """Start the process; it does not look at the samples before the first call."""
        return ProcessWorker(spec, self._layout, self._descriptor)

    def prepare(self) -> None:
        """Write the samples, while the workers import what they need."""
        self._fill(mapped(self._descriptor, self._layout))

    def share(self, value: Any) -> Any:
        """The value itself: it is sent to each."""
        return value

    def close(self) -> None:
        """The memory goes when the last worker does."""
        os.close(self._descriptor)


class ProcessWorker:
    """A shard in a process of its own, started afresh: no forked locks, no re-import of the caller's script."""

    def __init__(self, spec: ShardSpec, layout: Layout, samples: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "feddd.simulation.worker", str(theirs.fileno()), str(samples)]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno(), samples],
            env=os.environ | WORKER_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send((sys.path, spec, layout))

    def begin(self, method: str, *arguments: object) -> None:
        """Send the call."""
        self._send((method, arguments))

    def finish(self) -> Any:
        """Wait for the answer."""
        try:
            problem, result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._died() from error
        if problem:
            raise WorkerFailed(problem)
        return result

    def close(self) -> None:
        """The worker ends when its connection does."""
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except ConnectionError as error:
            raise self._died() from error

    def _died(self) -> WorkerDied:
        return WorkerDied(f"a worker process ended unexpectedly (exit code {self._process.wait()})")


def mapped(descriptor: int, layout: Layout) -> SampleArrays:
    """The samples in a memory file; what one process writes, all see."""
    return from_buffer(mmap.mmap(descriptor, layout.nbytes), layout)
