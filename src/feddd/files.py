"""Where files go, and writing them so that a reader never sees half of one."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def user_cache() -> Path:
    """Where this package may keep what can be made or fetched again."""
    # A relative XDG_CACHE_HOME is to be ignored, says the XDG specification.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "feddd"


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
