"""Who executes a round: one shard in this process, or several in worker processes with one thread each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from feddd.errors import RunError
from feddd.simulation.reduction import reduce_tree
from feddd.simulation.shard import Arrays, Shard, ShardResult, ShardSpec, merge_partials
from feddd.simulation.training import Evaluation
from feddd.strategies.protocol import Task

BLOCKS = 16
"""Clients are summed in at most so many blocks; so many workers can share a round."""


# One thread each; and memory that is freed stays with the process: a round frees and takes the same megabytes for every
# client, and handing them back to the system and zeroing them anew cost more than scoring the units.
_WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


class WorkerDied(RunError):
    """A worker process ended without being asked to."""


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


class LocalWorker:
    """A shard in this process."""

    def __init__(self, spec: ShardSpec) -> None:
        self._shard = Shard(spec)
        self._result: Any = None

    def begin(self, method: str, *arguments: object) -> None:
        """Run at once."""
        self._result = getattr(self._shard, method)(*arguments)

    def finish(self) -> Any:
        """What `begin` computed."""
        return self._result

    def close(self) -> None:
        """Nothing to let go of."""


class ProcessWorker:
    """A shard in a process of its own, started afresh: no forked locks, no re-import of the caller's script."""

    def __init__(self, spec: ShardSpec) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | _WORKER_ENVIRONMENT
        command = [sys.executable, "-m", "feddd.simulation.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send((sys.path, spec))

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


class Engine:
    """Spreads blocks of clients over workers and puts their answers together."""

    def __init__(self, specs: Sequence[ShardSpec], *, in_process: bool) -> None:
        self._owner = {
            client: worker for worker, spec in enumerate(specs) for block in spec.blocks.values() for client in block
        }
        self._block_count = specs[0].block_count
        self._workers: list[Worker] = []
        try:
            for spec in specs:
                self._workers.append(LocalWorker(spec) if in_process else ProcessWorker(spec))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()

    def reset(self) -> None:
        """Forget all kept state."""
        self._call("reset", [()] * len(self._workers))

    def train(self, number: int, tasks: Sequence[Task], model: Arrays) -> ShardResult:
        """One round: all uploads in client order, and the sums of all blocks."""
        mine: list[list[Task]] = [[] for _ in self._workers]
        for task in tasks:
            mine[self._owner[task.client]].append(task)
        answers: list[ShardResult] = self._call("train", [(number, batch, model) for batch in mine])
        uploads = sorted((upload for answer in answers for upload in answer.uploads), key=lambda upload: upload.client)
        partials = {node: partial for answer in answers for node, partial in answer.partials.items()}
        return ShardResult(tuple(uploads), reduce_tree(partials, self._block_count, merge_partials))

    def evaluate(self, model: Arrays) -> Evaluation:
        """The global model on the whole test set, summed in chunk order."""
        answers = self._call("evaluate", [(model,)] * len(self._workers))
        chunks: Mapping[int, Evaluation] = {chunk: part for answer in answers for chunk, part in answer.items()}
        first, *rest = (chunks[chunk] for chunk in sorted(chunks))
        for part in rest:
            first = first + part
        return first

    def _call(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        for worker, given in zip(self._workers, arguments, strict=True):
            worker.begin(method, *given)
        return [worker.finish() for worker in self._workers]


def block_ranges(clients: int) -> list[range]:
    """Fixed blocks of neighbouring clients, as even as can be."""
    count = min(clients, BLOCKS)
    edges = np.linspace(0, clients, count + 1).round().astype(int)
    return [range(int(start), int(end)) for start, end in pairwise(edges)]


def assign_blocks(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Neighbouring blocks for each worker, about equally dear; neighbours merge into few sums."""
    shares: list[list[int]] = []
    start, remaining = 0, sum(costs)
    for waiting in range(min(workers, len(costs)) - 1, -1, -1):
        target = remaining / (waiting + 1)
        end, taken = start + 1, costs[start]
        # Take the next block if most of it fits and everyone who waits still gets one.
        while end < len(costs) - waiting and (not waiting or taken + costs[end] / 2 <= target):
            taken += costs[end]
            end += 1
        shares.append(list(range(start, end)))
        start, remaining = end, remaining - taken
    return shares
