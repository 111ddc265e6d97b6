"""What a server knows and does between the messages: who is there, the plan, the checks, the average, the checkpoint.

One round: `meet` → `plan` → `train_message` for everybody → answers → `digest`. Whoever drives it owns the waiting.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path

from torch import Tensor, nn

from feddd.core.aggregation import Aggregator
from feddd.core.granularity import Granularity, tables_of
from feddd.core.streams import stream
from feddd.core.submodel import coverage, narrow_coverage
from feddd.errors import InputError, RunError
from feddd.flower.api import ArrayRecord, ConfigRecord, Grid, Message, MessageType, RecordDict, logger
from feddd.flower.attempts import Attempts, with_reasons
from feddd.flower.checkpoint import Checkpoint, check_members, load_checkpoint, save_checkpoint
from feddd.flower.checks import Accepted, accept, check_rules, read_introduction
from feddd.flower.downloads import frozen_digests, with_move
from feddd.flower.introductions import Introductions
from feddd.flower.links import Links
from feddd.flower.records import (
    COVERAGE,
    ORDER,
    PREFIX,
    Order,
    Report,
    chunk_bytes,
    write_payload,
    write_record,
)
from feddd.flower.registry import Member, Registry, fleet_of, grown
from feddd.flower.round_facts import Pending, RoundFacts, metrics_of
from feddd.flower.rounds import Answer
from feddd.strategies.checks import Limits
from feddd.strategies.packing import CannotBeSaved
from feddd.strategies.protocol import ServerState, Task, Upload, check_plan, start
from feddd.strategies.protocol import Strategy as Method
from feddd.wire.documents import chain_text, down_text
from feddd.wire.down import prepare, reference_after
from feddd.wire.download_format import known_at_server, own_model, write_download
from feddd.wire.exchange import decode
from feddd.wire.format import coverage_size, droppable_bytes, encode_coverage, fixed_bytes
from feddd.wire.payload import encode
from feddd.wire.stage import At, Update


class Server:
    """One run's server. Its settings are those of `FedDDStrategy`."""

    def __init__(
        self,
        method: Method,
        modules: Sequence[nn.Module],
        *,
        seed: int,
        deadline_seconds: float,
        quorum: int,
        min_clients: int,
        links: Links,
        checkpoint: Path | None,
        limits: Limits,
        poll_seconds: float,
        units: Granularity | None,
    ) -> None:
        self._method = method
        self._tables = tables_of(modules, units)
        self._like = {name: tensor.clone() for name, tensor in modules[0].state_dict().items()}
        self._seed = seed
        self._deadline_seconds, self._min_clients, self._poll_seconds = deadline_seconds, min_clients, poll_seconds
        self._quorum, self._links, self._checkpoint, self._limits = quorum, links, checkpoint, limits
        self._token, self._clock_seconds = "", 0.0
        self._registry = Registry()
        self._introductions = self._new_introductions()
        self._attempts: Attempts | None = None
        self._versions: list[str] = []
        self._told: set[int] = set()
        self._moves: dict[int, Update] = {}
        self._modules, self._frozen = modules, list[str]()
        self._state: ServerState | None = None
        self.pending: Pending | None = None

    @property
    def begun(self) -> bool:
        """Return whether there is a model already."""
        return self._state is not None

    def present(self, grid: Grid) -> dict[int, int]:
        """Return client → node, of those that are there."""
        return self._registry.present(list(grid.get_node_ids()))

    def lost_its_state(self, client: int) -> None:
        """The client holds nothing that a download could build on: in this round it gets everything."""
        pending = self.expect_pending()
        task = pending.tasks[client]
        pending.tasks[client] = dataclasses.replace(task, down=task.down.whole())
        if pending.sent.before is not None:
            before = dataclasses.replace(pending.sent.before, held=pending.sent.before.held.copy())
            before.held[client] = -1
            pending.sent = dataclasses.replace(pending.sent, before=before)
        self._told.discard(client)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """From the checkpoint if there is one, else anew from the given arrays."""
        self.close()
        self._introductions, self._attempts = self._new_introductions(), None
        self._registry, self._versions, self._told = Registry(), [], set()
        self._moves = {}
        self._token, self._clock_seconds = secrets.token_hex(8), 0.0
        if self._checkpoint is not None and self._checkpoint.is_file():
            found = load_checkpoint(self._checkpoint, self._like)
            check_members(found, self._tables, self._checkpoint)
            self._token, self._clock_seconds = found.token, found.clock_seconds
            self._registry, self._versions, self._state = Registry(found.members), list(found.versions), found.state
            self._frozen = frozen_digests(found.state.model, self._modules)
            logger.log(INFO, "going on after round %d of %s", found.state.round, self._checkpoint)
            return
        given = initial_arrays.to_torch_state_dict()
        wrong = [name for name, t in self._like.items() if name not in given or given[name].shape != t.shape]
        if wrong:
            raise InputError(f"initial_arrays do not fit the model: {wrong[0]!r} is missing or has another shape")
        self._state = start({name: given[name] for name in self._like}, 0)
        self._frozen = frozen_digests(given, self._modules)

    def meet(self, grid: Grid) -> None:
        """Admit the clients that have introduced themselves; before the first round, wait for enough of them."""
        self._attempts = self._attempts or Attempts()
        reports = self._introductions.meet(grid, self._registry.nodes)
        for node, report in reports.items():
            self._admit(node, report)

    def look(self, grid: Grid) -> None:
        """Ask nodes that are new who they are, while a round is under way."""
        self._introductions.look(grid, self._registry.nodes)

    def close(self) -> None:
        """Stop waiting for anybody."""
        self._introductions.close()

    def _new_introductions(self) -> Introductions:
        return Introductions(
            self._introduced,
            min_clients=self._min_clients,
            deadline_seconds=self._deadline_seconds,
            poll_seconds=self._poll_seconds,
        )

    def _introduced(self, content: RecordDict, seconds: float) -> Report:
        """Check what a client says of itself; a ValueError says what is wrong."""
        report = read_introduction(content, len(self._tables), self._limits)
        self._links.introduce(report.client, report.uplink_bits_per_s, report.downlink_bits_per_s)
        self._links.idle(seconds)
        return report

    def _admit(self, node: int, report: Report) -> None:
        before = {member.name: member.sub_model for member in self._registry.members}
        self._registry = self._registry.admit(node, Member(report.client, report.sub_model))
        place = self._registry.nodes[node]
        state = grown(self.expect_state(), len(self._registry.members))
        self._versions += [""] * (len(self._registry.members) - len(self._versions))
        clients = state.clients.record([place], label_coverage=report.label_coverage)
        if report.held != self._versions[place] or report.sub_model != before.get(report.client, report.sub_model):
            clients = clients.record([place], masks=None)  # it does not hold what a sparse download would build on
            self._told.discard(place)
        self._state = dataclasses.replace(state, clients=clients)

    def plan(self, grid: Grid) -> Pending:
        """Return the method's plan for the clients that are there."""
        state = self.expect_state()
        nodes = self.present(grid)
        clients = list(nodes)
        if not clients:
            raise RunError(with_reasons("no client with feddd_mod is there", self._introductions.problems()))
        fleet = fleet_of([self._registry.members[client] for client in clients], self._tables, self._links)
        rng = stream(self._seed, "strategy", state.round + 1)
        plan = self._method.plan(dataclasses.replace(state, clients=state.clients.take(clients)), fleet, rng)
        check_plan(plan, len(fleet), self._tables[0])
        check_rules(plan)
        tasks = {clients[task.client]: dataclasses.replace(task, client=clients[task.client]) for task in plan.tasks}
        plan = dataclasses.replace(plan, tasks=tuple(tasks.values()))
        downs, table = [task.down for task in plan.tasks], self._tables[0]
        known = state.model, state.reference, len(state.clients)
        sent = prepare(downs, *known, table, round=plan.round, seed=self._seed)
        self._moves = with_move(self._moves, sent)
        self._expect_attempts().plan()
        self.pending = Pending(plan, {client: nodes[client] for client in tasks}, tasks, {}, time.monotonic(), sent)
        return self.pending

    def train_message(self, pending: Pending, client: int, config: ConfigRecord) -> Message:
        """Return the download of one client, and what it is to do."""
        task, number = pending.tasks[client], pending.plan.round
        member = self._registry.members[client]
        table, link = self._tables[member.sub_model], self._links[member.name]
        needed = self._needs_coverage(task, number)
        tells = task.coverage or (needed and client not in self._told)
        rules = {name: value for rule in task.local for name, value in rule.config.items()}
        payloads, basis = write_download(pending.sent, task.down, client, table, self._tables[0], self._moves)
        order = Order(
            "train",
            round=number,
            base=self._versions[client] if task.down.builds_on_last else "",
            version=self._version(number, client),
            up=chain_text(task.up),
            down=down_text(task.down),
            seed=self._seed,
            place=client,
            coverage=tells,
            covered=needed and not tells,
            rules=tuple(rules),
            frozen=self._frozen[member.sub_model],
            chunk_bytes=chunk_bytes(link.uplink_bits_per_s),
            reference=basis.number,
            missed=basis.missed,
            whole=basis.whole,
            moves=pending.sent.moves,
        )
        content = RecordDict({"config": ConfigRecord(dict(config) | {"server-round": number} | rules)})
        chunk, size = chunk_bytes(link.downlink_bits_per_s), sum(map(len, payloads.values()))
        write_record(content, ORDER, order)
        for name, data in payloads.items():
            write_payload(content, data, chunk, PREFIX + name)
        if tells:
            share = coverage(self._tables[0], [self._tables[one.sub_model] for one in self._registry.members])
            write_payload(content, encode_coverage(narrow_coverage(share, table), table), chunk, COVERAGE)
            size += coverage_size(table)
            self._told.add(client)
        pending.download_bytes[client] = pending.download_bytes.get(client, 0) + size
        node = pending.nodes[client]
        # Valid longer than the round, so that an answer just in time is not lost on its way.
        return Message(content, node, MessageType.TRAIN, ttl=2 * self._deadline_seconds, group_id=str(number))

    def _version(self, number: int, client: int) -> str:
        """Names what a client keeps after a round of this run; another attempt at the round leaves something else."""
        attempt = self._expect_attempts().number
        return f"{self._token}.{number}.{client}" + (f".{attempt}" if attempt > 1 else "")

    def _needs_coverage(self, task: Task, number: int) -> bool:
        """CR(k) is told once, after round 1; a client that came later or lost its disk has missed that."""
        widths = {member.sub_model for member in self._registry.members}
        return number > 1 and len(widths) > 1 and task.up.needs_coverage

    def evaluate_message(self, client: int, node: int, number: int, config: ConfigRecord) -> Message:
        """Return the full model, to be tested at a client."""
        member = self._registry.members[client]
        table, link = self._tables[member.sub_model], self._links[member.name]
        content = RecordDict({"config": ConfigRecord(dict(config) | {"server-round": number})})
        write_record(content, ORDER, Order("evaluate", round=number, frozen=self._frozen[member.sub_model]))
        data = encode(self._own(member.sub_model), table.full_mask(), units=table)
        write_payload(content, data, chunk_bytes(link.downlink_bits_per_s))
        return Message(content, node, MessageType.EVALUATE, ttl=2 * self._deadline_seconds, group_id=str(number))

    def full_bytes(self, asked: Mapping[int, Message]) -> int:
        """Return what full models for these nodes weigh."""
        tables = [self._tables[self._registry.members[self._registry.nodes[node]].sub_model] for node in asked]
        return sum(droppable_bytes(table) + fixed_bytes(table) for table in tables)

    def _own(self, sub_model: int) -> Mapping[str, Tensor]:
        return own_model(self.expect_state().model, self._tables[0], self._tables[sub_model])

    def digest(self, answers: Mapping[int, Answer]) -> RoundFacts | None:
        """Check, average, absorb, checkpoint; None if too few count: nothing has changed, and the round is asked again.

        RunError if it has been asked for long enough.
        """
        pending, state = self.expect_pending(), self.expect_state()
        average = Aggregator(state.model, units=self._tables[0])
        uploads, reports = [], {}
        for client in sorted(pending.tasks):
            accepted, status = self._accept(client, answers[client], pending)
            if accepted is None:
                self._expect_attempts().failed(self._registry.members[client].name, pending.plan.round, status)
                uploads.append(Upload(client, status=status, download_bytes=pending.download_bytes[client]))
                continue
            table = self._tables[self._registry.members[client].sub_model]
            task, sent = pending.tasks[client], pending.sent
            known = known_at_server(sent, self._tables[0], table)
            at = At(table, [client], pending.plan.round, self._seed, known, [task.down.mask])
            arrived = decode(task.up, accepted.update, at)
            arrived.chosen.add_one(average, arrived.values, accepted.report.samples, table)
            uploads.append(accepted.upload(client, table, pending.download_bytes[client]))
            reports[client] = accepted.report
        needed = min(self._quorum, len(uploads))
        if len(reports) < needed:
            words = f"only {len(reports)} of {len(uploads)} clients counted in round {pending.plan.round}"
            left_out, words = self._introductions.problems(), f"{words}, and {needed} are needed"
            self._expect_attempts().again(words, uploads, left_out, self._deadline_seconds)
            self.pending = None
            return None
        self._learn(pending, uploads, answers, reports)
        fleet = fleet_of(self._registry.members, self._tables, self._links)
        model = average.result()
        state = self._method.absorb(state, fleet, pending.plan, uploads, model)
        trained = [upload.client for upload in uploads if upload.status in ("ok", "diverged")]
        self._state = dataclasses.replace(state, reference=reference_after(pending.sent, trained))
        turnaround = {client: answers[client].seconds for client in sorted(pending.tasks)}
        compute = {client: report.compute_seconds for client, report in reports.items()}
        return self._finish(pending, uploads, turnaround, compute)

    def _learn(
        self,
        pending: Pending,
        uploads: Sequence[Upload],
        answers: Mapping[int, Answer],
        reports: Mapping[int, Report],
    ) -> None:
        """Believe what the round shows about links, and remember what its clients hold."""
        for upload in uploads:
            if upload.client in reports:
                self._links.observe(
                    self._registry.members[upload.client].name,
                    turnaround_seconds=answers[upload.client].seconds,
                    compute_seconds=reports[upload.client].compute_seconds,
                    bits=8.0 * (upload.upload_bytes + upload.download_bytes),
                )
                self._versions[upload.client] = self._version(pending.plan.round, upload.client)

    def pause_seconds(self) -> float:
        """Return how long to wait before the round is asked again."""
        return self._expect_attempts().pause_seconds(self._poll_seconds, self._deadline_seconds)

    def evaluation_failures(self, answers: Mapping[int, Answer]) -> dict[str, str]:
        """Return why clients do not count in an evaluation; logged, too."""
        failed = {}
        for node, answer in answers.items():
            if answer.message is None:
                name = self._registry.members[self._registry.nodes[node]].name
                logger.log(WARNING, "client %s does not count in the evaluation: %s", name, answer.failure)
                failed[f"client {name}"] = f"evaluation: {answer.failure}"
        return failed

    def _accept(self, client: int, answer: Answer, pending: Pending) -> tuple[Accepted | None, str]:
        """Return the upload if it counts, else why not."""
        if answer.message is None:
            return None, answer.failure
        member = self._registry.members[client]
        version, table = self._version(pending.plan.round, client), self._tables[member.sub_model]
        content, task = answer.message.content, pending.tasks[client]
        return accept(content, member.name, version, task, table, self._limits)

    def _finish(
        self, pending: Pending, uploads: Sequence[Upload], turnaround: dict[int, float], compute: dict[int, float]
    ) -> RoundFacts:
        state, attempts = self.expect_state(), self._expect_attempts()
        seconds = time.monotonic() - attempts.begun
        self._clock_seconds += seconds
        self.pending = self._attempts = None
        if self._checkpoint is not None:
            kept = Checkpoint(self._token, self._clock_seconds, self._registry.members, tuple(self._versions), state)
            try:
                save_checkpoint(self._checkpoint, kept)
            except CannotBeSaved as error:
                self._checkpoint = None
                logger.log(WARNING, "no more checkpoints: %s", error)
        return RoundFacts(
            round=state.round,
            seconds=seconds,
            clock_seconds=self._clock_seconds,
            uploads=tuple(uploads),
            dropout={client: task.dropout for client, task in pending.tasks.items()},
            turnaround=turnaround,
            compute=compute,
            members=self._registry.members,
            state=state,
            metrics=metrics_of(uploads),
            attempts=attempts.number,
            repeated_bytes=attempts.repeated_bytes,
            failures=attempts.failures | self._introductions.problems(),
        )

    def _expect_attempts(self) -> Attempts:
        if self._attempts is None:
            raise RunError("no round is under way")
        return self._attempts

    def expect_state(self) -> ServerState:
        """Return the state, which there is once the run has begun."""
        if self._state is None:
            raise RunError("the strategy has not been started")
        return self._state

    def expect_pending(self) -> Pending:
        """Return the round that is under way."""
        if self.pending is None:
            raise RunError("no round is under way")
        return self.pending
