"""The client half of FedDD as a Flower mod: the user's train function sees full models and knows nothing of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from feddd.core.labels import label_coverage
from feddd.wire.format import coverage_size, decode, decode_coverage, encode, encode_coded, most_bytes
from feddd.wire.quantise import FLOAT_BITS, dequantise, quantise
from feddd.core.streams import stream
from feddd.core.units import Mask, Units, frozen_digest, units
from feddd.files import user_cache
from feddd.flower.names import (
    ArrayRecord,
    ClientAppCallable,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    Mod,
    RecordDict,
)
from feddd.flower.records import (
    COVERAGE,
    ORDER,
    REPORT,
    Order,
    RecordError,
    Report,
    read_payload,
    read_record,
    write_payload,
    write_record,
)
from feddd.flower.references import Held, brought_up, received
from feddd.flower.store import ClientStore
from feddd.strategies.client import Kept, receive, report
from feddd.strategies.feedback import keeping, left_over, residual_of, with_residual
from feddd.strategies.protocol import Task

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
) -> Mod:
    """A mod for ``ClientApp(mods=[feddd_mod(Net)])``.

    model: makes the network; several for sub-models, of which the node config's "sub-model" names one
    store: the folder for what a client keeps between rounds; else the node config's "feddd-store", else the cache
    label_counts: samples per class of this client, for the allocation; left out if the task has no classes
    arrays_key, …: where the train function finds its model and leaves its results. It must report a mean loss and a
    sample count; √(mean of squared sample losses) is for Oort, and the loss takes its place where it is missing

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
        client = _Client(makers, store, context, label_counts)
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
        answer.content = client.report(before, after, order, told, seconds)
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
        self._units: Units = units(module)
        folder = store or config.get("feddd-store") or user_cache() / "clients"
        self._store = ClientStore(Path(str(folder)), self._name)
        self._rates = [float(config.get(f"{way}-bits-per-s", 0.0)) for way in ("uplink", "downlink")]
        self._coverage: dict[str, Tensor] | None = None
        self._reference: Held | None = None
        self._base: dict[str, Tensor] = {}
        self._residual: Tensor | None = None
        self._label_counts = (lambda: label_counts(context)) if label_counts else None

    def hello(self, status: str = "ok") -> Report:
        """Who this is, and what it holds."""
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
        """The local model of this round; None if the download builds on a state that is not here."""
        table = self._units
        if frozen_digest(self._own, table) != order.frozen:
            raise RecordError(
                "the frozen parameters of this client's network are not those of the server's: they do not travel, so "
                "both ends must make them alike, from a file or from a seed that is set before"
            )
        kept = self._store.load(order.base, table) if order.base else None
        if order.base and kept is None:
            return None
        self._coverage = self._store.coverage(_run(order.version), table)
        if order.covered and self._coverage is None:
            return None
        if order.coverage:
            self._coverage = decode_coverage(read_payload(content, coverage_size(table), COVERAGE), table)
        if order.bits == FLOAT_BITS:
            values, mask = decode(read_payload(content, most_bytes(table)), self._own, units=table, finite=True)
        else:
            on_disk = self._store.reference(_run(order.version), table)
            held = brought_up(on_disk, content, order, table, self._own)
            if held is None:
                return None
            values, mask, self._reference = received(held, content, order, table)
            self._base = values
            if order.feedback != "none":
                self._residual = self._residual_of(kept, on_disk, order)
        sent = kept.mask if kept else table.full_mask()
        if any(not torch.equal(mask[layer], sent[layer]) for layer in mask):
            raise RecordError("the download is not for the units that this client uploaded last")
        # Counters and the like do not travel: the network's own stay.
        return self._own | {name: value for name, value in receive(values, kept, table).items() if _carried(value)}

    def report(
        self,
        before: dict[str, Tensor],
        after: dict[str, Tensor],
        order: Order,
        told: tuple[float, int, float],
        seconds: float,
    ) -> RecordDict:
        """Choose what to upload and keep the rest on disk; payload and report. told: loss, samples, Oort's statistic"""
        loss, samples, statistic = told
        content = RecordDict()
        facts = Report(
            client=self._name,
            held=order.version,
            sub_model=self._sub_model,
            train_loss=loss,
            oort_statistic=statistic,
            samples=samples,
            compute_seconds=seconds,
        )
        if not (math.isfinite(loss) and all(after[slot.name].isfinite().all() for slot in self._units.slots)):
            write_record(content, REPORT, Report(self._name, "diverged", "", self._sub_model, samples=samples))
            return content
        rng = stream(order.seed, "selection", order.round, order.place)
        task = Task(order.place, order.dropout, order.selector, order.always_send)
        mask, kept = report(before, after, task, self._units, rng=rng, coverage=self._coverage)
        if order.bits == FLOAT_BITS:
            data = encode(after, mask, units=self._units)
        else:
            data, kept = self._difference(after, mask, kept, order)
        self._store.save(order.version, kept, self._units, self._coverage, self._reference)
        write_record(content, REPORT, facts)
        write_payload(content, data, order.chunk_bytes)
        return content

    def _residual_of(self, kept: Kept | None, on_disk: Held | None, order: Order) -> Tensor:
        """What error feedback adds to the difference; a full download replaces what an earlier round left here."""
        if kept is not None:
            return residual_of(kept, None, self._units)
        version = self._store.version()
        earlier = self._store.load(version, self._units) if _run(version) == _run(order.version) else None
        replaced = on_disk.model if on_disk and order.feedback == "all" else None
        return residual_of(earlier, replaced, self._units)

    def _difference(self, after: dict[str, Tensor], mask: Mask, kept: Kept, order: Order) -> tuple[bytes, Kept]:
        """The payload of an upload in a few bits, and what the client keeps."""
        difference = {slot.name: after[slot.name] - self._base[slot.name] for slot in self._units.slots}
        if self._residual is not None:
            difference = with_residual(difference, self._residual, self._units)
        rounding = stream(order.seed, "rounding", order.round, order.place) if self._residual is None else None
        coded = quantise(difference, self._units, order.bits, rounding)
        if self._residual is not None:
            rounded = dequantise(coded, self._units)
            kept = keeping(kept, left_over(difference, rounded, mask, self._residual, self._units))
        return encode_coded(coded, mask, self._units, order.bits), kept


def _called(option: str, function: Callable[[], T]) -> T:
    """What a function of the user's returns; its error says whose it is, because the server sees one line of it."""
    try:
        return function()
    except Exception as error:
        raise RuntimeError(f"feddd_mod's {option} raised {type(error).__name__}: {error}") from error


def _run(version: str) -> str:
    """The run that a version belongs to."""
    return version.partition(".")[0]


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


def _carried(value: Tensor) -> bool:
    return value.is_floating_point()
