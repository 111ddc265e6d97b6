"""Where files go, writing them so that a reader never sees half of one, and reading what a stranger wrote."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_BYTES = 128 * 2**20
"""No text that is read whole is longer: a fleet of more than a million clients fits."""
_MOST_LEVELS = 50
_ILLEGAL = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]')
_RESERVED = re.compile(
    r"con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]", re.IGNORECASE
)  # names of devices on Windows


def user_cache() -> Path:
    """Return where this package may keep what can be made or fetched again."""
    # A relative XDG_CACHE_HOME is to be ignored, says the XDG specification.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "feddd"


def portable_name(text: str) -> str:
    """Turn a text into a file name that is legal on every system; one that is legal already stays as it is.

    A name that had to be changed has a digest of the text, so that different texts keep different names.
    """
    legal = _ILLEGAL.sub("_", text).rstrip(". ")
    stem, dot, rest = legal.partition(".")
    if text and legal == text and not _RESERVED.fullmatch(stem.rstrip()):
        return text
    return f"{stem}-{_digest(text)}{dot}{rest}"


def distinct_names(texts: Iterable[str]) -> dict[str, str]:
    """Give every text a portable name of its own, also for systems that do not tell upper from lower case."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for text in texts:
        name = portable_name(text)
        while name.casefold() in taken:
            name = f"{name}-{_digest(text)}"
        taken.add(name.casefold())
        names[text] = name
    return names


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by this content, or leave it as it was."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Make what was created, replaced or removed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return a file's text; OSError if it cannot be read, ValueError if it is no text or longer than MOST_BYTES."""
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(2**20):  # piece by piece: a device has no end, and a size asked for is reserved
            content += piece
            if len(content) > MOST_BYTES:
                raise ValueError(f"it is longer than {MOST_BYTES // 2**20} MiB")
    return content.decode(encoding)


def parse_toml(text: str) -> dict[str, Any]:
    """Return a TOML document; ValueError for everything that is wrong with it."""
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from None
    _check_values(document)
    return document


def parse_json(text: str) -> dict[str, Any]:
    """Return a JSON object; ValueError for everything that is wrong with it."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels") from None
    if not isinstance(document, dict):
        raise ValueError(f"it is a {type(document).__name__}, not an object")
    _check_values(document)
    return document


def _check_values(document: object) -> None:
    """What follows may recurse and may print numbers: Python does neither without a limit."""
    waiting = [(document, 0)]
    while waiting:
        value, level = waiting.pop()
        if level > _MOST_LEVELS:
            raise ValueError(f"it is nested deeper than {_MOST_LEVELS} levels")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"it holds an integer of {value.bit_length()} bits; 64 are allowed")
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(item, level + 1) for item in items]
