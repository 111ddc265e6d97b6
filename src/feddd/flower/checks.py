"""What the server believes of an answer that came as a Flower message: nothing that it has not checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from feddd.core.units import Units
from feddd.errors import InputError
from feddd.flower.api import RecordDict
from feddd.flower.records import REPORT, RecordError, Report, read_payload, read_record
from feddd.strategies.checks import Limits, Refused, check_told, check_version, read_upload
from feddd.strategies.protocol import Plan, Task, Upload
from feddd.wire.download_format import most_upload_bytes
from feddd.wire.format import PayloadError
from feddd.wire.stage import Update


@dataclass(frozen=True)
class Accepted:
    """An upload that counts: what the client said, and what it sent, a stack of one."""

    report: Report
    update: Update
    upload_bytes: int

    def upload(self, client: int, table: Units, download_bytes: int) -> Upload:
        """Return what a method is told about it."""
        return Upload(
            client=client,
            mask=self.update.chosen.packed(table)[0],
            kept_share=float(self.update.chosen.shares(table)[0]),
            train_loss=self.report.train_loss,
            oort_statistic=self.report.oort_statistic,
            samples=self.report.samples,
            upload_bytes=self.upload_bytes,
            download_bytes=download_bytes,
        )


def check_rules(plan: Plan) -> None:
    """Refuse a plan with rules of local training that no train function can be told."""
    for rule in {rule for task in plan.tasks for rule in task.local}:
        try:
            rule.config  # noqa: B018
        except NotImplementedError as error:
            raise InputError(str(error)) from error


def read_report(content: RecordDict) -> Report:
    """Return the report of an answer."""
    found = read_record(content, REPORT, Report)
    if found is None:
        raise Refused("the answer has no feddd report: does the client app have feddd_mod, first of its mods?")
    if not (found.client.isprintable() and 1 <= len(found.client) <= 200):
        raise Refused("a client id has 1 to 200 printable characters")
    return found


def read_introduction(content: RecordDict, sub_models: int, limits: Limits) -> Report:
    """Return what a client says of itself before its first round: checked now, used in every round's plan."""
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


def accept(
    content: RecordDict, client: str, version: str, task: Task, table: Units, limits: Limits
) -> tuple[Accepted | None, str]:
    """The upload if it counts, else why not. client, version: who must have sent it, and what it must hold now"""
    try:
        report = read_report(content)
        if report.client != client:
            raise Refused(f"the answer says it is from client {report.client!r}")
        if report.status == "diverged":
            return None, "diverged"
        if report.status == "unconfirmed":
            raise Refused(report.reason)
        if report.status != "ok":
            raise Refused("the client lost its state")
        check_version(report.held, version)
        return read_answer(content, report, task, table, limits), "ok"
    except (Refused, RecordError, PayloadError) as error:
        return None, f"refused: {error}"


def read_answer(content: RecordDict, report: Report, task: Task, table: Units, limits: Limits) -> Accepted:
    """Return what was uploaded, if it is what the task asked for."""
    check_told(report.samples, report.train_loss, report.oort_statistic, report.label_coverage, limits)
    if not 0.0 <= report.compute_seconds <= limits.compute_seconds:
        raise Refused(f"{report.compute_seconds} s of computing make no sense")
    data = read_payload(content, most_upload_bytes(task.up, table))
    return Accepted(report, read_upload(data, task, table, limits), len(data))
