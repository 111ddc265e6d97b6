"""What a run says of its rounds as they go by, one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from feddd.flower.api import MetricRecord
from feddd.flower.round_facts import RoundFacts


def round_line(
    facts: RoundFacts,
    metrics: Sequence[Mapping[str, object] | MetricRecord | None] = (),
    num_rounds: int | None = None,
    seconds_left: float | None = None,
) -> str:
    """Return who counted, bytes both ways, the least and the mean dropout rate, metrics, seconds, and the time left."""
    of = f" of {num_rounds}" if num_rounds is not None else ""
    counted = sum(upload.status == "ok" for upload in facts.uploads)
    up = sum(upload.upload_bytes for upload in facts.uploads)
    down = sum(upload.download_bytes for upload in facts.uploads) + facts.evaluation_bytes
    rates = list(facts.dropout.values())
    parts = [f"round {facts.round}{of}: {counted} of {len(facts.uploads)} clients counted"]
    parts.append(f"{_bytes(up)} up, {_bytes(down)} down")
    if facts.attempts > 1:
        parts.append(f"{facts.attempts} attempts, {_bytes(facts.repeated_bytes)} in those before the last")
    if rates:
        parts.append(f"dropout {min(rates):.2f} least, {sum(rates) / len(rates):.2f} mean")
    shown = [f"{name} {value:.4g}" for one in metrics for name, value in (one or {}).items() if _is_number(value)]
    if shown:
        parts.append(", ".join(shown))
    parts.append(duration(facts.seconds))
    if seconds_left is not None:
        parts.append(f"about {duration(seconds_left)} left")
    return "; ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds in words that are easy to read."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} GB"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
