"""Arrays in an .npz file as a data set; those that are not compressed are mapped where they lie, not read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from feddd.errors import InputError
from feddd.world.dataset import Dataset

PARTS = ("train_inputs", "train_targets", "test_inputs", "test_targets")
_SMALL = 1 << 20
_LOCAL_HEADER = 30
"""Bytes of a zip archive before a member's name; the last four of them are the lengths of what follows."""


def read_npz(path: Path) -> Dataset:
    """Read train_inputs, train_targets, test_inputs, test_targets, and clients and classes if they are there.

    Several inputs are train_inputs.NAME and test_inputs.NAME.
    """
    try:
        arrays = _arrays(path)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError, MemoryError) as error:
        raise InputError(f"it cannot be read: {' '.join(str(error).split())}") from error
    known = {name.partition(".")[0] for name in arrays}
    if missing := [name for name in PARTS if name not in known]:
        raise InputError(f"it has no array {missing[0]!r}; it has {', '.join(sorted(arrays)) or 'none'}")
    if unknown := sorted(known - {*PARTS, "clients", "classes"}):
        raise InputError(f"it has an array {unknown[0]!r}; known are {', '.join(PARTS)}, clients and classes")
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


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        return {member.filename.removesuffix(".npy"): _array(path, archive, member) for member in members}


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Return one array, mapped if it is large and not compressed."""
    with archive.open(member) as file:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"{member.filename} has the unknown version {version}")
        shape, fortran, kind = read(file)
        head = file.tell()
    if kind.hasobject:
        raise ValueError(f"{member.filename} holds Python objects, which are not read: they can run code")
    if head + int(np.prod(shape, dtype=object)) * kind.itemsize != member.file_size:
        raise ValueError(f"{member.filename} has {member.file_size} bytes, which is not what its header says")
    if member.compress_type == zipfile.ZIP_STORED and not fortran and shape and member.file_size >= _SMALL:
        with path.open("rb") as file:
            file.seek(member.header_offset + _LOCAL_HEADER - 4)
            lengths = file.read(4)
        start = member.header_offset + _LOCAL_HEADER
        start += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        return np.memmap(path, kind, "r", start + head, shape)
    with archive.open(member) as file:
        return npy.read_array(file, allow_pickle=False)
