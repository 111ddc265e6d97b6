"""What the server believes of an answer: nothing that it has not checked. Refusals say why, in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from feddd.core.payload import decode_values, droppable_bytes, fixed_bytes, pack_mask
from feddd.core.selection import kept_units
from feddd.core.units import Mask, Units
from feddd.flower.names import RecordDict
from feddd.flower.records import REPORT, Report, read_payload, read_record
from feddd.strategies.protocol import Task


class Refused(ValueError):
    """An answer that does not count."""


@dataclass(frozen=True)
class Limits:
    """What a report may say at most; of losses also what at least, because the allocation weighs clients by them."""

    samples: int = 100_000_000
    loss: float = 1e6
    least_loss: float = 0.0
    compute_seconds: float = 7 * 86400.0
    bits_per_s: tuple[float, float] = (1.0, 1e15)


@dataclass(frozen=True)
class Accepted:
    """An upload that counts: its mask, packed and not, and the vector of its values."""

    report: Report
    mask: Mask
    packed: bytes
    values: Tensor
    upload_bytes: int


def read_report(content: RecordDict) -> Report:
    """The report of an answer."""
    found = read_record(content, REPORT, Report)
    if found is None:
        raise Refused("the answer has no feddd report: does the client app have feddd_mod?")
    if not (found.client.isprintable() and 1 <= len(found.client) <= 200):
        raise Refused("a client id has 1 to 200 printable characters")
    return found


def read_introduction(content: RecordDict, sub_models: int, limits: Limits) -> Report:
    """What a client says of itself before its first round: checked now, used in every round's plan."""
    report = read_report(content)
    if not 0 <= report.sub_model < sub_models:
        raise Refused(f"it has sub-model {report.sub_model}, and there are {sub_models}")
    if not (math.isnan(report.label_coverage) or 0.0 <= report.label_coverage <= 1e6):
        raise Refused(f"a label coverage of {report.label_coverage} makes no sense")
    least, most = limits.bits_per_s
    for rate in (report.uplink_bits_per_s, report.downlink_bits_per_s):
        if not (rate == 0.0 or least <= rate <= most):
            raise Refused(f"a link of {rate} bit/s is not between {least:g} and {most:g}")
    return report


def read_upload(content: RecordDict, report: Report, task: Task, table: Units, limits: Limits) -> Accepted:
    """Check an upload against the task it answers: sizes, digest, mask, values, report."""
    _check_report(report, limits)
    data = read_payload(content, droppable_bytes(table) + fixed_bytes(table))
    mask, values = decode_values(data, table)
    if not bool(values.isfinite().all()):
        raise Refused("the payload holds a value that is not finite")
    for layer in table.layers:
        always = layer.name in task.always_send
        wanted = layer.units if always else kept_units(layer.units, task.dropout)
        sent = int(mask[layer.name].sum())
        if sent != wanted:
            raise Refused(f"{sent} units of layer {layer.name} came, and {wanted} were asked for")
    return Accepted(report, mask, pack_mask(mask, table), values, len(data))


def _check_report(report: Report, limits: Limits) -> None:
    if not 1 <= report.samples <= limits.samples:
        raise Refused(f"{report.samples} samples are not between 1 and {limits.samples}")
    for name, value in (("loss", report.train_loss), ("statistic", report.oort_statistic)):
        if not limits.least_loss <= value <= limits.loss:
            raise Refused(f"a {name} of {value} is not between {limits.least_loss:g} and {limits.loss:g}")
    if not 0.0 <= report.compute_seconds <= limits.compute_seconds:
        raise Refused(f"{report.compute_seconds} s of computing make no sense")
