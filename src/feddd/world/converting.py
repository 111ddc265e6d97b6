"""Data sets that are not pictures, turned into plain files when they are fetched: text, tables of R's, zipped tables.

Only what is written here is ever read again, and only with the right checksum.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

PLAYS = """
alls_well_that_ends_well antony_and_cleopatra as_you_like_it comedy_of_errors coriolanus cymbeline hamlet
henry_iv_part_1 henry_iv_part_2 henry_v henry_vi_part_1 henry_vi_part_2 henry_vi_part_3 henry_viii john
julius_caesar lear loves_labours_lost macbeth measure_for_measure merchant_of_venice merry_wives_of_windsor
much_ado_about_nothing othello pericles richard_ii richard_iii romeo_and_juliet taming_of_the_shrew tempest
timon_of_athens tragedy_of_titus_andronicus troilus_and_cressida twelfth_night two_gentlemen_of_verona
winters_tale
""".split()  # noqa: SIM905
"""Those that mark their speakers in the same way: all but A Midsummer Night's Dream."""
_SPEAKER = re.compile(r"[A-Z][A-Za-z'& -]{1,39}\.")
_STAGE_DIRECTION = re.compile(r"\[[^\]]*\]")


def speeches(plays: Mapping[str, str]) -> bytes:
    """Return who says what in plays, by name, as lines of JSON: {"play": …, "speaker": …, "text": …}.

    A speech is a paragraph below a line with nothing but the speaker's name and a full stop.
    """
    out = io.StringIO()
    for play, text in sorted(plays.items()):
        for paragraph in re.split(r"\n\s*\n", text.replace("\r", "")):
            first, *lines = [line.strip() for line in paragraph.strip().split("\n")]
            if not lines or not _SPEAKER.fullmatch(first):
                continue
            words = _STAGE_DIRECTION.sub("", "\n".join(lines)).strip()
            if words:
                speech = {"play": play, "speaker": first.rstrip(".").title(), "text": words}
                out.write(json.dumps(speech) + "\n")
    return out.getvalue().encode()


def unzipped(archive: bytes, member: str, most_bytes: int) -> bytes:
    """Return one file of a zip archive; ValueError if it is not there or larger than that."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as packed, packed.open(member) as file:
            content = file.read(most_bytes + 1)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"no zip archive with a file {member}: {error}") from error
    if len(content) > most_bytes:
        raise ValueError(f"{member} unpacks to more than {most_bytes} bytes")
    return content


def table_of_r(packed: bytes, most_bytes: int) -> bytes:
    """Return the one data frame of an R file as CSV; its columns may be factors and numbers, nothing else."""
    unpacker = lzma.LZMADecompressor()
    content = unpacker.decompress(packed, most_bytes)
    if not unpacker.eof or content[:7] != b"RDX2\nX\n":
        raise ValueError("no R data in version 2 of R's binary format, compressed by xz")
    frame = _Reader(content[7:]).frame()
    rows = csv.writer(out := io.StringIO(), lineterminator="\n")
    rows.writerow(frame)
    rows.writerows(zip(*frame.values(), strict=True))
    return out.getvalue().encode()


class _Reader:
    """Reads what R's serialisation writes, as far as data frames need it."""

    _SYMBOL, _PAIRS, _STRING, _INTEGERS, _REALS, _STRINGS, _LIST = 1, 2, 9, 13, 14, 16, 19
    _END, _REFERENCE = 254, 255
    _HAS_ATTRIBUTES, _HAS_TAG = 0x200, 0x400

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0
        self._symbols: list[str] = []

    def frame(self) -> dict[str, list[Any]]:
        """Return the columns of the first object of the file, which must be a data frame."""
        self._take(12)  # the versions of the format and of the R that wrote it
        ((_, (columns, attributes)),) = self._item()
        found = {}
        for name, (values, own) in zip(attributes["names"][0], columns, strict=True):
            levels = own["levels"][0] if "levels" in own else None
            found[name] = [levels[place - 1] for place in values] if levels else values
        return found

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= len(self._content) - self._at:
            raise ValueError("the R data ends too early")
        self._at += count
        return self._content[self._at - count : self._at]

    def _integer(self) -> int:
        return int(struct.unpack(">i", self._take(4))[0])

    def _item(self) -> Any:
        """Return the next object: pairs as a list of (tag, object), a vector as (values, attributes)."""
        flags = self._integer()
        kind = flags & 0xFF
        if kind == self._END:
            return None
        if kind == self._SYMBOL:
            self._symbols.append(self._item())
            return self._symbols[-1]
        if kind == self._REFERENCE:
            return self._symbols[(flags >> 8) - 1]
        if kind == self._STRING:
            length = self._integer()
            return "" if length < 0 else self._take(length).decode()
        if kind == self._PAIRS:
            return self._pairs(flags)
        values = self._values(kind, self._integer())
        return values, dict(self._item() or []) if flags & self._HAS_ATTRIBUTES else {}

    def _pairs(self, flags: int) -> list[tuple[Any, Any]]:
        pairs = []
        while flags & 0xFF == self._PAIRS:
            tag = self._item() if flags & self._HAS_TAG else None
            pairs.append((tag, self._item()))
            flags = self._integer()
        return pairs

    def _values(self, kind: int, count: int) -> list[Any]:
        if kind == self._INTEGERS:
            return list(struct.unpack(f">{count}i", self._take(4 * count)))
        if kind == self._REALS:
            return [f"{value:g}" for value in struct.unpack(f">{count}d", self._take(8 * count))]
        if kind in (self._STRINGS, self._LIST) and count <= len(self._content):
            return [self._item() for _ in range(count)]
        raise ValueError(f"R's type {kind} is not known here")
