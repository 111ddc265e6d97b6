"""Who executes a round: blocks of clients spread over workers, whose answers are put together in a fixed order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np

from feddd.simulation.client_state import StateArrays
from feddd.simulation.evaluation import Evaluation
from feddd.simulation.reduction import merge_partials, reduce_tree
from feddd.simulation.shard import Arrays, Download, ShardResult, ShardSpec
from feddd.simulation.workers import Backend, Worker, WorkerDied
from feddd.strategies.protocol import Task

BLOCKS = ((384, 48), (192, 24), (1, 12))
"""With so many clients or more they are summed in so many blocks, which share out evenly among the usual numbers of
workers; a block is trained in stacks, so that it had better have eight clients."""
REPLAY = 16
"""A lost worker is rebuilt by repeating at most so many rounds; then the workers are asked for a snapshot."""
REBUILDS = 3
"""A worker that dies so often in one call is given up."""

log = logging.getLogger("feddd")


@dataclass(frozen=True)
class _Round:
    """What the workers were told to do; the same again gives the same bits."""

    number: int
    tasks: Sequence[Sequence[Task]]
    download: Download


class Engine:
    """Spreads blocks of clients over workers and puts their answers together.

    Workers hold what their clients keep between rounds. One that is lost is rebuilt: a new one repeats the rounds since
    everybody last downloaded the full model, and then the call that failed.
    """

    def __init__(self, specs: Sequence[ShardSpec], backend: Backend) -> None:
        self._specs = specs
        self._backend = backend
        self._owner = {
            client: worker for worker, spec in enumerate(specs) for block in spec.blocks.values() for client in block
        }
        self._rounds: list[_Round] = []
        self._snapshots: list[Mapping[int, StateArrays]] = [{} for _ in specs]
        self._workers: list[Worker] = []
        try:
            for spec in specs:
                self._workers.append(backend.start(spec))
            backend.prepare()
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
        self._backend.close()

    def reset(self) -> None:
        """Forget all kept state."""
        self._forget_the_past()
        self._call("reset", [()] * len(self._workers))

    def snapshot(self) -> dict[int, StateArrays]:
        """Return what every client keeps; a worker that is lost later is rebuilt from here."""
        self._snapshots = self._call("snapshot", [()] * len(self._workers))
        self._rounds = []
        return {client: kept for snapshot in self._snapshots for client, kept in snapshot.items()}

    def restore(self, kept: Mapping[int, StateArrays]) -> None:
        """Go on from what the clients kept, whoever owned them then."""
        self._rounds = []
        places = range(len(self._workers))
        self._snapshots = [{n: own for n, own in kept.items() if self._owner[n] == place} for place in places]
        self._call("restore", [(own,) for own in self._snapshots])

    def train(self, number: int, tasks: Sequence[Task], download: Download) -> ShardResult:
        """Return one round: all uploads in client order, and the sums of all blocks."""
        mine: list[list[Task]] = [[] for _ in self._workers]
        for task in tasks:
            mine[self._owner[task.client]].append(task)
        if sum(task.starts_afresh for task in tasks) == len(self._owner):
            self._forget_the_past()
        elif len(self._rounds) == REPLAY:
            self.snapshot()
        shared = self._backend.share(download)
        answers: list[ShardResult] = self._call("train", [(number, batch, shared) for batch in mine])
        self._rounds.append(_Round(number, mine, download))
        uploads = sorted((upload for answer in answers for upload in answer.uploads), key=lambda upload: upload.client)
        partials = {node: partial for answer in answers for node, partial in answer.partials.items()}
        parts = {part for answer in answers for part in answer.seconds}
        seconds = {part: sum(answer.seconds.get(part, 0.0) for answer in answers) for part in sorted(parts)}
        total = reduce_tree(partials, self._specs[0].block_count, merge_partials)
        return ShardResult(tuple(uploads), total, seconds)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return the global model on the whole test set, summed in chunk order."""
        answers = self._call("evaluate", [(self._backend.share(model),)] * len(self._workers))
        chunks: Mapping[int, Evaluation] = {chunk: part for answer in answers for chunk, part in answer.items()}
        first, *rest = (chunks[chunk] for chunk in sorted(chunks))
        for part in rest:
            first = first + part
        return first

    def evaluate_clients(self, model: Arrays) -> dict[int, float]:
        """Return the global model's metric on each client's own samples."""
        answers = self._call("evaluate_clients", [(self._backend.share(model),)] * len(self._workers))
        return dict(sorted(pair for answer in answers for pair in answer.items()))

    def _forget_the_past(self) -> None:
        self._rounds = []
        self._snapshots = [{} for _ in self._specs]

    def _call(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        deaths: list[WorkerDied | None] = [None] * len(self._workers)
        for place, worker in enumerate(self._workers):
            try:
                worker.begin(method, *arguments[place])
            except WorkerDied as death:
                deaths[place] = death
        answers = [None] * len(self._workers)
        for place, worker in enumerate(self._workers):
            try:
                answers[place] = None if deaths[place] else worker.finish()
            except WorkerDied as death:
                deaths[place] = death
        for place, lost in enumerate(deaths):
            if lost:
                answers[place] = self._rebuild(place, method, arguments[place], lost)
        return answers

    def _rebuild(self, place: int, method: str, arguments: tuple[object, ...], death: WorkerDied) -> Any:
        """A new worker in the place of a lost one, brought to where the other was, and its answer to the call."""
        for _ in range(REBUILDS):
            log.warning("%s; its clients are rebuilt and the round is repeated", death)
            self._workers[place].close()
            worker = self._workers[place] = self._backend.start(self._specs[place])
            try:
                self._ask(worker, "restore", self._snapshots[place])
                for past in self._rounds:
                    self._ask(worker, "train", past.number, past.tasks[place], self._backend.share(past.download))
                return self._ask(worker, method, *arguments)
            except WorkerDied as again:
                death = again
        raise death

    @staticmethod
    def _ask(worker: Worker, method: str, *arguments: object) -> Any:
        worker.begin(method, *arguments)
        return worker.finish()


def block_ranges(clients: int) -> list[range]:
    """Fixed blocks of neighbouring clients, as even as can be."""
    count = min(clients, next(blocks for least, blocks in BLOCKS if clients >= least))
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
