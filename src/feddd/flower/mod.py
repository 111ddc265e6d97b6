"""The client half of FedDD as a Flower mod: the user's train function sees full models and knows nothing of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from feddd.core.granularity import Granularity, tables_of
from feddd.core.labels import label_coverage
from feddd.core.stacks import stack_of_one
from feddd.files import user_cache
from feddd.flower.api import (
    ArrayRecord,
    ClientAppCallable,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    Mod,
    RecordDict,
)
from feddd.flower.downloads import frozen_digest
from feddd.flower.records import (
    COVERAGE,
    ORDER,
    PREFIX,
    REPORT,
    Order,
    RecordError,
    Report,
    read_payload,
    read_record,
    write_payload,
    write_record,
)
from feddd.flower.store import ClientStore, run_of
from feddd.wire.documents import Vocabulary, read_chain, read_down, vocabulary
from feddd.wire.down import whole_bytes
from feddd.wire.download_format import TOLD_COVERAGE, Basis, Received, read_download
from feddd.wire.exchange import encode, write
from feddd.wire.format import coverage_size, decode_coverage, pack_mask
from feddd.wire.select import MASK, split_mask
from feddd.wire.stage import At

MakeModel = Callable[[], nn.Module]
T = TypeVar("T")


def feddd_mod(
    model: MakeModel | Sequence[MakeModel],
    *,
    store: Path | str | None = None,
    label_counts: Callable[[Context], Sequence[int]] | None = None,
    arrays_key: str = "arrays",
    config_key: str = "config",
    metrics_key: str = "metrics",
    loss_key: str = "train_loss",
    samples_key: str = "num-examples",
    statistic_key: str = "oort-statistic",
    stages: Sequence[Callable[..., Any]] = (),
    units: Granularity | None = None,
) -> Mod:
    """Return a mod for ``ClientApp(mods=[feddd_mod(Net)])``.

    model: makes the network; several for sub-models, of which the node config's "sub-model" names one
    store: the folder for what a client keeps between rounds; else the node config's "feddd-store", else the cache
    label_counts: samples per class of this client, for the allocation; left out if the task has no classes
    arrays_key, …: where the train function finds its model and leaves its results. It must report a mean loss and a
    sample count; √(mean of squared sample losses) is for Oort, and the loss takes its place where it is missing
    stages: stages and scores of your own that a server may ask for; a client never imports what a message names
    units: makes the layer table in place of `feddd.units`; the server's must be the same

    The node config may say: "client-id" (else "partition-id"), "uplink-bits-per-s", "downlink-bits-per-s".
    """
    makers = list(model) if isinstance(model, Sequence) else [model]
    for maker in makers:
        if isinstance(maker, nn.Module) or not callable(maker):
            name = type(maker).__name__
            raise TypeError(f"feddd_mod wants what makes a network, not a {name}: feddd_mod(Net), not feddd_mod(Net())")

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        order = read_record(message.content, ORDER, Order)
        if order is None:
            return call_next(message, context)
        client = _Client(makers, store, context, label_counts, vocabulary(stages), units)
        if order.what == "hello":
            return _reply(message, client.hello())
        before = client.receive(message.content, order)
        if before is None:
            return _reply(message, client.hello("resync"))
        config = message.content.config_records.get(config_key, ConfigRecord())
        message.content = RecordDict({arrays_key: ArrayRecord(before), config_key: config})
        begun = time.monotonic()
        answer = call_next(message, context)
        seconds = time.monotonic() - begun
        if order.what == "evaluate" or answer.has_error():
            return answer
        metrics = answer.content.metric_records.get(metrics_key, MetricRecord())
        after = _state(answer.content, arrays_key, before)
        told = _metrics(metrics, (loss_key, samples_key, statistic_key))
        problem = _unconfirmed(order, config, metrics)
        answer.content = client.unconfirmed(problem) if problem else client.report(before, after, order, told, seconds)
        answer.content[metrics_key] = metrics
        return answer

    return mod


class _Client:
    """This node for the length of a message: its model, its identity, its store."""

    def __init__(
        self,
        makers: Sequence[MakeModel],
        store: Path | str | None,
        context: Context,
        label_counts: Callable[[Context], Sequence[int]] | None,
        known_stages: Vocabulary,
        granularity: Granularity | None,
    ) -> None:
        config = context.node_config
        self._name = str(config.get("client-id", config.get("partition-id", context.node_id)))
        self._sub_model = int(config.get("sub-model", 0))
        if not 0 <= self._sub_model < len(makers):
            raise ValueError(
                f"the node config's sub-model is {self._sub_model}, but feddd_mod has {len(makers)} models"
            )
        module = _called("model", makers[self._sub_model])
        if not isinstance(module, nn.Module):
            raise TypeError(f"feddd_mod's model makes a {type(module).__name__}, which is not a network")
        self._own = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        (self._units,) = tables_of([module], granularity)
        folder = store or config.get("feddd-store") or user_cache() / "clients"
        self._store = ClientStore(Path(str(folder)), self._name)
        self._rates = [float(config.get(f"{way}-bits-per-s", 0.0)) for way in ("uplink", "downlink")]
        self._known_stages = known_stages
        self._received: Received | None = None
        self._mask: bytes | None = None
        self._label_counts = (lambda: label_counts(context)) if label_counts else None

    def hello(self, status: str = "ok") -> Report:
        """Return who this is, and what it holds."""
        return Report(
            client=self._name,
            status=status,
            held=self._store.version(),
            sub_model=self._sub_model,
            label_coverage=_coverage_of(_called("label_counts", self._label_counts))
            if self._label_counts
            else math.nan,
            uplink_bits_per_s=self._rates[0],
            downlink_bits_per_s=self._rates[1],
        )

    def receive(self, content: RecordDict, order: Order) -> dict[str, Tensor] | None:
        """Return the local model of this round; None if the download builds on a state that is not here."""
        table = self._units
        if frozen_digest(self._own, table) != order.frozen:
            raise RecordError(
                "the frozen parameters of this client's network are not those of the server's: they do not travel, so "
                "both ends must make them alike, from a file or from a seed that is set before"
            )
        state = self._store.load(run_of(order.version), table)
        if order.base and (self._store.version() != order.base or MASK not in state):
            return None
        if order.coverage:
            told = decode_coverage(read_payload(content, coverage_size(table), COVERAGE), table)
            state[TOLD_COVERAGE] = torch.cat([told[layer.name] for layer in table.layers])
        if order.covered and TOLD_COVERAGE not in state:
            return None
        mask = pack_mask(split_mask(state[MASK], table), table) if MASK in state else None
        down = read_down(order.down, mask, self._known_stages)
        most = 2 * whole_bytes(table)
        payloads = {
            name.removeprefix(PREFIX): read_payload(content, most, name)
            for name in content.array_records
            if name.startswith(PREFIX) and name != COVERAGE
        }
        basis = Basis(order.reference, order.missed, order.whole)
        received = read_download(payloads, down, basis, state, table, moves=order.moves)
        if received is None:
            return None
        self._received, self._mask = received, down.mask
        # Counters and the like do not travel: the network's own stay.
        local = received.local | {alias: received.local[name] for alias, name in table.aliases}
        return self._own | local

    def report(
        self,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        order: Order,
        told: tuple[float, int, float],
        seconds: float,
    ) -> RecordDict:
        """Write what the client uploads and keep on disk what it keeps. told: loss, samples, Oort's statistic"""
        loss, samples, statistic = told
        content, table, received = RecordDict(), self._units, self._received
        assert received is not None
        if not (math.isfinite(loss) and all(after[slot.name].isfinite().all() for slot in table.slots)):
            write_record(content, REPORT, Report(self._name, "diverged", "", self._sub_model, samples=samples))
            return content
        line, coverage = read_chain(order.up, self._known_stages), received.state.get(TOLD_COVERAGE)
        at = At(
            table,
            [order.place],
            order.round,
            order.seed,
            received.known,
            [self._mask],
            stack_of_one(before, table),
            stack_of_one(after, table),
            None if coverage is None else split_mask(coverage, table),
            wire=True,
        )
        update, (state,) = encode([line], [received.state], at)
        self._store.save(order.version, state, table)
        facts = Report(
            client=self._name,
            held=order.version,
            sub_model=self._sub_model,
            train_loss=loss,
            oort_statistic=statistic,
            samples=samples,
            compute_seconds=seconds,
        )
        write_record(content, REPORT, facts)
        write_payload(content, write(line, update, 0, table), order.chunk_bytes)
        return content

    def unconfirmed(self, reason: str) -> RecordDict:
        """Return an answer that does not count, with the reason."""
        content = RecordDict()
        write_record(content, REPORT, Report(self._name, "unconfirmed", "", self._sub_model, reason=reason))
        return content


