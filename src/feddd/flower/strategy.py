"""The server half on Flower: `FedDDStrategy(FedDD(...), model)` stands where Flower's `FedAvg` stood.

The method decides and digests, exactly as in the simulator; this carries its plans to the nodes and checks what comes
back. A round: meet new nodes → plan → push payloads → pull until the deadline → check → average → absorb → checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from logging import INFO
from pathlib import Path

from torch import nn

from feddd.core.granularity import Granularity
from feddd.errors import RunError
from feddd.flower.api import (
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    Metadata,
    MetricRecord,
    Result,
    Strategy,
    logger,
)
from feddd.flower.checks import read_report
from feddd.flower.links import Links, MeasuredLinks
from feddd.flower.progress import round_line
from feddd.flower.round_facts import RoundFacts
from feddd.flower.rounds import POLL_SECONDS, Answer, answer_of, exchange
from feddd.flower.server import Server
from feddd.strategies.checks import Limits
from feddd.strategies.protocol import Strategy as Method


class FedDDStrategy(Strategy):
    """A method of ours on Flower.

    model: the network; several for sub-models, the global one first    seed: of drawn choices, as in an experiment
    deadline_seconds: a round goes on without those that have not answered by then, if `quorum` have
    quorum: so many uploads must count in a round (or all that are asked, if those are fewer), else it is asked again
    min_clients: how many must introduce themselves before the first round, and be online before every other
    checkpoint: a file; a run that finds it goes on there
    links: what is believed about the clients' links    evaluate_clients: also evaluate at the clients, which sends
    everybody the full model every round    on_round: called with the facts of every round
    units: makes the layer table in place of `feddd.units`; the clients' must be the same
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module | Sequence[nn.Module],
        *,
        seed: int = 0,
        deadline_seconds: float = 600.0,
        quorum: int = 1,
        min_clients: int = 2,
        links: Links | None = None,
        checkpoint: Path | str | None = None,
        evaluate_clients: bool = False,
        limits: Limits | None = None,
        on_round: Callable[[RoundFacts], None] | None = None,
        poll_seconds: float = POLL_SECONDS,
        units: Granularity | None = None,
    ) -> None:
        if deadline_seconds <= 0 or quorum < 1 or min_clients < 1:
            raise ValueError("deadline_seconds must be above 0, quorum and min_clients at least 1")
        modules = list(model) if isinstance(model, Sequence) else [model]
        self._name = str(method)
        self._server = Server(
            method,
            modules,
            seed=seed,
            deadline_seconds=deadline_seconds,
            quorum=quorum,
            min_clients=min_clients,
            links=links or MeasuredLinks(),
            checkpoint=Path(checkpoint) if checkpoint is not None else None,
            limits=limits or Limits(),
            poll_seconds=poll_seconds,
            units=units,
        )
        self._deadline_seconds, self._quorum, self._poll_seconds = deadline_seconds, quorum, poll_seconds
        self._most_samples = (limits or Limits()).samples
        self._evaluate_clients = evaluate_clients
        self._on_round = on_round
        self._asked: tuple[Grid, ConfigRecord, list[Metadata]] | None = None

    # Flower's own loop would do, with these four, but wait for everybody; `start` below does better.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return one message per client, each with its own payload."""
        if not self._server.begun:
            self._server.begin(arrays)
        self._server.meet(grid)
        pending = self._server.plan(grid)
        messages = [self._server.train_message(pending, client, config) for client in pending.nodes]
        self._asked = (grid, config, [message.metadata for message in messages])
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average what came, element by element, over those who sent it."""
        pending = self._server.expect_pending()
        if self._asked is None:
            raise RunError("no round is under way")
        grid, config, asked = self._asked
        nodes = {node: client for client, node in pending.nodes.items()}
        # The reply to a lost node's message comes from the SuperLink: only what it answers tells whose it is.
        whose = {message.message_id: nodes[message.dst_node_id] for message in asked}
        answers = {client: Answer(node, None, 0.0, "late") for client, node in pending.nodes.items()}
        for reply in replies:
            client = whose.get(reply.metadata.reply_to_message_id)
            if client is not None:
                answers[client] = answer_of(pending.nodes[client], reply, time.monotonic() - pending.begun)
        facts = self._server.digest(answers)
        if facts is None:
            facts = self._round(grid, config, self._deadline_seconds, self._server.pause_seconds())
        logger.log(INFO, "%s", round_line(facts))
        return ArrayRecord(dict(facts.state.model)), MetricRecord(dict(facts.metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return nothing, unless evaluation at the clients was asked for: it sends everybody the full model."""
        if not self._evaluate_clients:
            return []
        present = self._server.present(grid)
        return [self._server.evaluate_message(client, node, server_round, config) for client, node in present.items()]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Means of the clients' metrics, weighted by their samples."""
        sums: dict[str, float] = {}
        weight = 0.0
        for reply in replies:
            for metrics in reply.content.metric_records.values() if reply.has_content() else ():
                samples = metrics.get("num-examples")
                if not isinstance(samples, int | float) or not 0 < samples <= self._most_samples:
                    continue
                weight += samples
                for name, value in metrics.items():
                    if name != "num-examples" and isinstance(value, int | float) and math.isfinite(value):
                        sums[name] = sums.get(name, 0.0) + samples * value
        return MetricRecord({name: value / weight for name, value in sums.items()}) if weight else None

    def summary(self) -> None:
        """Log what is going to run."""
        logger.log(INFO, "%s", self._name)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`; a checkpoint that is found is where they begin.

        timeout: Flower's; the deadline of this strategy is the shorter of the two
        """
        self.summary()
        deadline = min(self._deadline_seconds, timeout)
        self._server.begin(initial_arrays)
        result = Result()
        state = self._server.expect_state()
        result.arrays = ArrayRecord(dict(state.model))
        if evaluate_fn and state.round == 0:
            self._keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, result.arrays))
        begun, first = time.monotonic(), state.round + 1
        try:
            for number in range(first, num_rounds + 1):
                facts = self._round(grid, train_config or ConfigRecord(), deadline)
                result.arrays = ArrayRecord(dict(facts.state.model))
                self._keep(result.train_metrics_clientapp, number, MetricRecord(dict(facts.metrics)))
                if self._evaluate_clients:
                    facts = self._evaluate(grid, facts, evaluate_config or ConfigRecord(), deadline, result)
                if evaluate_fn:
                    self._keep(result.evaluate_metrics_serverapp, number, evaluate_fn(number, result.arrays))
                self._tell(facts, result, num_rounds, (time.monotonic() - begun) / (number - first + 1))
        finally:
            self._server.close()
        if num_rounds and not self._server.expect_state().last_round.any():
            raise RunError(f"nobody counted in any of {num_rounds} rounds: the model is untrained")
        return result

    def _evaluate(
        self, grid: Grid, facts: RoundFacts, config: ConfigRecord, deadline_seconds: float, result: Result
    ) -> RoundFacts:
        """Test the model at the clients; the round's facts with what that cost and who failed."""
        messages = self.configure_evaluate(facts.round, result.arrays, config, grid)
        asked = {message.metadata.dst_node_id: message for message in messages}
        found = exchange(grid, asked, deadline_seconds=deadline_seconds, quorum=0, poll_seconds=self._poll_seconds)
        good = [answer.message for answer in found.values() if answer.message]
        self._keep(result.evaluate_metrics_clientapp, facts.round, self.aggregate_evaluate(facts.round, good))
        failures = dict(facts.failures) | self._server.evaluation_failures(found)
        return dataclasses.replace(facts, evaluation_bytes=self._server.full_bytes(asked), failures=failures)

    def _tell(self, facts: RoundFacts, result: Result, num_rounds: int, seconds_a_round: float) -> None:
        """Log the round, and hand its facts on."""
        train = {name: value for name, value in facts.metrics.items() if name == "train_loss"}
        tested = (result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp)
        metrics = [train, *(where.get(facts.round) for where in tested)]
        left = seconds_a_round * (num_rounds - facts.round)
        logger.log(INFO, "%s", round_line(facts, metrics, num_rounds, left))
        if self._on_round:
            self._on_round(facts)

    @staticmethod
    def _keep(where: dict[int, MetricRecord], number: int, metrics: MetricRecord | None) -> None:
        if metrics is not None:
            where[number] = metrics

    def _round(
        self, grid: Grid, config: ConfigRecord, deadline_seconds: float, pause_seconds: float = 0.0
    ) -> RoundFacts:
        """Ask until enough clients count; the server says when it has been long enough."""
        while True:
            time.sleep(pause_seconds)
            facts = self._server.digest(self._ask(grid, config, deadline_seconds))
            if facts is not None:
                return facts
            pause_seconds = self._server.pause_seconds()

    def _ask(self, grid: Grid, config: ConfigRecord, deadline_seconds: float) -> dict[int, Answer]:
        """Plan a round, and carry it to the clients and back."""
        self._server.meet(grid)
        pending = self._server.plan(grid)
        clients = {node: client for client, node in pending.nodes.items()}
        helped: set[int] = set()

        def again(answer: Answer) -> Message | None:
            """Return a client that lost its state gets the full model at once, and once in a round."""
            client = clients[answer.node]
            if answer.message is None or client in helped or not _asks_for_all(answer.message):
                return None
            helped.add(client)
            self._server.lost_its_state(client)
            return self._server.train_message(pending, client, config)

        messages = {node: self._server.train_message(pending, client, config) for client, node in pending.nodes.items()}
        answers = exchange(
            grid,
            messages,
            deadline_seconds=deadline_seconds,
            quorum=self._quorum,
            again=again,
            meanwhile=lambda: self._server.look(grid),
            poll_seconds=self._poll_seconds,
        )
        return {clients[node]: answer for node, answer in answers.items()}


def _asks_for_all(message: Message) -> bool:
    try:
        return read_report(message.content).status == "resync"
    except ValueError:
        return False
