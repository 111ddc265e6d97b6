"""Data sets: what is found where, what is refused and why, and that the real and the bundled data are what they say."""

import hashlib
import importlib.util
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from feddd.errors import InputError
from feddd.world import datasets, synthetic
from feddd.world.datasets import ImageDataset, Spec, load

REAL_DATA = os.environ.get("FEDDD_DATA")  # read before the fixture below takes it away
REAL_SPECS = dict(datasets.SPECS)
TRAIN, TEST = 50, 10


@pytest.fixture(autouse=True)
def _no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDDD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def idx_files() -> dict[str, bytes]:
    """A data set of 4 × 3 pixels in the format of MNIST, written out by hand."""
    files = {}
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        pixels = np.random.default_rng(count).integers(0, 256, count * 12, np.uint8).tobytes()
        files[f"{part}-images-idx3-ubyte"] = bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 4, 0, 0, 0, 3]) + pixels
        files[f"{part}-labels-idx1-ubyte"] = bytes([0, 0, 8, 1, 0, 0, 0, count]) + bytes(i % 10 for i in range(count))
    return files


def cifar_files() -> dict[str, bytes]:
    """A data set of 3 × 2 × 2 values in CIFAR-10's binary format: image i of a batch b has the values 10·b + i."""
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    return {name: b"".join(bytes([i] + [10 * b + i] * 12) for i in range(10)) for b, name in enumerate(names)}


FILES = {"mnist": idx_files(), "cifar10": cifar_files()}


@pytest.fixture(autouse=True)
def _small_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"mnist": (1, 4, 3), "cifar10": (3, 2, 2)}
    for name, files in FILES.items():
        real = datasets.SPECS[name]
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        monkeypatch.setitem(datasets.SPECS, name, Spec(real.folder, real.storage, shapes[name], TRAIN, TEST, digests))


def store(name: str, root: Path) -> Path:
    folder = root / datasets.SPECS[name].folder
    folder.mkdir(parents=True)
    for file, content in FILES[name].items():
        (folder / file).write_bytes(content)
    return folder


def test_idx_files_become_mapped_read_only_arrays(tmp_path: Path) -> None:
    store("mnist", tmp_path)
    data = load("mnist", tmp_path)
    assert isinstance(data.train_images, np.memmap)
    assert data.train_images.shape == (TRAIN, 1, 4, 3)
    assert data.train_images.tobytes() == FILES["mnist"]["train-images-idx3-ubyte"][16:]
    assert data.test_images.tobytes() == FILES["mnist"]["t10k-images-idx3-ubyte"][16:]
    assert data.train_labels.dtype == np.int64
    assert data.train_labels.tolist() == [i % 10 for i in range(TRAIN)]
    assert len(data.test_labels) == TEST
    assert data.classes == 10
    arrays = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    assert not any(array.flags.writeable for array in arrays)


def test_cifar_batches_are_joined_in_order(tmp_path: Path) -> None:
    store("cifar10", tmp_path)
    data = load("cifar10", tmp_path)
    assert data.train_images.shape == (TRAIN, 3, 2, 2)
    assert data.train_images[:, 2, 1, 0].tolist() == list(range(50))
    assert data.test_images[:, 0, 0, 0].tolist() == list(range(50, 60))
    assert data.train_labels.tolist() == [*range(10)] * 5
    assert data.train_images.flags.c_contiguous
    assert not data.train_images.flags.writeable


def test_cifar_images_are_channel_planes_of_rows(tmp_path: Path) -> None:
    folder = store("cifar10", tmp_path)
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([7, *range(12)]) for _ in range(TEST)))
    data = load("cifar10", tmp_path, verify=False)
    assert data.test_images[0].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert data.test_labels.tolist() == [7] * TEST


def test_the_given_folder_comes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "cache" / "feddd", tmp_path / "variable", tmp_path / "given"]
    monkeypatch.setenv("FEDDD_DATA", str(folders[1]))
    for folder in folders:
        store("mnist", folder)
        images = load("mnist", tmp_path / "given").train_images
        assert isinstance(images, np.memmap)
        assert Path(str(images.filename)).is_relative_to(folder)


def test_an_empty_variable_and_a_relative_cache_are_as_if_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDD_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.search_folders() == [tmp_path / ".cache" / "feddd"]


