"""Worker processes, both ends: how they are started ahead of time, and what each of them does.

Importing torch takes longer than all else before round 1. This module imports nothing heavy, so that a command line
can start workers first and import torch itself meanwhile. ``python -m feddd.simulation.worker_process SOCKET`` serves a
shard; SOCKET is the descriptor of the connection to the coordinator, which says what to be and then what to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import TracebackType
from typing import Any

# One thread each; and memory that is freed stays with the process: a round frees and takes the same megabytes for every
# client, and handing them back to the system and zeroing them anew cost more than scoring the units.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


def default_workers() -> int:
    """Return one per core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def receive(connection: Connection) -> Any:
    """Return the next message; EOFError if the other end closed, be it in the middle of a message."""
    try:
        return connection.recv()
    except OSError as error:
        if error.errno is None:  # what multiprocessing raises for half a message
            raise EOFError(str(error)) from error
        raise


class WorkerProcess:
    """A process of its own, started afresh: no forked locks, no re-import of the caller's script."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "feddd.simulation.worker_process", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=os.environ | WORKER_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Return the process's number."""
        return self._process.pid

    def send(self, message: object, *, descriptor: int | None = None) -> None:
        """A message, and after it a file descriptor if given; ConnectionError if the process is gone."""
        self._connection.send(message)
        if descriptor is not None:
            send_handle(self._connection, descriptor, self._process.pid)

    def receive(self) -> Any:
        """Return the next message; EOFError or ConnectionError if the process is gone."""
        return receive(self._connection)

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        return self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """The process ends when its connection does."""
        self._connection.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.kill()


class WorkerPool:
    """Processes that wait for work; one that is taken belongs to the taker, the others end with the pool."""

    def __init__(self, count: int = 0) -> None:
        self._waiting = [WorkerProcess() for _ in range(count)]

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self) -> WorkerProcess:
        """Return one that was started before, or a new one."""
        return self._waiting.pop() if self._waiting else WorkerProcess()

    def close(self) -> None:
        """End those that nobody took."""
        while self._waiting:
            self._waiting.pop().kill()


def serve(connection: Connection) -> None:
    """Build the shard, then answer calls until the other end closes."""
    problem = shard = None
    try:
        # Before anything arrives: this takes seconds, and the coordinator has much to do itself.
        from feddd.simulation.shard import Shard
        from feddd.simulation.workers import mapped
    except Exception:  # whatever goes wrong here and below belongs to the coordinator, with its trace
        problem = traceback.format_exc()
    path, spec, layout = receive(connection)
    samples = recv_handle(connection)
    sys.path[:] = path
    while True:
        method, arguments = receive(connection)
        result = None
        if problem is None:
            try:
                # The samples are there from the first call on.
                shard = shard or Shard(spec, mapped(samples, layout))
                result = getattr(shard, method)(*arguments)
            except Exception:
                problem = traceback.format_exc()
        connection.send((problem, result))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    # The coordinator may leave at any moment, also while this end reads, works or writes.
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
