"""What a server knows and does between the messages: who is there, the plan, the checks, the average, the checkpoint.

One round: `meet` → `plan` → `train_message` for everybody → answers → `digest`. Whoever drives it owns the waiting.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING, getLogger
from pathlib import Path

from torch import Tensor, nn

from feddd.core.aggregation import Aggregator
from feddd.core.payload import (
    PayloadError,
    coverage_size,
    droppable_bytes,
    encode,
    encode_coverage,
    fixed_bytes,
    unpack_mask,
)
from feddd.core.streams import stream
from feddd.core.submodel import coverage, narrow_coverage
from feddd.core.units import Units, units
from feddd.errors import InputError, RunError
from feddd.flower.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from feddd.flower.checks import Accepted, read_introduction, read_report, read_upload
from feddd.flower.downloads import Downloads
from feddd.flower.facts import Pending, RoundFacts
from feddd.flower.links import Links
from feddd.flower.names import ArrayRecord, ConfigRecord, Grid, Message, MessageType, RecordDict
from feddd.flower.records import (
    COVERAGE,
    ORDER,
    Order,
    RecordError,
    Report,
    chunk_bytes,
    write_payload,
    write_record,
)
from feddd.flower.registry import Member, Registry, fleet_of, grown, part_of
from feddd.flower.rounds import Answer, exchange
from feddd.strategies.checks import Limits, Refused, check_version
from feddd.strategies.protocol import ServerState, Task, Upload, start
from feddd.strategies.protocol import Strategy as Method
from feddd.strategies.reference import reference_after, sending

HELLO_SECONDS = 90.0

logger = getLogger("feddd.flower")


class Server:
    """One run's server. Its settings are those of `FedDDStrategy`."""

    def __init__(
        self,
        method: Method,
        modules: Sequence[nn.Module],
        *,
        seed: int,
        deadline_seconds: float,
        min_clients: int,
        links: Links,
        checkpoint: Path | None,
        limits: Limits,
        poll_seconds: float,
    ) -> None:
        self._method = method
        self._tables: list[Units] = [units(module) for module in modules]
        self._like = {name: tensor.clone() for name, tensor in modules[0].state_dict().items()}
        self._seed = seed
        self._deadline_seconds, self._min_clients, self._poll_seconds = deadline_seconds, min_clients, poll_seconds
        self._links, self._checkpoint, self._limits = links, checkpoint, limits
        self._token, self._clock_seconds = "", 0.0
        self._registry = Registry()
        self._refused_nodes: set[int] = set()
        self._versions: list[str] = []
        self._told: set[int] = set()
        self._downloads = Downloads(self._tables)
        self._state: ServerState | None = None
        self.pending: Pending | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a model already."""
        return self._state is not None

    def present(self, grid: Grid) -> dict[int, int]:
        """Client → node, of those that are there."""
        return self._registry.present(list(grid.get_node_ids()))

    def lost_its_state(self, client: int) -> None:
        """The client holds nothing that a download could build on: in this round it gets everything."""
        pending = self.expect_pending()
        pending.tasks[client] = dataclasses.replace(pending.tasks[client], download=None)
        if pending.sent.before is not None:
            before = dataclasses.replace(pending.sent.before, held=pending.sent.before.held.copy())
            before.held[client] = -1
            pending.sent = dataclasses.replace(pending.sent, before=before)
        self._told.discard(client)

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """From the checkpoint if there is one, else anew from the given arrays."""
        self._registry, self._refused_nodes, self._versions, self._told = Registry(), set(), [], set()
        self._downloads = Downloads(self._tables)
        self._token, self._clock_seconds = secrets.token_hex(8), 0.0
        if self._checkpoint is not None and self._checkpoint.is_file():
            found = load_checkpoint(self._checkpoint, self._like)
            self._check_members(found)
            self._token, self._clock_seconds = found.token, found.clock_seconds
            self._registry, self._versions, self._state = Registry(found.members), list(found.versions), found.state
            logger.log(INFO, "going on after round %d of %s", found.state.round, self._checkpoint)
            return
        given = initial_arrays.to_torch_state_dict()
        wrong = [name for name, t in self._like.items() if name not in given or given[name].shape != t.shape]
        if wrong:
            raise InputError(f"initial_arrays do not fit the model: {wrong[0]!r} is missing or has another shape")
        self._state = start({name: given[name] for name in self._like}, 0)

    def _check_members(self, found: Checkpoint) -> None:
        """A checkpoint's clients must have sub-models that there are, and masks that fit them."""
        try:
            for member, mask in zip(found.members, found.state.masks, strict=True):
                if member.sub_model >= len(self._tables):
                    raise ValueError(f"client {member.name!r} has sub-model {member.sub_model}")
                if mask is not None:
                    unpack_mask(mask, self._tables[member.sub_model])
        except ValueError as error:
            raise InputError(f"{self._checkpoint} does not fit the models: {error}") from error

    def meet(self, grid: Grid) -> None:
        """Wait for enough nodes, and ask those that are new who they are."""
        begun = time.monotonic()
        while len(online := set(grid.get_node_ids()) - self._refused_nodes) < self._min_clients:
            if time.monotonic() - begun > 10 * self._deadline_seconds:
                raise RunError(f"{len(online)} clients are there, {self._min_clients} are needed")
            time.sleep(self._poll_seconds)
        unknown = sorted(online - set(self._registry.nodes))
        if not unknown:
            return
        messages = {}
        for node in unknown:
            content = RecordDict()
            write_record(content, ORDER, Order("hello"))
            messages[node] = Message(content, node, MessageType.TRAIN, ttl=self._deadline_seconds)
        # Whoever does not say who it is soon is asked again before the next round.
        seconds = min(HELLO_SECONDS, self._deadline_seconds)
        found = exchange(grid, messages, deadline_seconds=seconds, quorum=1, poll_seconds=self._poll_seconds)
        # By name, so that the order in which nodes happen to answer decides nothing.
        reports = {node: report for node, answer in found.items() if (report := self._introduced(node, answer))}
        for node, report in sorted(reports.items(), key=lambda item: _natural(item[1].client)):
            self._admit(node, report)

    def _introduced(self, node: int, answer: Answer) -> Report | None:
        if answer.message is None:
            return None  # it may come back, and is asked again then
        try:
            report = read_introduction(answer.message.content, len(self._tables), self._limits)
            self._links.introduce(report.client, report.uplink_bits_per_s, report.downlink_bits_per_s)
        except ValueError as error:
            logger.log(WARNING, "node %d is left out: %s", node, error)
            self._refused_nodes.add(node)
            return None
        self._links.idle(answer.seconds)
        return report

    def _admit(self, node: int, report: Report) -> None:
        before = {member.name: member.sub_model for member in self._registry.members}
        self._registry = self._registry.admit(node, Member(report.client, report.sub_model))
        place = self._registry.nodes[node]
        state = grown(self.expect_state(), len(self._registry.members))
        self._versions += [""] * (len(self._registry.members) - len(self._versions))
        masks = list(state.masks)
        if report.held != self._versions[place] or report.sub_model != before.get(report.client, report.sub_model):
            masks[place] = None  # it does not hold what a sparse download would build on
            self._told.discard(place)
        label_coverage = state.label_coverage.copy()
        label_coverage[place] = report.label_coverage
        self._state = dataclasses.replace(state, masks=tuple(masks), label_coverage=label_coverage)

    def plan(self, grid: Grid) -> Pending:
        """The method's plan for the clients that are there."""
        state = self.expect_state()
        nodes = self.present(grid)
        clients = list(nodes)
        if not clients:
            raise RunError("no client with feddd_mod is there")
        fleet = fleet_of([self._registry.members[client] for client in clients], self._tables, self._links)
        rng = stream(self._seed, "strategy", state.round + 1)
        plan = self._method.plan(part_of(state, clients), fleet, rng)
        if plan.peculiar:
            raise InputError(f"{type(self._method).__name__} is for simulations: a deployment sends units")
        tasks = {clients[task.client]: dataclasses.replace(task, client=clients[task.client]) for task in plan.tasks}
        plan = dataclasses.replace(plan, tasks=tuple(tasks.values()))
        sent = sending(state, plan, self._tables[0], self._seed)
        self._downloads.remember(sent)
        self.pending = Pending(plan, {client: nodes[client] for client in tasks}, tasks, {}, time.monotonic(), sent)
        return self.pending

    def train_message(self, pending: Pending, client: int, config: ConfigRecord) -> Message:
        """The download of one client, and what it is to do."""
        task, number = pending.tasks[client], pending.plan.round
        member = self._registry.members[client]
        table, link = self._tables[member.sub_model], self._links[member.name]
        needed = self._needs_coverage(task, number)
        tells = task.coverage or (needed and client not in self._told)
        order = Order(
            "train",
            round=number,
            base=self._versions[client] if task.download is not None else "",
            version=self._version(number, client),
            dropout=task.dropout,
            selector=task.selector,
            always_send=task.always_send,
            seed=self._seed,
            place=client,
            coverage=tells,
            covered=needed and not tells,
            feedback=task.feedback,
            chunk_bytes=chunk_bytes(link.uplink_bits_per_s),
        )
        content = RecordDict({"config": ConfigRecord(dict(config) | {"server-round": number})})
        chunk = chunk_bytes(link.downlink_bits_per_s)
        order, size = self._downloads.write(content, order, pending.sent, task, member.sub_model, chunk)
        write_record(content, ORDER, order)
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
        """Names what a client keeps after a round of this run."""
        return f"{self._token}.{number}.{client}"

    def _needs_coverage(self, task: Task, number: int) -> bool:
        """CR(k) is told once, after round 1; a client that came later or lost its disk has missed that."""
        widths = {member.sub_model for member in self._registry.members}
        return number > 1 and len(widths) > 1 and task.selector == "importance" and task.dropout > 0

    def evaluate_message(self, client: int, node: int, number: int, config: ConfigRecord) -> Message:
        """The full model, to be tested at a client."""
        member = self._registry.members[client]
        table, link = self._tables[member.sub_model], self._links[member.name]
        content = RecordDict({"config": ConfigRecord(dict(config) | {"server-round": number})})
        write_record(content, ORDER, Order("evaluate", round=number))
        data = encode(self._own(member.sub_model), table.full_mask(), units=table)
        write_payload(content, data, chunk_bytes(link.downlink_bits_per_s))
        return Message(content, node, MessageType.EVALUATE, ttl=2 * self._deadline_seconds, group_id=str(number))

    def full_bytes(self, asked: Mapping[int, Message]) -> int:
        """What full models for these nodes weigh."""
        tables = [self._tables[self._registry.members[self._registry.nodes[node]].sub_model] for node in asked]
        return sum(droppable_bytes(table) + fixed_bytes(table) for table in tables)

    def _own(self, sub_model: int) -> Mapping[str, Tensor]:
        return self._downloads.part(self.expect_state().model, sub_model)

    def digest(self, answers: Mapping[int, Answer]) -> RoundFacts:
        """Check, average, absorb, checkpoint."""
        pending, state = self.expect_pending(), self.expect_state()
        average = Aggregator(state.model, units=self._tables[0])
        uploads, turnaround, compute = [], {}, {}
        for client in sorted(pending.tasks):
            answer = answers[client]
            accepted, status = self._accept(client, answer, pending)
            turnaround[client] = answer.seconds
            if accepted is None:
                uploads.append(Upload(client, status=status, download_bytes=pending.download_bytes[client]))
                continue
            member = self._registry.members[client]
            table = self._tables[member.sub_model]
            task, sent = pending.tasks[client], pending.sent
            dense = self._downloads.arrived(accepted.values, accepted.mask, sent, task, state.model, member.sub_model)
            average.add(dense, accepted.mask, accepted.report.samples)
            uploads.append(_upload(client, accepted, table, pending.download_bytes[client]))
            compute[client] = accepted.report.compute_seconds
            bits = 8.0 * (accepted.upload_bytes + pending.download_bytes[client])
            self._links.observe(
                member.name, turnaround_seconds=answer.seconds, compute_seconds=compute[client], bits=bits
            )
            self._versions[client] = self._version(pending.plan.round, client)
        fleet = fleet_of(self._registry.members, self._tables, self._links)
        model = average.result()
        state = self._method.absorb(state, fleet, pending.plan, uploads, model)
        self._state = dataclasses.replace(state, reference=reference_after(pending.sent, uploads))
        return self._finish(pending, uploads, turnaround, compute)

    def _accept(self, client: int, answer: Answer, pending: Pending) -> tuple[Accepted | None, str]:
        """The upload if it counts, else why not."""
        if answer.message is None:
            return None, answer.failure
        member = self._registry.members[client]
        try:
            report = read_report(answer.message.content)
            if report.client != member.name:
                raise Refused(f"the answer says it is from client {report.client!r}")
            if report.status == "diverged":
                return None, "diverged"
            if report.status != "ok":
                raise Refused("the client lost its state")
            check_version(report.held, self._version(pending.plan.round, client))
            table = self._tables[member.sub_model]
            content, task, bits = answer.message.content, pending.tasks[client], pending.sent.bits
            return read_upload(content, report, task, table, self._limits, bits), "ok"
        except (Refused, RecordError, PayloadError) as error:
            logger.log(WARNING, "client %s is refused in round %d: %s", member.name, pending.plan.round, error)
            return None, f"refused: {error}"

    def _finish(
        self, pending: Pending, uploads: Sequence[Upload], turnaround: dict[int, float], compute: dict[int, float]
    ) -> RoundFacts:
        state = self.expect_state()
        seconds = time.monotonic() - pending.begun
        self._clock_seconds += seconds
        self.pending = None
        if self._checkpoint is not None:
            kept = Checkpoint(self._token, self._clock_seconds, self._registry.members, tuple(self._versions), state)
            save_checkpoint(self._checkpoint, kept)
        counted = [upload for upload in uploads if upload.status == "ok"]
        samples = sum(upload.samples for upload in counted)
        loss = sum(upload.samples * upload.train_loss for upload in counted) / samples if samples else math.nan
        metrics = {"train_loss": loss, "participants": float(len(counted)), "asked": float(len(uploads))}
        logger.log(INFO, "round %d: %d of %d counted, %.1f s", state.round, len(counted), len(uploads), seconds)
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
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        )

    def expect_state(self) -> ServerState:
        """The state, which there is once the run has begun."""
        if self._state is None:
            raise RunError("the strategy has not been started")
        return self._state

    def expect_pending(self) -> Pending:
        """The round that is under way."""
        if self.pending is None:
            raise RunError("no round is under way")
        return self.pending


def _upload(client: int, accepted: Accepted, table: Units, download_bytes: int) -> Upload:
    report = accepted.report
    return Upload(
        client=client,
        mask=accepted.packed,
        kept_share=(table.kept_elements(accepted.mask) - len(table.fixed)) / table.droppable_elements,
        train_loss=report.train_loss,
        oort_statistic=report.oort_statistic,
        samples=report.samples,
        upload_bytes=accepted.upload_bytes,
        download_bytes=download_bytes,
    )


def _natural(name: str) -> tuple[int, int, str]:
    """Numbers by value, before words."""
    return (0, int(name), "") if name.isascii() and name.isdigit() else (1, 0, name)
