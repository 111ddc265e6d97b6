"""Text and tables that are fetched: how their files are read, the networks for text, and a run of every preset."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

import feddd
from feddd import load_experiment
from feddd.errors import InputError
from feddd.experiments.running import build_world
from feddd.world import datasets
from feddd.world.models import build, known, widths
from feddd.world.problems import LEAST_WINDOWS, PROBLEMS, WINDOW, flights, letters, shakespeare

TOKENS = 30


def write_speeches(folder: Path, said: Iterable[tuple[str, str, str]]) -> Path:
    lines = [json.dumps({"play": play, "speaker": speaker, "text": text}) for play, speaker, text in said]
    (folder / "speeches.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def text(characters: int, seed: int) -> str:
    return "".join(np.random.default_rng(seed).choice(list("abcdefg hij"), characters))


# Shakespeare


def test_windows_belong_to_whoever_speaks_and_targets_are_one_character_later(tmp_path: Path) -> None:
    long, short = text(25 * WINDOW + 1, 1), text(LEAST_WINDOWS * WINDOW + 1, 2)
    said = [("lear", "Fool", short), ("hamlet", "Hamlet", long[:500]), ("hamlet", "Hamlet", long[501:])]
    data = shakespeare(write_speeches(tmp_path, said))
    assert isinstance(data.train_inputs, np.ndarray)
    assert data.train_inputs.shape == (23 + 9, WINDOW) == data.train_targets.shape
    assert data.clients is not None
    assert data.clients.tolist() == ["hamlet: Hamlet"] * 23 + ["lear: Fool"] * 9
    assert np.array_equal(data.train_inputs[:, 1:], data.train_targets[:, :-1])
    letters_by_number = np.array(data.class_names)
    read = "".join(letters_by_number[data.train_inputs[:23].ravel()])
    assert read == (long[:500] + "\n" + long[501:])[: 23 * WINDOW]  # speeches of one speaker follow one another
    assert data.class_names == tuple(sorted(set("\nabcdefg hij")))


def test_what_is_tested_is_the_end_of_what_each_one_says_and_trained_by_nobody(tmp_path: Path) -> None:
    said = [("lear", speaker, text(40 * WINDOW + 30, seed)) for seed, speaker in enumerate(("Fool", "Kent", "Lear"))]
    data = shakespeare(write_speeches(tmp_path, said))
    assert isinstance(data.train_inputs, np.ndarray)
    assert isinstance(data.test_inputs, np.ndarray)
    assert (len(data.train_inputs), len(data.test_inputs)) == (3 * 36, 3 * 4)
    trained = {row.tobytes() for row in data.train_targets}
    assert not trained & {row.tobytes() for row in data.test_targets}
    alphabet = np.array(data.class_names)
    for place, (_, _, words) in enumerate(said):
        tested = "".join(alphabet[data.test_inputs[4 * place : 4 * place + 4].ravel()])
        assert tested == words[36 * WINDOW : 40 * WINDOW]
        assert words[36 * WINDOW + 1 : 40 * WINDOW] not in words[: 36 * WINDOW + 1]


def test_who_says_little_is_left_out_and_one_name_in_two_plays_is_two_speakers(tmp_path: Path) -> None:
    enough = LEAST_WINDOWS * WINDOW + 1
    said = [
        ("lear", "Kent", text(enough, 1)),
        ("macbeth", "Kent", text(enough, 2)),
        ("lear", "Boy", text(enough - 1, 3)),
    ]
    data = shakespeare(write_speeches(tmp_path, said))
    assert data.clients is not None
    assert set(data.clients.tolist()) == {"lear: Kent", "macbeth: Kent"}
    assert len(data.test_targets) == 2


# Letters and flights


def test_letters_are_standardised_by_those_that_are_trained_on(tmp_path: Path) -> None:
    rng, names = np.random.default_rng(0), list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    rows = rng.integers(0, 16, (16_010, 2))
    rows[16_000:] = 1000  # of no influence
    kinds = [names[n % 26] for n in range(len(rows))]
    table = "\n".join(f"{kind},{one},{two}" for kind, (one, two) in zip(kinds, rows.tolist(), strict=True))
    (tmp_path / "letters.csv").write_text(f"lettr,x.box,y.box\n{table}\n")
    data = letters(tmp_path)
    assert isinstance(data.train_inputs, np.ndarray)
    assert isinstance(data.test_inputs, np.ndarray)
    assert (data.train_inputs.shape, data.test_inputs.shape) == ((16_000, 2), (10, 2))
    assert data.train_inputs.mean(0) == pytest.approx([0, 0], abs=1e-5)
    assert data.train_inputs.std(0) == pytest.approx([1, 1], abs=1e-5)
    assert data.test_inputs.min() > 100
    assert data.class_names == tuple(names)
    assert data.train_targets[:27].tolist() == [*range(26), 0]
    assert data.clients is None


def test_flights_that_never_arrived_are_left_out_and_every_tenth_is_tested(tmp_path: Path) -> None:
    header = "year,month,day,dep_delay,arr_delay,carrier,origin,distance,hour\n"
    rows = [
        f"2013,{1 + n % 12},{1 + n % 31},{n},{n + 6},{'UA' if n % 3 else 'AA'},EWR,1500,{n % 24}" for n in range(40)
    ]
    rows[5] = "2013,1,1,NA,NA,UA,LGA,100,5"
    rows[6] = "2013,1,1,9,NA,UA,JFK,100,5"
    (tmp_path / "flights.csv").write_text(header + "\n".join(rows) + "\n")
    data = flights(tmp_path)
    assert isinstance(data.train_inputs, np.ndarray)
    assert isinstance(data.test_inputs, np.ndarray)
    flown = [n for n in range(40) if n not in (5, 6)]
    tested = [n for place, n in enumerate(flown) if place % 10 == 9]
    trained = [n for n in flown if n not in tested]
    assert data.train_inputs.shape == (len(trained), 3 + 4 + 1)  # both airports are gone with their flights
    assert data.test_targets == pytest.approx([(n + 6) / 60 for n in tested])
    assert data.train_targets == pytest.approx([(n + 6) / 60 for n in trained])
    assert data.train_inputs[:, 0] == pytest.approx([n / 60 for n in trained])
    assert data.clients is not None
    assert data.clients.tolist() == ["UA" if n % 3 else "AA" for n in trained]
    turned = data.train_inputs[:, 3:7]
    assert (turned[:, :2] ** 2 + turned[:, 2:] ** 2).ravel() == pytest.approx(1)
    assert data.class_count is None


# Networks for text


@pytest.mark.parametrize("name", ["lstm", "transformer", "lstm/2", "transformer/2"])
def test_a_network_for_text_tells_the_next_token_from_those_before(name: str) -> None:
    model = build(name, (12,), TOKENS).eval()
    before = torch.from_numpy(np.random.default_rng(0).integers(0, TOKENS, (3, 12)))
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % TOKENS
    with torch.no_grad():
        first, second = model(before), model(after)
    assert first.shape == (3, 12, TOKENS)
    torch.testing.assert_close(first[:, :7], second[:, :7])
    assert not torch.allclose(first[:, 7], second[:, 7])
    assert not torch.allclose(first[:, -1], second[:, -1])


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_half_of_a_network_for_text_is_narrower_and_the_same_for_one_seed(name: str) -> None:
    whole, half, again = (build(one, (12,), TOKENS, seed=4) for one in (name, f"{name}/2", f"{name}/2"))
    sizes = [sum(tensor.numel() for tensor in model.parameters()) for model in (whole, half)]
    assert sizes[1] < 0.6 * sizes[0]
    assert known(f"{name}/2")
    assert widths(name) == 1
    for key, tensor in half.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key])


@pytest.mark.parametrize("name", ["lstm", "transformer/2"])
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((12,), None)])
def test_what_is_no_sequence_of_tokens_is_refused_in_one_line(
    name: str, shape: tuple[int, ...], classes: int | None
) -> None:
    with pytest.raises(InputError, match=f"model '{name}' takes sequences of tokens") as caught:
        build(name, shape, classes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
@pytest.mark.parametrize("task", [[], ['task.loss="next-token"']])
def test_pictures_for_a_network_for_text_are_refused_in_one_line(name: str, task: list[str]) -> None:
    experiment = load_experiment("quickstart", ["fleet.clients=4", "data.train_limit=100", f"model.name={name}", *task])
    with pytest.raises(InputError) as caught:
        build_world(experiment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_numbers_for_a_network_for_text_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("x,y,kind\n" + "".join(f"{n}.5,{-n},{'ab'[n % 2]}\n" for n in range(40)))
    changes = [f'data.dataset="{tmp_path / "table.csv"}"', 'data.target="kind"', "data.test_share=0.2"]
    changes += ["data.partition=iid", "fleet.clients=4", f"model.name={name}"]
    with pytest.raises(InputError) as caught:
        build_world(load_experiment("quickstart", changes))
    assert "\n" not in str(caught.value)


# Presets


SMOKE = {
    "shakespeare-lstm": ["fleet.clients=5", "data.train_limit=2000", "model.name=lstm/8"],
    "shakespeare-transformer": ["fleet.clients=5", "data.train_limit=2000", "model.name=transformer/4"],
    "letters": ["fleet.clients=40", "data.train_limit=600"],
    "flights": ["data.train_limit=3000"],
}


def test_every_problem_has_a_preset_with_the_five_methods() -> None:
    experiments = {name: load_experiment(name) for name in SMOKE}
    assert {one.data.dataset for one in experiments.values()} == set(PROBLEMS)
    labels = ["feddd", "feddd, 4 bits", "fedavg", "fedcs", "oort"]
    assert all([strategy.label for strategy in one.strategy] == labels for one in experiments.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_a_preset_beyond_pictures_runs_two_rounds(name: str, tmp_path: Path) -> None:
    experiment = load_experiment(name, ["rounds=2", "evaluate_every=2", *SMOKE[name]])
    spec, folder = datasets.spec_of(experiment.data.dataset), os.environ.get("FEDDD_DATA")
    if not folder or not datasets.holds(spec, Path(folder) / spec.folder):
        pytest.skip(f"needs {experiment.data.dataset} in $FEDDD_DATA (`feddd data fetch {experiment.data.dataset}`)")
    results = feddd.run(experiment, tmp_path / "run", workers=1)
    assert results.labels == [strategy.label for strategy in experiment.strategy]
    for label in results.labels:
        rows = results.rows("rounds", strategy=label)
        assert [row["round"] for row in rows] == [1, 2]
        assert np.isfinite(rows[-1]["test_metric"])
        assert (rows[-1]["test_accuracy"] is None) == (name != "letters")
