"""Data of one's own: a function by its import path, arrays in an .npz file, a table, or a folder of images."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError
from feddd.world.dataset import Dataset
from feddd.world.datasets import SPECS
from feddd.world.models import import_object

TABLES = (".csv", ".parquet")
ENDINGS = (*TABLES, ".npz")
KNOWN_DATA = (*SPECS, "synthetic-grey", "synthetic-colour")
"""The data sets that have names."""
_PARTS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


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
            return read_npz(path)
        from feddd.world.image_folder import read_images

        return read_images(path)
    except InputError as error:
        raise InputError(f"data set {name!r}: {error}") from error
    except OSError as error:
        raise InputError(f"data set {name!r} cannot be read: {error.strerror or error}") from error


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


def read_npz(path: Path) -> Dataset:
    """Read train_inputs, train_targets, test_inputs, test_targets, and clients and classes if they are there.

    Several inputs are train_inputs.NAME and test_inputs.NAME. Arrays that are not compressed are mapped, not read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            mapped = {name: _mapped(path, name) for name in names}
            arrays = {name: file[name] if found is None else found for name, found in mapped.items()}
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, NotImplementedError, AttributeError) as error:
        raise InputError(f"it cannot be read: {' '.join(str(error).split())}") from error
    known = {name.partition(".")[0] for name in names}
    if missing := [name for name in _PARTS if name not in known]:
        raise InputError(f"it has no array {missing[0]!r}; it has {', '.join(sorted(names)) or 'none'}")
    if unknown := sorted(known - {*_PARTS, "clients", "classes"}):
        raise InputError(f"it has an array {unknown[0]!r}; known are {', '.join(_PARTS)}, clients and classes")
    train, test = (_together(arrays, f"{part}_inputs") for part in ("train", "test"))
    targets = arrays.get("train_targets"), arrays.get("test_targets")
    return Dataset(train, targets[0], test, targets[1], arrays.get("clients"), _names(arrays.get("classes")))


def _names(classes: NDArray[Any] | None) -> Any:
    if classes is None:
        return None
    return int(classes) if classes.ndim == 0 and classes.dtype.kind in "iu" else classes.tolist()


def _together(arrays: Mapping[str, NDArray[Any]], name: str) -> Any:
    if name in arrays:
        return arrays[name]
    return {key.removeprefix(f"{name}."): array for key, array in arrays.items() if key.startswith(f"{name}.")}


def _mapped(path: Path, name: str) -> NDArray[Any] | None:
    """Map an array of a zip archive where it lies; None if it is compressed, small or of an unusual kind."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size < 1 << 20:
            return None
        file.seek(member.header_offset)
        head = file.read(30)
        start = (
            member.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        )
        file.seek(start)
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            return None
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, kind = read(file)
        size = int(np.prod(shape, dtype=object)) * kind.itemsize
        if fortran or kind.hasobject or not shape or file.tell() - start + size != member.file_size:
            return None
        return np.memmap(path, kind, "r", file.tell(), shape)