def test_a_damaged_first_folder_is_reported_not_passed_over(tmp_path: Path) -> None:
    store("mnist", tmp_path / "cache" / "feddd")
    (store("mnist", tmp_path / "given") / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte: is missing"):
        load("mnist", tmp_path / "given")


def test_missing_data_names_the_folders_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDDD_DATA", str(tmp_path / "variable"))
    with pytest.raises(InputError) as caught:
        load("mnist", tmp_path / "given")
    message = str(caught.value)
    assert all(str(tmp_path / folder) in message for folder in ("given", "variable", "cache/feddd"))
    assert "`feddd data fetch mnist`" in message
    assert "\n" not in message


def test_pickled_cifar_is_refused_with_the_way_to_the_binary_version(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(InputError, match=r"pickles are not read.*`feddd data fetch cifar10`.*cifar-10-batches-bin"):
        load("cifar10", tmp_path)
    store("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path).train_images) == TRAIN


def damage(content: bytes, how: str) -> bytes:
    flipped = bytearray(content)
    flipped[3 if how == "header" else -1] ^= 1
    return {"truncated": content[:-1], "longer": content + b"\0", "empty": b""}.get(how, bytes(flipped))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize(
    ("how", "fault"),
    [("truncated", "bytes instead of"), ("longer", "bytes instead of"), ("empty", "has 0 bytes"), ("header", "header")],
)
def test_a_file_of_wrong_size_or_header_is_named(tmp_path: Path, verify: bool, file: str, how: str, fault: str) -> None:
    path = store("mnist", tmp_path) / file
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(InputError, match=fault) as caught:
        load("mnist", tmp_path, verify=verify)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_every_flipped_file_is_refused_by_its_checksum_unless_told_not_to_verify(tmp_path: Path, name: str) -> None:
    folder = store(name, tmp_path)
    for file, content in FILES[name].items():
        (folder / file).write_bytes(damage(content, "flipped"))
        with pytest.raises(InputError, match=f"{file}: has the SHA-256"):
            load(name, tmp_path)
        load(name, tmp_path, verify=False)
        (folder / file).write_bytes(content)
    load(name, tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / datasets.SPECS["mnist"].folder
    folder.mkdir(parents=True)
    os.mkfifo(folder / "train-images-idx3-ubyte")
    with pytest.raises(InputError, match="has 0 bytes instead of"):
        load("mnist", tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    folder = store("mnist", tmp_path)
    (folder / "train-images-idx3-ubyte").unlink()
    (folder / "train-images-idx3-ubyte").mkdir()
    with pytest.raises(InputError, match="train-images-idx3-ubyte: cannot be read"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("MNIST", "'mnist'"),
        ("fashion_mnist", "'fashion-mnist'"),
        ("cifar-10", "'cifar10'"),
        ("FashionMNIST", "'fashion-"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(InputError, match=f"unknown data set '{wrong}'; did you mean {near}"):
        load(wrong)


def test_a_name_like_none_lists_all() -> None:
    with pytest.raises(
        InputError, match="'zzz'; known are mnist, fashion-mnist, cifar10, shakespeare, letters, flights"
    ):
        load("zzz")
    assert datasets.DATASETS[:3] == ("mnist", "fashion-mnist", "cifar10")


def test_the_bundled_data_set_is_balanced_and_needs_no_folder() -> None:
    data = load("fashion-mnist-mini")
    assert data.train_images.shape == (10_000, 1, 28, 28)
    assert data.test_images.shape == (2_000, 1, 28, 28)
    assert np.bincount(data.train_labels).tolist() == [1000] * 10
    assert np.bincount(data.test_labels).tolist() == [200] * 10
    assert data.train_labels[:5].tolist() == [9, 0, 0, 3, 0]  # Fashion-MNIST begins so
    assert 70 < data.train_images.mean() < 76  # Fashion-MNIST's mean is 72.9
    assert not data.train_images.flags.writeable


def test_a_damaged_bundle_says_install_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = datasets.SPECS["fashion-mnist-mini"]
    wrong = dict.fromkeys(spec.sha256, "0" * 64)
    monkeypatch.setitem(datasets.SPECS, "fashion-mnist-mini", Spec("data", "idx", (1, 28, 28), 10_000, 2_000, wrong))
    with pytest.raises(InputError, match=r"has the SHA-256 .* install it again"):
        load("fashion-mnist-mini")
    monkeypatch.setitem(datasets.SPECS, "fashion-mnist-mini", Spec("nowhere", "idx", (1, 28, 28), 1, 1, spec.sha256))
    with pytest.raises(InputError, match="install it again"):
        load("fashion-mnist-mini")


def test_the_bundle_is_small_and_carries_its_licence() -> None:
    folder = Path(datasets.__file__).parent / "data"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    licence = (folder / "LICENSE-fashion-mnist").read_text(encoding="utf-8")
    assert "Copyright © 2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence


def real_folder(name: str) -> Path:
    folder = Path(REAL_DATA) if REAL_DATA else None
    if folder is None or not datasets.holds(REAL_SPECS[name], folder / REAL_SPECS[name].folder):
        pytest.skip(f"needs the real {name} in $FEDDD_DATA (`feddd data fetch {name}`)")
    return folder


@pytest.mark.parametrize(
    ("name", "channel_means"),
    [("mnist", [0.1307]), ("fashion-mnist", [0.2860]), ("cifar10", [0.4914, 0.4822, 0.4465])],
)
def test_real_data_verifies_and_has_the_published_means(
    monkeypatch: pytest.MonkeyPatch, name: str, channel_means: list[float]
) -> None:
    monkeypatch.setattr(datasets, "SPECS", REAL_SPECS)
    data = load(name, real_folder(name))
    assert data.train_images.mean(axis=(0, 2, 3)) / 255 == pytest.approx(channel_means, abs=5e-5)
    assert data.test_images.shape == (10_000, *data.train_images.shape[1:])
    if name != "mnist":
        assert set(np.bincount(data.train_labels)) == {len(data.train_labels) // 10}


def test_the_bundle_is_the_first_of_each_class_of_the_real_fashion_mnist() -> None:
    real, mini = load("fashion-mnist", real_folder("fashion-mnist")), load("fashion-mnist-mini")
    for label in range(10):
        original = real.train_images[np.flatnonzero(real.train_labels == label)[:1000]]
        assert np.array_equal(mini.train_images[mini.train_labels == label], original)
        original = real.test_images[np.flatnonzero(real.test_labels == label)[:200]]
        assert np.array_equal(mini.test_images[mini.test_labels == label], original)


@pytest.mark.slow
def test_the_tool_makes_the_bundle_from_the_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "tools" / "make_fashion_mnist_mini.py"
    spec = importlib.util.spec_from_file_location("make_fashion_mnist_mini", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "OUT", tmp_path)
    monkeypatch.setattr("sys.argv", ["tool", str(real_folder("fashion-mnist"))])
    tool.main()
    for name, digest in datasets.SPECS["fashion-mnist-mini"].sha256.items():
        # The unpacked content: another version of liblzma may pack it differently.
        assert hashlib.sha256(lzma.decompress((tmp_path / f"{name}.xz").read_bytes())).hexdigest() == digest


def test_inputs_are_pixels_standardised_per_channel():
    images = np.stack([np.full((2, 2), 51, np.uint8), np.full((2, 2), 255, np.uint8)])[None]
    none = np.zeros(1, np.int64)
    data = ImageDataset(images, none, images, none, classes=1, mean=(0.2, 0.5), deviation=(0.1, 0.25))
    inputs = data.inputs(images)
    assert inputs.dtype == np.float32
    np.testing.assert_allclose(inputs[0, 0], 0.0, atol=1e-6)
    np.testing.assert_allclose(inputs[0, 1], 2.0, atol=1e-6)


def test_the_stated_mean_and_deviation_are_those_of_the_bundled_images_source():
    data = load("fashion-mnist-mini")
    inputs = data.inputs(data.train_images)
    # The constants are of the full data set; a sixth of it comes close.
    assert abs(float(inputs.mean())) < 0.02
    assert abs(float(inputs.std()) - 1) < 0.02


@pytest.mark.parametrize("name", sorted(synthetic.SHAPES))
def test_synthetic_images_are_standardised_balanced_and_always_the_same(name: str) -> None:
    data = synthetic.make(name)
    assert data.image_shape == synthetic.SHAPES[name]
    assert set(np.bincount(data.train_labels)) == {synthetic.TRAIN // 10}
    inputs = data.inputs(data.train_images)
    assert inputs.mean() == pytest.approx(0.0, abs=1e-3)
    assert inputs.std() == pytest.approx(1.0, abs=1e-2)
    synthetic.make.cache_clear()
    again = synthetic.make(name)
    assert np.array_equal(again.train_images, data.train_images)
    assert np.array_equal(again.test_labels, data.test_labels)


def test_synthetic_test_images_are_no_training_images() -> None:
    data = synthetic.make("synthetic-grey")
    seen = {image.tobytes() for image in data.train_images}
    assert not any(image.tobytes() in seen for image in data.test_images)
