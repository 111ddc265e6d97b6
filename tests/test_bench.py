"""The benchmarks: that they run, compare like with like, and say clearly what is wrong with their input."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional

from feddd import FedAvg
from feddd.benchmarks import scale, suite
from feddd.benchmarks.measuring import Figure, Settings, own_script, program, ratio, take_turns, write_work
from feddd.benchmarks.recurrent import next_character_world
from feddd.errors import InputError, RunError
from feddd.experiments.running import build_world
from feddd.simulation.simulator import Simulation
from feddd.world import models
from worlds import experiment


@pytest.fixture(scope="module")
def world():
    return build_world(experiment(data={"partition": "iid"}, training={"learning_rate": 0.1}))


@pytest.fixture(scope="module")
def work(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    module = models.build(world.model, world.dataset.image_shape, world.dataset.classes, seed=world.seed)
    write_work(world, {name: tensor.numpy() for name, tensor in module.state_dict().items()}, folder)
    return folder


def test_a_loop_does_the_same_work_as_our_engine(world, work):
    with Simulation(world, workers=1) as simulation:
        last = list(simulation.run(FedAvg(), 5))[-1].state.model
    model = models.build(world.model, world.dataset.image_shape, world.dataset.classes)
    model.load_state_dict(last)
    images, labels = (torch.from_numpy(np.load(work / f"{name}.npy")) for name in ("images", "labels"))
    ours = float(functional.cross_entropy(model(images), labels).detach())
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "loads", lambda text, loads=json.loads: answers.append(loads(text)) or answers[-1])
        with program(sys.executable, own_script("loop"), str(work)) as step:
            assert all(step() > 0 for _ in range(4))
    # The same rounds with other batches: the losses are those of models that learnt as much.
    assert answers[-1]["loss"] == pytest.approx(ours, rel=0.1)
    assert answers[1]["loss"] > 1.1 * answers[-1]["loss"]


def test_a_program_that_fails_or_is_not_there_is_a_clear_error(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import sys; sys.exit(3)")
    with pytest.raises(RunError, match="broken ended with exit code 3"), program(sys.executable, broken):
        pass
    with pytest.raises(InputError, match="cannot start"), program(tmp_path / "no-python", broken):
        pass


def test_contestants_take_turns_and_ratios_are_medians_of_neighbours():
    order = []
    steps = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert take_turns(steps, 3) == {"a": [1.0, 3.0, 5.0], "b": [2.0, 4.0, 6.0]}
    assert order == list("ababab")
    assert ratio([2.0, 9.0, 8.0], [1.0, 3.0, 4.0]) == 2.0


def test_a_figure_knows_whether_it_was_reached():
    high = Figure("x", "speed", 2.0, "×", 3.0)
    assert high.reached is False
    assert dataclasses.replace(high, limit="at most").reached is True
    assert dataclasses.replace(high, asked=None).reached is None
    assert "| speed | 2 × | at least 3 × | no |" in suite.markdown([high])


def test_throughput_runs_and_leaves_its_files(tmp_path):
    begun = []
    figures = list(suite.run_suite(["throughput"], Settings(rounds=1), begun.append))
    assert begun == ["throughput"]
    assert [figure.what for figure in figures][1:5] == [
        *("selection by importance", "encoding", "decoding", "averaging one client")
    ]
    assert all(figure.measured > 0 for figure in figures)
    json_file, markdown, picture = suite.write_results(figures, tmp_path / "new")
    assert len(json.loads(json_file.read_text())["figures"]) == len(figures)
    assert markdown.read_text().count("\n") == len(figures) + 2
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("names", "peers", "message"),
    [(["engin"], {}, "unknown benchmark 'engin'; did you mean 'engine'"), ([], {"flowr": "x"}, "unknown peer 'flowr'")],
)
def test_unknown_names_are_refused_before_anything_is_measured(names, peers, message):
    with pytest.raises(InputError, match=message):
        next(suite.run_suite(names, Settings(peers=peers), lambda _: None))


@pytest.mark.slow
def test_memory_of_the_average_does_not_grow_with_the_clients(monkeypatch):
    monkeypatch.setattr(scale, "MANY", 400)
    (figure,) = suite.run_suite(["memory"], Settings(), lambda _: None)
    assert figure.what.startswith("averaging 400 clients")
    assert figure.measured < 1.04  # 10 of 250 MB; the 390 models more that it has seen are 916 MB


def test_the_loop_and_our_engine_train_the_same_recurrent_network(tmp_path):
    world = next_character_world("small", 2)
    with Simulation(world, workers=1) as simulation:
        (record,) = simulation.run(FedAvg(), 1)
    assert record.evaluation is not None
    assert set(record.state.model) == set(world.build_model().state_dict())
    write_work(world, {}, tmp_path)
    with program(sys.executable, own_script("torch_loop"), str(tmp_path)) as step:
        assert step() > 0
