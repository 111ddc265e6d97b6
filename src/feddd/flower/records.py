"""What travels in Flower's messages: orders, reports, and payloads cut into small arrays. No pickle anywhere.

Flower moves an array as one object, two at a time, and gives up on one that has not arrived whole after 30 s; sent
again it is refused if the first did arrive, and the whole message is lost. So a slow link needs small ones.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from feddd.flower.api import Array, ArrayRecord, ConfigRecord, RecordDict

PROTOCOL = 4
MOST_CHUNK_BYTES, LEAST_CHUNK_BYTES = 256 * 1024, 4 * 1024
CHUNK_SECONDS = 5.0
"""A piece of a payload takes no longer than this on an empty link."""
ORDER, REPORT, PAYLOAD, COVERAGE = "feddd.order", "feddd.report", "feddd.payload", "feddd.coverage"
PREFIX = "feddd."
"""Before the names of a download's parts, see `wire.download_format`."""
_KIND = "feddd.bytes"  # how the arrays' bytes are to be read: by us

T = TypeVar("T", "Order", "Report")


class RecordError(ValueError):
    """A message is not what it should be."""


@dataclass(frozen=True)
class Order:
    """What a client is to do.

    what: "hello", "train" or "evaluate"    base: the version its sparse download builds on, "" for the full model
    version: of the state that it is to keep after this round    place: its index at the server, the address of its
    random numbers    coverage: CR(k) is in the message; covered: it was told before, and is needed now
    chunk_bytes: the pieces in which its upload is to travel
    up, down: the stages of its upload and the kind of its download, see `wire.documents`
    reference: the number of the one that the payload means, after `missed` moves that are in the message, or `whole` if
    all of it is; moves: it becomes what is sent    rules: what the train function has to confirm
    frozen: a digest of the parameters that nobody trains and that never travel, "" if there are none
    """

    what: str
    round: int = 0
    base: str = ""
    version: str = ""
    up: str = "[]"
    down: str = '{"kind": "values", "masked": false}'
    seed: int = 0
    place: int = 0
    coverage: bool = False
    covered: bool = False
    chunk_bytes: int = MOST_CHUNK_BYTES
    reference: int = 0
    missed: int = 0
    whole: bool = False
    moves: bool = False
    rules: tuple[str, ...] = ()
    frozen: str = ""


@dataclass(frozen=True)
class Report:
    """What a client says beside its payload.

    status: "ok", "resync" (it does not hold the base), "diverged", "unconfirmed" (for a reason)
    held: the version it holds, "" for none
    sub_model: which of the known models it has    compute_seconds: of its train function
    label_coverage: Σ_c min(C·dis_n^c, 1), NaN if it does not say; rates: 0 if it was not told its own
    """

    client: str
    status: str = "ok"
    held: str = ""
    sub_model: int = 0
    train_loss: float = math.nan
    oort_statistic: float = math.nan
    samples: int = 0
    label_coverage: float = math.nan
    compute_seconds: float = math.nan
    uplink_bits_per_s: float = 0.0
    downlink_bits_per_s: float = 0.0
    reason: str = ""


def write_record(content: RecordDict, key: str, value: Order | Report) -> None:
    """Put an order or a report into a message."""
    fields = {name: list(item) if isinstance(item, tuple) else item for name, item in vars(value).items()}
    content[key] = ConfigRecord({"protocol": PROTOCOL, **fields})


def read_record(content: RecordDict, key: str, kind: type[T]) -> T | None:
    """Return an order or a report of a message; None if there is none, RecordError if it is not one."""
    record = content.config_records.get(key)
    if record is None:
        return None
    if record.get("protocol") != PROTOCOL:
        raise RecordError(f"{key} speaks protocol {record.get('protocol')!r}, not {PROTOCOL}: both ends must agree")
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = record.get(field.name)
        default = field.default
        if isinstance(default, tuple):
            if not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                raise RecordError(f"{key}.{field.name} must be a list of words, not {value!r:.80}")
            found[field.name] = tuple(value)
            continue
        wanted = str if default is dataclasses.MISSING else type(default)
        if type(value) is not wanted:
            raise RecordError(f"{key}.{field.name} must be a {wanted.__name__}, not {value!r:.80}")
        found[field.name] = value
    return kind(**found)


def chunk_bytes(bits_per_s: float) -> int:
    """Return how large the pieces for a link may be."""
    return int(min(max(CHUNK_SECONDS * bits_per_s / 8, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES))


def write_payload(content: RecordDict, data: bytes, chunk: int = MOST_CHUNK_BYTES, key: str = PAYLOAD) -> None:
    """Put bytes into a message, in pieces of at most `chunk` bytes."""
    chunk = min(max(chunk, LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)
    pieces = [data[start : start + chunk] for start in range(0, len(data), chunk)]
    arrays = {
        f"{number:06d}": Array(dtype="uint8", shape=(len(piece),), stype=_KIND, data=piece)
        for number, piece in enumerate(pieces)
    }
    content[key] = ArrayRecord(arrays)


def read_payload(content: RecordDict, most: int, key: str = PAYLOAD) -> bytes:
    """Return the bytes of a message, which may be `most` at the most."""
    record = content.array_records.get(key)
    if record is None:
        raise RecordError(f"the message has no {key}")
    total = sum(len(array.data) for array in record.values())
    if total > most:
        raise RecordError(f"{key} has {total} bytes, more than the {most} of a whole model")
    return b"".join(record[name].data for name in sorted(record))
