"""The rows of a strategy that is under way, appended to one file: a checkpoint names a position in it."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from feddd.experiments.results import SCHEMAS
from feddd.experiments.tables import WRITTEN, Rows

_NAMES = WRITTEN
_HEAD = struct.Struct("<BQ")  # which table, and how many bytes its rows have


@dataclass(frozen=True)
class Position:
    """The first so many bytes of a journal, and their SHA-256."""

    length: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Journal:
    """Appends; what lies behind the position that it goes on from is cut off."""

    def __init__(self, path: Path, after: Position) -> None:
        self._path = path
        self._waiting: list[Rows] = []
        with path.open("ab") as file:
            file.truncate(after.length)
        self._length = after.length
        self._digest = hashlib.sha256(path.read_bytes())

    def add(self, rows: Iterable[Rows]) -> None:
        """Remember rows for the next `sync`."""
        self._waiting += rows

    def sync(self) -> Position:
        """Append what was added, durably."""
        waiting, self._waiting = self._waiting, []
        content = b"".join(_packed(name, batch) for name, batch in waiting)
        with self._path.open("r+b") as file:
            file.seek(self._length)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._digest.update(content)
        self._length += len(content)
        return Position(self._length, self._digest.hexdigest())


def read_journal(path: Path, position: Position) -> list[Rows]:
    """Return the rows before a position; ValueError if they are not what was written."""
    content = path.read_bytes()[: position.length] if path.is_file() else b""
    if len(content) < position.length or hashlib.sha256(content).hexdigest() != position.sha256:
        raise ValueError(f"{path.name} is damaged")
    return list(_unpacked(content))


def _packed(name: str, batch: Any) -> bytes:
    body: bytes = batch.serialize().to_pybytes()
    return _HEAD.pack(_NAMES.index(name), len(body)) + body


def _unpacked(content: bytes) -> Iterator[Rows]:
    at = 0
    while at < len(content):
        number, size = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        name = _NAMES[number]
        yield name, pa.ipc.read_record_batch(pa.py_buffer(content[at : at + size]), SCHEMAS[name])
        at += size
