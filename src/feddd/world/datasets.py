"""Data sets as arrays: where they lie, how they are stored, and the checksums that say they are the real ones.

Nothing is downloaded here: `feddd.world.fetching` brings a data set, this module only reads it.
"""

import functools
import hashlib
import io
import lzma
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError, nearest
from feddd.files import user_cache
from feddd.world.dataset import Dataset
from feddd.world.problems import PROBLEMS

CIFAR_TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST_FILE = "test_batch.bin"
_CIFAR_PICKLES = "cifar-10-batches-py"
_BUNDLED = "fashion-mnist-mini"
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, eq=False)
class ImageDataset(Dataset):
    """Images as bytes, standardised when a network sees them, and labels 0 … classes − 1; the arrays are read-only.

    inputs: [M, channels, height, width]    mean, deviation: of the training pixels in [0, 1], per channel
    """

    name: str = "images"
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    @property
    def train_images(self) -> NDArray[np.uint8]:
        """Return the images to train on."""
        return self.train_inputs  # type: ignore[no-any-return]

    @property
    def train_labels(self) -> NDArray[np.int64]:
        """Return their labels."""
        return self.train_targets  # type: ignore[no-any-return]

    @property
    def test_images(self) -> NDArray[np.uint8]:
        """Return the images to test with."""
        return self.test_inputs  # type: ignore[no-any-return]

    @property
    def test_labels(self) -> NDArray[np.int64]:
        """Return their labels."""
        return self.test_targets  # type: ignore[no-any-return]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @property
    def scaling(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return what a pixel is multiplied with and what is added then, [channels] each."""
        return self.scale, self.shift

    @property
    def scale(self) -> NDArray[np.float32]:
        """Return what a pixel is multiplied with, [channels]."""
        return (1.0 / (255.0 * np.array(self.deviation))).astype(np.float32)

    @property
    def shift(self) -> NDArray[np.float32]:
        """Return what is added then, [channels]."""
        shift: NDArray[np.float32] = (-np.array(self.mean) / np.array(self.deviation)).astype(np.float32)
        return shift

    def inputs(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return what a network sees of images: pixels in [0, 1], standardised per channel."""
        scaled = images.astype(np.float32) * self.scale[:, None, None]
        standardised: NDArray[np.float32] = scaled + self.shift[:, None, None]
        return standardised


@dataclass(frozen=True)
class StoredFile:
    """One file as it must lie on disk: its size, its first bytes and the SHA-256 of all of it."""

    name: str
    size: int
    header: bytes
    sha256: str


@dataclass(frozen=True)
class Spec:
    """How a data set is stored: folder below the data folder, shapes, and a checksum for every file.

    `idx`: four files, images and labels apart. `cifar`: records of one label byte and the pixels, five training files.
    `plain`: no images; the sizes of the files are given, and `feddd.world.problems` reads them.
    """

    folder: str
    storage: Literal["idx", "cifar", "plain"]
    image_shape: tuple[int, int, int]
    train: int
    test: int
    sha256: Mapping[str, str]
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    classes: int = 10
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[StoredFile]:
        """Return every file the data set consists of."""
        return [StoredFile(name, *self._size_and_header(name), digest) for name, digest in self.sha256.items()]

    def _size_and_header(self, name: str) -> tuple[int, bytes]:
        if self.storage == "plain":
            return self.sizes[name], b""
        channels, height, width = self.image_shape
        if self.storage == "cifar":
            records = self.test if name == CIFAR_TEST_FILE else self.train // len(CIFAR_TRAIN_FILES)
            return records * (1 + channels * height * width), b""
        count = self.train if name.startswith("train") else self.test
        if "labels" in name:
            return 8 + count, struct.pack(">2I", 0x801, count)
        return 16 + count * height * width, struct.pack(">4I", 0x803, count, height, width)


def _plain(folder: str, file: str, size: int, sha256: str) -> Spec:
    return Spec(folder, "plain", (0, 0, 0), 0, 0, {file: sha256}, sizes={file: size})


SPECS: dict[str, Spec] = {
    "mnist": Spec(
        folder="MNIST/raw",
        storage="idx",
        image_shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        sha256={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        mean=(0.1307,),
        deviation=(0.3081,),
    ),
    "fashion-mnist": Spec(
        folder="FashionMNIST/raw",
        storage="idx",
        image_shape=(1, 28, 28),
        train=60_000,
        test=10_000,
        sha256={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        mean=(0.2860,),
        deviation=(0.3530,),
    ),
    # These are the digests of the files in the authors' own cifar-10-binary.tar.gz.
    "cifar10": Spec(
        folder="cifar-10-batches-bin",
        storage="cifar",
        image_shape=(3, 32, 32),
        train=50_000,
        test=10_000,
        sha256={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        mean=(0.4914, 0.4822, 0.4465),
        deviation=(0.2470, 0.2435, 0.2616),
    ),
    # What follows is converted when it is fetched, see `feddd.world.converting`; the digests are of the results.
    "shakespeare": _plain(
        "shakespeare", "speeches.jsonl", 5_790_168, "2e362142dc6a7ab75ccd61963808dcc5239158a044e97117d81146342465b8b8"
    ),
    "letters": _plain(
        "letters", "letters.csv", 712_666, "d0982cbc2106b8b52a811424b8171d50c1a96b05bc7ff4121ce7bd1087b6d226"
    ),
    "flights": _plain(
        "flights", "flights.csv", 31_053_850, "563db8f117faf6ffd76aa868099df37dfa78dc17b5ac6d3d9ea6476e051a0bc4"
    ),
    # Ships with the package, compressed (tools/make_fashion_mnist_mini.py); the digests are of the unpacked files.
    _BUNDLED: Spec(
        folder="data",
        storage="idx",
        image_shape=(1, 28, 28),
        train=10_000,
        test=2_000,
        sha256={
            "train-images-idx3-ubyte": "d33512cfdc636a0d8972818e6659995be209a88891df7fa2109d7895922c8985",
            "train-labels-idx1-ubyte": "620cb8e3b9348037c5ff9a07b02d773ab165330e072dfd19e0d21c59f8042dcf",
            "t10k-images-idx3-ubyte": "15a92dd1e9b16ea361928086e77df4dfa890c255c00b5a8c8162c1040ce8eef1",
            "t10k-labels-idx1-ubyte": "234596aeb6eb48133ec99a62541f90bc0728c9559a681f1e0638037462458f2c",
        },
        mean=(0.2860,),
        deviation=(0.3530,),
    ),
}
DATASETS: tuple[str, ...] = tuple(SPECS)


def load(name: str, data_dir: Path | None = None, *, verify: bool = True) -> Dataset:
    """Open a data set from `data_dir`, else `$FEDDD_DATA`, else the user's cache: the first that holds it.

    `verify=False` looks at sizes and headers only: for worker processes, whose coordinator has verified the checksums.
    """
    spec = spec_of(name)
    if spec.storage == "plain":
        return PROBLEMS[name](_genuine(name, spec, data_dir, verify=verify))
    return load_images(name, data_dir, verify=verify)


def load_images(name: str, data_dir: Path | None = None, *, verify: bool = True) -> ImageDataset:
    """Open a data set of images; MNIST-like ones are mapped, so that all processes of a machine share one copy."""
    spec = spec_of(name)
    if is_bundled(name):
        return _load_bundled(name, spec)
    folder = _genuine(name, spec, data_dir, verify=verify)
    if spec.storage == "cifar":
        train, test = _read_cifar(spec, folder, CIFAR_TRAIN_FILES), _read_cifar(spec, folder, (CIFAR_TEST_FILE,))
        return _image_dataset(name, spec, *train, *test)
    train, test = (_map_idx(spec, folder, part) for part in ("train", "t10k"))
    return _image_dataset(name, spec, *train, *test)


def spec_of(name: str) -> Spec:
    """Return how the named data set is stored; an unknown name is an error that suggests the nearest known one."""
    if name in SPECS:
        return SPECS[name]
    raise InputError(f"unknown data set {name!r}; {nearest(name.lower(), SPECS)}")


def is_bundled(name: str) -> bool:
    """Return whether the data set ships with the package and needs no folder."""
    return name == _BUNDLED


def search_folders(data_dir: Path | None = None) -> list[Path]:
    """Return the folders data is looked for in, first come first served; the first is also where a fetch puts it."""
    given = [data_dir] if data_dir is not None else []
    named = [Path(os.environ["FEDDD_DATA"]).expanduser()] if os.environ.get("FEDDD_DATA") else []
    return [*given, *named, user_cache()]


def holds(spec: Spec, folder: Path) -> bool:
    """Return whether any file of the data set is there: an incomplete one is to be reported, not passed over."""
    return any(os.path.exists(folder / name) for name in spec.sha256)  # unlike Path.exists, False without permission


def defect(spec: Spec, folder: Path, *, verify: bool = True) -> str | None:
    """Return what is wrong with the files of a data set, beginning with the file's name; None if nothing is."""
    for expected in spec.files:
        try:
            with open(folder / expected.name, "rb", opener=_without_waiting) as stream:
                size = os.fstat(stream.fileno()).st_size
                fault = _fault(expected, size, stream, verify=verify)
        except FileNotFoundError:
            fault = "is missing"
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        if fault:
            return f"{expected.name}: {fault}"
    return None


def _without_waiting(path: str, flags: int) -> int:
    """A pipe in the place of a file is opened at once and found to be empty, instead of waiting for its writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _fault(expected: StoredFile, size: int, stream: io.BufferedReader | io.BytesIO, *, verify: bool) -> str | None:
    if size != expected.size:
        return f"has {size} bytes instead of {expected.size}"
    if (header := stream.read(len(expected.header))) != expected.header:
        return f"has the IDX header {header.hex()} instead of {expected.header.hex()}"
    if not verify:
        return None
    stream.seek(0)
    digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return None if digest == expected.sha256 else f"has the SHA-256 {digest} instead of {expected.sha256}"


def _genuine(name: str, spec: Spec, data_dir: Path | None, *, verify: bool) -> Path:
    """Return the folder that holds the data set's files, all of them as they must be."""
    folder = _find(name, spec, data_dir)
    if fault := defect(spec, folder, verify=verify):
        raise InputError(f"{folder}{os.sep}{fault}; `feddd data fetch {name}` brings the genuine files")
    return folder


def _find(name: str, spec: Spec, data_dir: Path | None) -> Path:
    folders = search_folders(data_dir)
    for folder in folders:
        if holds(spec, folder / spec.folder):
            return folder / spec.folder
    for folder in folders:
        if spec.storage == "cifar" and (folder / _CIFAR_PICKLES).is_dir():
            raise InputError(
                f"{folder / _CIFAR_PICKLES}: pickles are not read, they can run code; "
                f"`feddd data fetch {name}` brings the binary version ({spec.folder})"
            )
    looked = ", ".join(str(folder / spec.folder) for folder in folders)
    raise InputError(f"{name}: no data in {looked}; bring it with `feddd data fetch {name}`")


def _map_idx(spec: Spec, folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    count = spec.train if part == "train" else spec.test
    images = np.memmap(folder / f"{part}-images-idx3-ubyte", np.uint8, "r", 16, (count, *spec.image_shape))
    labels = np.fromfile(folder / f"{part}-labels-idx1-ubyte", np.uint8, offset=8)
    return images, _frozen(labels.astype(np.int64))


def _read_cifar(spec: Spec, folder: Path, names: tuple[str, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    record_bytes = 1 + int(np.prod(spec.image_shape))
    records = np.concatenate([np.fromfile(folder / name, np.uint8).reshape(-1, record_bytes) for name in names])
    images = np.ascontiguousarray(records[:, 1:]).reshape(-1, *spec.image_shape)
    return _frozen(images), _frozen(records[:, 0].astype(np.int64))


def _load_bundled(name: str, spec: Spec) -> ImageDataset:
    # Always verified: it is unpacked into memory anyhow, and the digest of a few MB costs milliseconds.
    content = {expected.name: _unpack(spec.folder, expected) for expected in spec.files}
    images = [np.frombuffer(content[f"{part}-images-idx3-ubyte"], np.uint8, offset=16) for part in ("train", "t10k")]
    labels = [np.frombuffer(content[f"{part}-labels-idx1-ubyte"], np.uint8, offset=8) for part in ("train", "t10k")]
    train_images, test_images = (pixels.reshape(-1, *spec.image_shape) for pixels in images)
    train_labels, test_labels = (_frozen(values.astype(np.int64)) for values in labels)
    return _image_dataset(name, spec, train_images, train_labels, test_images, test_labels)


def _image_dataset(name: str, spec: Spec, *arrays: NDArray[Any]) -> ImageDataset:
    train, labels, test, answers = arrays
    facts: dict[str, Any] = {"name": name, "mean": spec.mean, "deviation": spec.deviation}
    return ImageDataset(train, labels, test, answers, classes=spec.classes, **facts)


@functools.cache  # a process that builds many worlds unpacks once
def _unpack(folder: str, expected: StoredFile) -> bytes:
    packed = resources.files("feddd.world") / folder / f"{expected.name}.xz"
    try:
        content = lzma.decompress(packed.read_bytes())
        fault = _fault(expected, len(content), io.BytesIO(content), verify=True)
    except (OSError, lzma.LZMAError) as error:
        content, fault = b"", str(error)
    if fault:
        raise InputError(f"{packed}: {fault}; the installed package is damaged, install it again")
    return content


def _frozen(array: NDArray[T]) -> NDArray[T]:
    array.flags.writeable = False
    return array