def _unconfirmed(order: Order, config: ConfigRecord, metrics: MetricRecord) -> str:
    """Return which rule the train function does not confirm, in words; "" if it confirms them all."""
    for name in order.rules:
        wanted, found = config.get(name), metrics.get(name)
        if not isinstance(found, int | float) or not math.isclose(float(found), float(str(wanted)), rel_tol=1e-9):
            said = "nothing" if found is None else repr(found)
            return f"the train function was told {name} = {wanted!r} and must report the same as a metric, not {said}"
    return ""


def _called(option: str, function: Callable[[], T]) -> T:
    """What a function of the user's returns; its error says whose it is, because the server sees one line of it."""
    try:
        return function()
    except Exception as error:
        raise RuntimeError(f"feddd_mod's {option} raised {type(error).__name__}: {error}") from error


def _reply(message: Message, facts: Report) -> Message:
    content = RecordDict()
    write_record(content, REPORT, facts)
    return Message(content, reply_to=message)


def _state(content: RecordDict, key: str, before: dict[str, Tensor]) -> dict[str, Tensor]:
    record = content.array_records.get(key)
    if record is None:
        raise ValueError(
            f"the train function's reply has no array record {key!r}; feddd_mod(arrays_key=…) names another"
        )
    after = dict(record.to_torch_state_dict())
    wrong = [name for name in before if name not in after or after[name].shape != before[name].shape]
    if wrong:
        raise ValueError(
            f"the train function must return the whole model; {wrong[0]!r} is missing or has another shape"
        )
    return after


def _metrics(metrics: MetricRecord, keys: tuple[str, str, str]) -> tuple[float, int, float]:
    loss_key, samples_key, statistic_key = keys
    for key, option in ((loss_key, "loss_key"), (samples_key, "samples_key")):
        if not isinstance(metrics.get(key), int | float):
            known = ", ".join(metrics) or "nothing"
            raise ValueError(
                f"the train function must report {key!r}; it reports {known}. feddd_mod({option}=…) names another"
            )
    loss = float(metrics[loss_key])  # type: ignore[arg-type]
    statistic = metrics.get(statistic_key, loss)
    return loss, int(metrics[samples_key]), float(statistic)  # type: ignore[arg-type]


def _coverage_of(counts: Sequence[int]) -> float:
    return float(label_coverage(np.array([counts], dtype=np.int64))[0])
