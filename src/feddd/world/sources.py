"""Data of one's own: a function by its import path, arrays in an .npz file, a table, or a folder of images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from feddd.errors import InputError
from feddd.world.dataset import Dataset
from feddd.world.datasets import SPECS
from feddd.world.models import import_object

TABLES = (".csv", ".parquet")
ENDINGS = (*TABLES, ".npz")
KNOWN_DATA = (*SPECS, "synthetic-grey", "synthetic-colour")
"""The data sets that have names."""


def is_table(name: str) -> bool:
    """Return whether this names a table."""
    return name.lower().endswith(TABLES)


def is_path_of_data(name: str) -> bool:
    """Return whether this names a file or a folder, by how it looks."""
    return ":" not in name and name not in KNOWN_DATA and (name.lower().endswith(ENDINGS) or "/" in name or name == ".")


def is_own(name: str) -> bool:
    """Return whether this names data of one's own: an import path, a file or a folder."""
    return ":" in name or is_path_of_data(name)


def load_own(
    name: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    table: Mapping[str, Any] | None = None,
    rng: np.random.Generator,
) -> Dataset:
    """Return data of one's own; whatever is wrong with it is one line that begins with its name.

    arguments: of the function    table: what `world.tables.read_table` wants to know    rng: draws a table's test rows
    """
    try:
        if ":" in name:
            return _call(name, dict(arguments or {}))
        path = Path(name)
        if not path.exists():
            raise InputError("there is no such file or folder")
        if is_table(name):
            from feddd.world.tables import read_table

            return read_table(path, rng=rng, **(table or {}))
        if name.lower().endswith(".npz"):
            from feddd.world.npz import read_npz

            return read_npz(path)
        from feddd.world.image_folder import read_images

        return read_images(path)
    except InputError as error:
        raise InputError(f"data set {name!r}: {error}") from error
    except OSError as error:
        raise InputError(f"data set {name!r} cannot be read: {error.strerror or error}") from error


def content_digest(name: str, arguments: Mapping[str, Any] | None = None) -> str:
    """Return a SHA-256 of what data of one's own holds now: of a file's bytes, of all images, of what a function makes.

    Files are hashed as they lie; a function is called.
    """
    if ":" in name:
        return load_own(name, arguments, rng=np.random.default_rng(0)).digest()
    try:
        path = Path(name)
        if not path.exists():
            raise InputError("there is no such file or folder")
        if name.lower().endswith(ENDINGS):
            return _file_digest(path)
        from feddd.world.image_folder import image_files

        found = hashlib.sha256()
        for image in image_files(path):
            found.update(f"{image.relative_to(path).as_posix()}\0{_file_digest(image)}\n".encode())
        return found.hexdigest()
    except InputError as error:
        raise InputError(f"data set {name!r}: {error}") from error
    except OSError as error:
        raise InputError(f"data set {name!r} cannot be read: {error.strerror or error}") from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _call(name: str, arguments: dict[str, Any]) -> Dataset:
    function = import_object(name)
    try:
        found = function(**arguments)
    except InputError:
        raise
    except Exception as error:  # whatever a user's function raises is one line
        raise InputError(" ".join(f"{type(error).__name__}: {error}".split())) from error
    if not isinstance(found, Dataset):
        raise InputError(f"it returned a {type(found).__name__}, not a feddd.Dataset")
    return found
