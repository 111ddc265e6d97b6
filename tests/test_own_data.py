"""Data of one's own: every kind of source runs, is divided as asked, and is refused in one line where it is wrong."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import feddd
import own_data
from feddd.cli import app, main
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import build_world, preview
from feddd.simulation.samples import make_samples
from feddd.world.npz import read_npz
from feddd.world.owners import natural
from feddd.world.partitions import partition
from feddd.world.tables import read_table

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def document(**changes: Any) -> dict[str, Any]:
    """Two rounds of FedDD and FedAvg on three classes; sections are merged."""
    made: dict[str, Any] = {
        "rounds": 2,
        "data": {"dataset": "own_data:classes", "partition": "iid"},
        "fleet": {"clients": 4},
        "training": {"batch_size": 8, "learning_rate": 0.05},
        "strategy": [{"name": "feddd"}, {"name": "fedavg"}],
    }
    for key, value in changes.items():
        made[key] = made[key] | value if isinstance(made.get(key), dict) else value
    return made


REGRESSION = {
    "data": {"dataset": "own_data:numbers", "partition": "natural"},
    "task": {"loss": "mse"},
    "model": {"name": "own_data:linear"},
    "fleet": {},
}


def regression(**changes: Any) -> dict[str, Any]:
    made = document(**REGRESSION | changes)
    made["fleet"] = changes.get("fleet", {})
    return made


def rows(results: feddd.Results) -> list[dict[str, Any]]:
    return results.tables["rounds"].to_pylist()


def write_table(path: Path, *, split: bool = False) -> None:
    """Sixty rows: a number, a word, a truth, an owner and two targets."""
    rng = np.random.default_rng(0)
    size = rng.normal(50, 20, 60)
    colour = np.array(["red", "green", "blue"])[rng.integers(0, 3, 60)]
    table = {
        "size": size,
        "colour": colour,
        "new": rng.integers(0, 2, 60).astype(bool),
        "owner": [f"shop {i % 5}" for i in range(60)],
        "kind": np.where(size > 50, "large", "small"),
        "price": size * 2 + 1,
    }
    if split:
        table["split"] = ["test" if i % 4 == 0 else "train" for i in range(60)]
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
        return
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def write_images(folder: Path, size: tuple[int, int] = (8, 8)) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 4)):
        for shade, name in enumerate(("dark", "light")):
            own = folder / part / name
            own.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(100 * shade, 100 * shade + 100, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(own / f"{number}.png")


def test_a_function_with_arguments_is_learnt_from_and_every_worker_count_gives_the_same_bits(tmp_path: Path) -> None:
    experiment = parse_experiment(document(data={"arguments": {"samples": 400}}, rounds=8))
    one, two = (feddd.run(experiment, tmp_path / str(n), workers=n) for n in (1, 2))
    for table in ("rounds", "clients", "classes"):
        assert one.tables[table].equals(two.tables[table])
    assert rows(one)[7]["test_accuracy"] > 0.6
    assert rows(one)[7]["test_metric"] == rows(one)[7]["test_accuracy"]
    assert one.config["training"]["trainer"] == "stacked"
    assert len(one.rows("classes", strategy="feddd", round=8)) == 3


def test_a_dict_of_inputs_reaches_the_model_by_name_and_sequences_are_learnt(tmp_path: Path) -> None:
    changes = {"data": {"dataset": "own_data:tokens", "partition": "natural"}, "task": {"loss": "next-token"}}
    made = document(**changes, model={"name": "own_data:Lines"}, rounds=3) | {"fleet": {}}
    made["training"] = {"batch_size": 8, "learning_rate": 1.0}
    one, two = (feddd.run(parse_experiment(made), tmp_path / str(n), workers=n) for n in (1, 2))
    assert one.tables["rounds"].equals(two.tables["rounds"])
    perplexities = [row["test_metric"] for row in one.rows("rounds", strategy="fedavg")]
    assert 0 < perplexities[-1] < perplexities[0] < 12
    assert all(row["test_accuracy"] is None for row in rows(one))
    assert one.config["fleet"]["clients"] == 5
    assert one.client_name(3) == "3"
    assert one.tables["classes"].num_rows == 0


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_table_is_split_by_its_column_and_its_words_become_columns(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"table.{ending}"
    write_table(path, split=True)
    data = read_table(path, target="kind", client="owner", rng=np.random.default_rng(0))
    assert data.train_inputs.shape == (45, 1 + 3 + 1 + 1)  # size, three colours, new, price
    assert data.test_inputs.shape == (15, 6)
    assert data.class_names == ("large", "small")
    assert data.train_inputs.dtype == np.float32
    np.testing.assert_allclose(data.train_inputs[:, 0].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(data.train_inputs[:, 0].std(), 1, atol=1e-6)
    assert set(data.train_inputs[:, 1:4].sum(1)) == {1.0}
    assert data.clients is not None
    assert sorted(set(data.clients)) == [f"shop {i}" for i in range(5)]
    plain = read_table(path, target="price", standardise=False, classes=False, rng=np.random.default_rng(0))
    assert plain.train_inputs[:, 0].mean() > 30
    assert plain.class_count is None


def test_a_table_beside_the_experiment_runs_and_shows_its_partition(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv")
    (tmp_path / "experiment.toml").write_text(
        'rounds = 2\n[data]\ndataset = "table.csv"\ntarget = "kind"\nclient = "owner"\npartition = "natural"\n'
        "test_share = 0.25\n"
    )
    runner = CliRunner()
    ran = runner.invoke(app, ["run", str(tmp_path / "experiment.toml"), "--out", str(tmp_path / "run"), "--workers=1"])
    assert ran.exit_code == 0, ran.output
    results = feddd.load_results(tmp_path / "run")
    assert results.clients == tuple(f"shop {i}" for i in range(5))
    assert results.classes == ("large", "small")
    assert sum(row["samples"] for row in results.rows("partition")) == 45
    shown = runner.invoke(
        app, ["data", "show", str(tmp_path / "experiment.toml"), "--out", str(tmp_path / "picture.png")]
    )
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_test_rows_of_a_table_follow_from_the_seed(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv")
    section = {"dataset": str(tmp_path / "table.csv"), "target": "kind", "test_share": 0.25}

    def tested(seed: int) -> Any:
        return build_world(parse_experiment(document(data=section, seed=seed))).dataset.test_inputs

    assert np.array_equal(tested(3), tested(3))
    assert not np.array_equal(tested(3), tested(4))


def test_an_npz_is_mapped_where_it_lies_and_gives_the_same_as_the_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    big = rng.normal(size=(3000, 100)).astype(np.float32)
    arrays = {"train_targets": np.arange(3000) % 4, "test_targets": np.arange(10) % 4, "clients": np.arange(3000) % 7}
    np.savez(tmp_path / "plain.npz", train_inputs=big, test_inputs=big[:10], **arrays)
    np.savez_compressed(tmp_path / "packed.npz", train_inputs=big, test_inputs=big[:10], **arrays)
    plain, packed = read_npz(tmp_path / "plain.npz"), read_npz(tmp_path / "packed.npz")
    assert isinstance(plain.train_inputs, np.memmap)
    assert plain.digest() == packed.digest()
    assert np.array_equal(plain.train_inputs, big)
    named = {"train_inputs.a": big, "train_inputs.b": big, "test_inputs.a": big[:10], "test_inputs.b": big[:10]}
    np.savez(tmp_path / "named.npz", **named, **arrays)
    assert read_npz(tmp_path / "named.npz").input_shape == {"a": (100,), "b": (100,)}


def test_a_folder_of_images_is_read_by_class_and_standardised(tmp_path: Path) -> None:
    write_images(tmp_path / "pictures")
    (tmp_path / "experiment.toml").write_text(
        'rounds = 3\n[data]\ndataset = "pictures/"\npartition = "noniid-b"\nclasses_per_client = 1\n'
        "[fleet]\nclients = 4\n[training]\nbatch_size = 4\n"
    )
    experiment = feddd.load_experiment(tmp_path / "experiment.toml")
    data = build_world(experiment, prove=False).dataset
    assert data.train_inputs.shape == (40, 3, 8, 8)
    assert data.class_names == ("dark", "light")
    samples, _ = make_samples(data, np.arange(40))
    seen = samples.between(0, 40)
    assert isinstance(seen, torch.Tensor)
    assert abs(float(seen.mean())) < 1e-4
    assert float(seen.std()) == pytest.approx(1, abs=1e-2)
    results = feddd.run(experiment, tmp_path / "run", workers=1)
    assert rows(results)[2]["test_accuracy"] == 1.0
    assert len(results.rows("partition", label=0)) == 4


def test_images_of_another_size_are_named(tmp_path: Path) -> None:
    write_images(tmp_path)
    from PIL import Image

    Image.new("RGB", (9, 8)).save(tmp_path / "train" / "light" / "wide.png")
    with pytest.raises(feddd.InputError, match=r"train/light/wide.png has 9 × 8 pixels, train/dark/0.png 8 × 8$"):
        build_world(parse_experiment(document(data={"dataset": f"{tmp_path}/"})))


def test_natural_clients_are_the_owners_all_some_or_those_of_a_fleet_file(tmp_path: Path) -> None:
    every = build_world(parse_experiment(regression()))
    assert every.names == tuple(f"owner-{i}" for i in range(6))
    assert [len(part) for part in every.parts] == [30] * 6
    some = build_world(parse_experiment(regression(fleet={"clients": 3}, seed=5)))
    assert some.names == build_world(parse_experiment(regression(fleet={"clients": 3}, seed=5))).names
    assert len(some.names) == 3
    places = [every.names.index(name) for name in some.names]
    assert all(np.array_equal(some.parts[at], every.parts[place]) for at, place in enumerate(places))
    with pytest.raises(feddd.InputError, match=r"fleet.clients is 7, but partition .natural. has 6 owners"):
        build_world(parse_experiment(regression(fleet={"clients": 7})))
    file = tmp_path / "fleet.csv"
    links = "".join(f"owner-{n},{1000 * (n + 1)},5000,{n}\n" for n in (4, 1))
    file.write_text(f"client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds\n{links}")
    chosen = build_world(parse_experiment(regression(fleet={"file": str(file)})))
    assert chosen.names == ("owner-4", "owner-1")
    assert np.array_equal(chosen.parts[0], every.parts[4])
    assert chosen.devices.uplink_bits_per_s.tolist() == [5000, 2000]
    file.write_text(file.read_text().replace("owner-1", "owner-l"))
    with pytest.raises(feddd.InputError, match="client 'owner-l' owns no samples; did you mean 'owner-"):
        build_world(parse_experiment(regression(fleet={"file": str(file)})))


def test_whole_numbers_as_owners_are_sorted_as_numbers() -> None:
    parts, names = natural(np.array([10, 9, 10, 9, 2]), None, None, np.random.default_rng(0))
    assert names == ("2", "9", "10")
    assert [part.tolist() for part in parts] == [[4], [1, 3], [0, 2]]


def test_a_split_of_ones_own_is_used_as_lists_or_as_owners() -> None:
    lists = build_world(parse_experiment(document(data={"partition": "own_data:odd_and_even"})))
    assert [part[:2].tolist() for part in lists.parts] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    owners = build_world(parse_experiment(document(data={"partition": "own_data:by_owner_array"})))
    assert sum(len(part) for part in owners.parts) == 180 - 3


@pytest.mark.parametrize(("alpha", "largest"), [(0.1, 0.3), (1e6, 0.06)])
def test_quantities_are_skewed_as_alpha_says_and_nobody_is_empty(alpha: float, largest: float) -> None:
    parts = partition(np.zeros(1000), 20, "quantity", np.random.default_rng(1), classes=None, alpha=alpha)
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 1000
    assert sizes.min() >= 1
    assert (sizes.max() > largest * 1000) == (alpha < 1)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(1000))


def test_bytes_stay_bytes_and_reach_the_model_between_zero_and_one() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(64, 4)
    data = own_data.classes(train_inputs=images[np.arange(180) % 64], test_inputs=images[:60])
    samples, _ = make_samples(data, np.arange(64))
    assert isinstance(samples.inputs, torch.Tensor)
    assert samples.inputs.dtype == torch.uint8
    seen = samples.between(63, 64)
    assert isinstance(seen, torch.Tensor)
    torch.testing.assert_close(seen[0], torch.tensor([252, 253, 254, 255]) / 255)


def test_a_run_on_data_of_ones_own_resumes_to_the_bit_and_not_with_other_data(tmp_path: Path) -> None:
    code = (HERE / "own_data.py").read_text()
    (tmp_path / "my_problem.py").write_text(code)
    toml = parse_experiment(regression(rounds=4)).to_toml().replace("own_data:", "my_problem:")
    (tmp_path / "experiment.toml").write_text(toml)
    whole = feddd.run(tmp_path / "experiment.toml", tmp_path / "whole", workers=1)

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.record.round == 3 and progress.label == "fedavg":
            raise Stop

    for name in ("half", "changed"):
        with pytest.raises(Stop):
            feddd.run(tmp_path / "experiment.toml", tmp_path / name, workers=1, watch=stop, checkpoint_seconds=0)
    again = feddd.resume(tmp_path / "half", workers=1)
    for table in ("rounds", "clients", "partition"):
        assert again.tables[table].equals(whole.tables[table])
    numbers = sys.modules["my_problem"].numbers
    sys.modules["my_problem"].numbers = lambda: _changed(numbers())  # type: ignore[attr-defined]
    with pytest.raises(feddd.InputError, match=r"cannot be resumed: .*the data or the model's code changed"):
        feddd.resume(tmp_path / "changed", workers=1)


def _changed(data: feddd.Dataset) -> feddd.Dataset:
    data.test_inputs[0, 0] += 1
    return data


def test_data_show_knows_how_many_samples_clients_have_where_there_are_no_classes() -> None:
    table = preview(parse_experiment(regression())).tables["partition"].to_pylist()
    assert [(row["client"], row["label"], row["samples"]) for row in table] == [(n, 0, 30) for n in range(6)]


BAD_DATA = {
    "nan": "test_inputs holds nan in sample 7; all numbers must be finite",
    "infinite": "test_inputs holds inf in sample 7",
    "lengths": "test_inputs has 59 samples, but test_targets 60",
    "shapes": "test_inputs are float32 of shape (3,) per sample, but train_inputs float32 of shape (4,) per sample",
    "types": "test_inputs are int32 of shape (4,)",
    "list": "test_inputs is a list, not an array or a tensor",
    "objects": "test_inputs holds object; inputs are numbers, bytes or booleans",
    "complex": "test_inputs holds complex128",
    "empty": "test_targets is empty",
    "scalar": "test_targets is a single value",
    "unknown class": "train_targets has the class 2; 2 classes are 0 to 1",
    "negative class": "train_targets has the class -1; 3 classes are 0 to 2",
    "unknown name": "test_targets has the class '9', which is not among the training samples",
    "class names": "classes is a str, not a list of names or their number",
    "same names": "classes names 'a' twice",
    "float classes": 'the targets are numbers (float32); loss "cross-entropy" needs whole ones',
    "owners": "clients has the shape (1,); 180 training samples need (180,)",
    "owner kinds": "clients holds float64; owners are names or whole numbers",
    "owner missing": "an owner in clients is missing",
    "dict and array": "test_inputs are a dict of x, but train_inputs one array",
    "key": "train_inputs has the key 'not a name'; keys are the names of the model's arguments",
    "no inputs": "train_inputs is an empty dict",
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_bad_data_is_one_line(kind: str) -> None:
    with pytest.raises(feddd.InputError) as caught:
        build_world(parse_experiment(document(data={"dataset": "own_data:bad", "arguments": {"kind": kind}})))
    assert str(caught.value).startswith("data set 'own_data:bad': ")
    assert BAD_DATA[kind] in str(caught.value)
    assert "\n" not in str(caught.value)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"data": {"dataset": "own_data:nothing"}}, "it returned a NoneType, not a feddd.Dataset"),
    ({"data": {"dataset": "own_data:raising"}}, "FileNotFoundError: the disk is away"),
    ({"data": {"dataset": "own_data:classes", "arguments": {"sample": 3}}}, "unexpected keyword argument 'sample'"),
    ({"data": {"dataset": "own_data:absent"}}, "cannot import 'own_data:absent'"),
    ({"data": {"dataset": "nowhere/table.csv", "target": "x"}}, "there is no such file or folder"),
    ({"data": {"partition": "natural"}}, 'partition "natural" needs the owner of each sample'),
    ({"data": {"partition": "own_data:split_twice"}}, "returned a sample twice"),
    ({"data": {"partition": "own_data:split_empty"}}, "returned nothing for client 1"),
    ({"data": {"partition": "own_data:split_few"}}, "returned 1 parts for 4 clients"),
    ({"data": {"partition": "own_data:split_outside"}}, "returned the sample 1000004; there are 180"),
    ({"data": {"partition": "own_data:split_words"}}, "returned a str, not lists of sample numbers"),
    ({"data": {"partition": "own_data:split_fails"}}, "RuntimeError: no idea"),
    ({"model": {"name": "cnn1"}}, "model 'cnn1' takes images (channels, height, width), not samples of shape (4,)"),
    ({"model": {"name": "own_data:three_numbers"}}, "cannot take inputs of shape (4,)"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD_SETTINGS, ids=[expected for _, expected in BAD_SETTINGS])
def test_what_does_not_fit_is_one_line_on_the_command_line(
    changes: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "experiment.toml").write_text(parse_experiment(document(**changes)).to_toml())
    monkeypatch.setattr(sys, "argv", ["feddd", "run", str(tmp_path / "experiment.toml"), f"--out={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip()
    assert expected in message
    assert "\n" not in message
    assert not (tmp_path / "run").exists()


BAD_TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("a,b\n1,2\n", {"target": "c"}, "it has no column 'c' for target; known are a, b"),
    ("a,b\n1,2\n,3\n", {"target": "b"}, "column 'a' has no value in 1 of 2 rows"),
    ("a,b\n1,2\n2,3\n3,4\n", {"target": "b", "client": "who"}, "it has no column 'who' for client"),
    ("b\n2\n3\n", {"target": "b"}, "it has no columns to learn from"),
    ("a,b\n1,2\n", {"target": "b"}, "1 rows leave nothing to train on"),
    ("a,b,split\n1,2,train\n2,3,validate\n", {"target": "b"}, "column 'split' holds 'validate'; it says train or test"),
    ("a,b,split\n1,2,train\n2,3,test\n", {"target": "b", "test_share": 0.5}, "leave test_share out, or the column"),
    ("a,b\n2020-01-01,2\n2020-01-02,3\n", {"target": "b"}, "column 'a' holds date32[day]"),
    ("a,b\n1,2\n1,2,3\n", {"target": "b"}, "it cannot be read: CSV parse error"),
    ("a,a\n1,2\n", {"target": "a"}, "it has two columns 'a'"),
    ("", {"target": "a"}, "it cannot be read: Empty CSV file"),
]


@pytest.mark.parametrize(("text", "keys", "expected"), BAD_TABLES, ids=[expected for *_, expected in BAD_TABLES])
def test_a_wrong_table_is_one_line(text: str, keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(feddd.InputError) as caught:
        build_world(parse_experiment(document(data={"dataset": str(tmp_path / "table.csv"), **keys})))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_or_incomplete_npz_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("not an archive")
    np.savez(tmp_path / "half.npz", train_inputs=np.zeros((4, 2)))
    parts = {name: np.zeros(4) for name in ("train_inputs", "train_targets", "test_inputs", "test_targets")}
    np.savez(tmp_path / "more.npz", **parts, weights=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", **parts | {"train_inputs": np.array([{}] * 4, dtype=object)})
    for name, expected in (
        ("text", "File is not a zip file"),
        ("half", "it has no array 'train_targets'; it has train_inputs"),
        ("more", "it has an array 'weights'"),
        ("pickle", "holds Python objects, which are not read"),
    ):
        with pytest.raises(feddd.InputError, match=expected):
            read_npz(tmp_path / f"{name}.npz")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"dataset": "mnits"}, "did you mean 'mnist'?"),
        ({"dataset": "table.csv"}, "a table needs the name of its target's column"),
        ({"target": "x"}, "target belongs to a table"),
        ({"dataset": "mnist", "arguments": {"a": 1}}, "arguments belong to a data set of the form"),
        ({"partition": "naturall"}, "did you mean 'natural'?"),
        ({"partition": "iid", "alpha": 1.0}, "alpha belongs to partition dirichlet or quantity"),
    ],
)
def test_wrong_keys_of_data_are_refused_by_name(section: dict[str, Any], expected: str) -> None:
    with pytest.raises(feddd.InputError, match="data") as caught:
        parse_experiment(document(data=section))
    assert expected in str(caught.value)
