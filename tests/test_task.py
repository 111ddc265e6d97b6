"""What is learnt and how it is judged: losses and metrics against loops, and runs that are tested by them."""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional

import feddd
from feddd.experiments.cells import cells
from feddd.experiments.config import parse_experiment
from feddd.experiments.loading import load_experiment
from feddd.experiments.metrics import Metric
from feddd.experiments.report import sentences, write_report
from feddd.experiments.results import load_results, summarise
from feddd.experiments.running import build_world
from feddd.reporting import print_summary
from feddd.simulation.evaluation import evaluate
from feddd.simulation.simulator import Simulation
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.feddd import contribution
from feddd.world.objectives import Objective, make_objective
from test_own_data import document, regression


@pytest.fixture(autouse=True)
def path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_losses_and_metrics_of_sequences_are_those_of_a_loop_that_skips_padding() -> None:
    logits, targets = torch.randn(5, 4, 7), torch.randint(0, 7, (5, 4))
    targets[0, 2:], targets[3, :] = -100, -100
    objective = make_objective("next-token")
    losses, total, count = [], 0.0, 0
    for row, wanted in zip(logits, targets, strict=True):
        each = [-float(row[at].log_softmax(0)[wanted[at]]) for at in range(4) if wanted[at] != -100]
        losses.append(sum(each) / len(each) if each else 0.0)
        total, count = total + sum(each), count + len(each)
    torch.testing.assert_close(objective.losses(logits, targets), torch.tensor(losses))
    found = evaluate(torch.nn.Identity(), {}, logits, targets, 7, objective)
    assert found.metric == pytest.approx(math.exp(total / count), rel=1e-6)
    parts = [evaluate(torch.nn.Identity(), {}, logits[s], targets[s], 7, objective) for s in (slice(2), slice(2, 5))]
    assert (parts[0] + parts[1]).metric == pytest.approx(found.metric, rel=1e-6)
    right = evaluate(torch.nn.Identity(), {}, logits, targets, 7, make_objective("next-token", "accuracy"))
    shares = [
        float((row.argmax(1) == wanted)[wanted != -100].float().mean()) if (wanted != -100).any() else 0.0
        for row, wanted in zip(logits, targets, strict=True)
    ]
    assert right.metric == pytest.approx(sum(shares) / 5)


def test_pixels_have_classes_too() -> None:
    logits, targets = torch.randn(3, 5, 2, 2), torch.randint(0, 5, (3, 2, 2))
    plain = functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(Objective().losses(logits, targets), plain.mean((1, 2)))
    values, _ = Objective().measure(logits, targets)
    torch.testing.assert_close(values, (logits.argmax(1) == targets).double().mean((1, 2)))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3)])
def test_errors_of_numbers_are_those_of_a_loop(shape: tuple[int, ...]) -> None:
    outputs, targets = torch.randn(shape), torch.randn(6 if shape == (6, 1) else shape)
    flat, wanted = outputs.reshape(6, -1).numpy(), targets.reshape(6, -1).numpy()
    squared, absolute = make_objective("mse", "r2"), make_objective("mse", "mae")
    torch.testing.assert_close(squared.losses(outputs, targets), torch.tensor(((flat - wanted) ** 2).mean(1)))
    found = evaluate(torch.nn.Identity(), {}, outputs, targets, None, absolute)
    assert found.metric == pytest.approx(float(np.abs(flat - wanted).mean()), rel=1e-6)
    found = evaluate(torch.nn.Identity(), {}, outputs, targets, None, squared)
    expected = 1 - ((flat - wanted) ** 2).sum() / ((wanted - wanted.mean(0)) ** 2).sum()
    assert found.metric == pytest.approx(float(expected), rel=1e-5)
    assert found.accuracy is None


def test_a_regression_is_learnt_and_spoken_of_by_its_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = regression(rounds=12, targets=[3.0, 1.0, 0.0001], training={"batch_size": 8, "learning_rate": 0.05})
    results = feddd.run(parse_experiment(made), tmp_path / "run", workers=1)
    errors = [row["test_metric"] for row in results.rows("rounds", strategy="fedavg")]
    assert errors[-1] < 0.5 < errors[0]
    assert results.config["training"]["trainer"] == "batched"
    assert results.config["task"] == {
        **{"loss": "mse", "metric": "mae", "higher_is_better": False, "evaluate_clients": False}
    }
    found = results.summary["strategies"]["fedavg"]
    assert results.summary["metric"] == {"name": "mae", "higher_is_better": False}
    assert found["final_metric"] == errors[-1]
    assert found["best_metric"] == min(errors)
    assert found["final_accuracy"] is found["best_accuracy"] is None
    assert found["time_to_accuracy"] == []
    for entry in found["time_to_target"]:
        first = next(
            (row for row in results.rows("rounds", strategy="fedavg") if row["test_metric"] <= entry["target"]), None
        )
        assert entry["seconds"] == (first["clock_seconds"] if first else None)
    assert found["time_to_target"][2]["seconds"] is None
    print_summary(results)
    printed = capsys.readouterr().out
    assert "mae" in printed
    assert "accuracy" not in printed
    assert "No strategy reached mae 0.0001." in printed
    (said,) = sentences([results])
    assert re.search(r"reached mae 1 in \d+\.\d\d × fedavg's time", said)
    assert "Final test mae: feddd 0." in said
    page = write_report([results], tmp_path / "report.html").read_text(encoding="utf-8")
    head = page[: page.index('<script type="application/json"')]
    assert "<h2>Test mae</h2>" in head
    assert "final mae" in head


def test_r2_and_a_loss_of_ones_own_with_a_metric_of_ones_own_run(tmp_path: Path) -> None:
    training = {"batch_size": 8, "learning_rate": 0.05}
    r2 = regression(task={"loss": "mse", "metric": "r2"}, rounds=6, training=training)
    assert (
        feddd.run(parse_experiment(r2), tmp_path / "r2", workers=1).summary["strategies"]["feddd"]["final_metric"] > 0.9
    )
    own = {"loss": "own_data:huber", "metric": "own_data:near", "higher_is_better": True}
    made = parse_experiment(regression(task=own, rounds=25, training=training | {"learning_rate": 0.3}, targets=[0.9]))
    results = feddd.run(made, tmp_path / "own", workers=1)
    assert results.metric == Metric("near", True)
    shares = [row["test_metric"] for row in results.rows("rounds", strategy="feddd")]
    assert shares[-1] > 0.9 > shares[0]
    assert results.summary["strategies"]["feddd"]["time_to_target"][0]["seconds"] is not None


def test_several_numbers_may_be_predicted_at_once(tmp_path: Path) -> None:
    made = regression(data={"dataset": "own_data:numbers", "partition": "natural", "arguments": {"outputs": 3}})
    made["model"] = {"name": "own_data:three_numbers"}
    assert feddd.run(parse_experiment(made), tmp_path / "run", workers=1).tables["rounds"].num_rows == 4


def test_the_metric_of_every_client_is_that_on_its_own_samples_and_the_worst_tenth_is_told(tmp_path: Path) -> None:
    task = {"loss": "mse", "evaluate_clients": True}
    made = parse_experiment(regression(task=task, rounds=2))
    one, two = (feddd.run(made, tmp_path / str(n), workers=n) for n in (1, 2))
    assert one.tables["client_metrics"].equals(two.tables["client_metrics"])
    assert one.tables["client_metrics"].num_rows == 2 * 2 * 6
    world = build_world(made)
    with Simulation(world, workers=1) as simulation:
        *_, last = simulation.run(FedAvg(), 2)
    weight, bias = (last.state.model[name].numpy() for name in ("weight", "bias"))
    expected = []
    for part in world.parts:
        outputs = world.dataset.train_inputs[part] @ weight[0] + bias
        expected.append(float(np.abs(outputs - world.dataset.train_targets[part]).mean()))
    rows = one.rows("client_metrics", strategy="fedavg", round=2)
    assert [row["metric"] for row in rows] == pytest.approx(expected, rel=1e-4)
    worst = one.summary["strategies"]["fedavg"]["worst_tenth_of_clients"]
    assert worst == pytest.approx(max(expected), rel=1e-4)
    assert "mae of the worst tenth of clients" in (tmp_path / "1" / "report.html").read_text(encoding="utf-8")


def test_the_worst_tenth_is_at_least_one_client_and_goes_the_metrics_way() -> None:
    values = [float(n) for n in range(20)]
    assert Metric("accuracy", True).worst_tenth(values) == 0.5
    assert Metric("mae", False).worst_tenth(values) == 18.5
    assert Metric("mae", False).worst_tenth([4.0, 9.0]) == 9.0
    assert Metric().worst_tenth([]) is None


def test_without_classes_no_label_coverage_enters_the_contribution() -> None:
    world = build_world(parse_experiment(regression()))
    assert world.label_counts() is None
    with Simulation(world, workers=1) as simulation:
        (record,) = simulation.run(FedAvg(), 1)
        assert np.isnan(record.state.label_coverage).all()
        expected = record.state.samples / record.state.samples.sum() * record.state.losses
        np.testing.assert_allclose(contribution(record.state, simulation.fleet), expected)


def test_a_trainer_with_gradients_of_cross_entropy_is_refused_for_another_loss() -> None:
    with pytest.raises(feddd.InputError, match=r'trainer "stacked" does not fit: it is for the loss cross-entropy'):
        build_world(parse_experiment(regression(training={"trainer": "stacked"}, model={"name": "mlp"})))


BAD_FUNCTIONS = [
    ("loss", "own_data:mean_loss", "returned torch.float32 of shape () for 2 samples, not one float each"),
    ("loss", "own_data:squeezed", "returned torch.float32 of shape () for 1 samples, not one float each"),
    ("loss", "own_data:detached", "has no gradient"),
    ("loss", "own_data:failing", "fails on outputs of model 'own_data:linear': KeyError: 'a bug\\nof two lines'"),
    ("metric", "own_data:mean_loss", "returned torch.float32 of shape ()"),
    ("metric", "own_data:absent", "cannot import 'own_data:absent'"),
]


@pytest.mark.parametrize(("key", "path", "expected"), BAD_FUNCTIONS)
def test_a_wrong_loss_or_metric_is_one_line(key: str, path: str, expected: str) -> None:
    task = {"loss": "own_data:huber", "metric": "own_data:near", "higher_is_better": True} | {key: path}
    with pytest.raises(feddd.InputError) as caught:
        build_world(parse_experiment(regression(task=task)))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_negative_loss_is_fine_for_fedavg_and_one_line_for_feddd(tmp_path: Path) -> None:
    task = {"loss": "own_data:below_zero", "metric": "own_data:near", "higher_is_better": True}
    made = regression(task=task, strategy=[{"name": "fedavg"}])
    assert feddd.run(parse_experiment(made), tmp_path / "fedavg", workers=1).rows("rounds")[1]["train_loss"] < 0
    with pytest.raises(feddd.InputError, match=r"a client's loss is -9.*FedDD weighs clients by losses"):
        feddd.run(parse_experiment(regression(task=task)), tmp_path / "feddd", workers=1)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"loss": "mse", "metric": "accuracy"}, "metric 'accuracy' does not go with loss 'mse'; take mae or r2"),
        ({"loss": "msee"}, "did you mean 'mse'?"),
        ({"metric": "maee"}, "did you mean 'mae'?"),
        ({"loss": "my:loss"}, "a loss of your own needs a metric"),
        ({"metric": "my:metric"}, "a metric of your own needs higher_is_better = true or false"),
        ({"loss": "mse", "higher_is_better": True}, "higher_is_better is false for the metric 'mae'"),
        ({"losss": "mse"}, "did you mean 'loss'?"),
    ],
)
def test_a_wrong_task_is_refused_by_name(task: dict[str, Any], expected: str) -> None:
    with pytest.raises(feddd.InputError, match="task") as caught:
        parse_experiment(document(task=task))
    assert expected in str(caught.value)


def test_targets_are_in_the_unit_of_the_metric() -> None:
    assert parse_experiment(regression()).targets == ()
    assert parse_experiment(regression(targets=[-5, 100.0])).targets == (-5, 100)
    assert parse_experiment(document(task={"loss": "cross-entropy"})).targets == (0.8, 0.85, 0.88, 0.9)
    with pytest.raises(feddd.InputError, match="an accuracy lies above 0 and is at most 1, not 5"):
        parse_experiment(document(targets=[5]))
    with pytest.raises(feddd.InputError, match="targets"):
        parse_experiment(regression(targets=[math.inf]))


def test_a_task_that_says_the_default_is_the_same_experiment_as_none() -> None:
    plain, said = parse_experiment(document()), parse_experiment(document(task={"metric": "accuracy"}))
    assert plain == said
    assert "task" not in plain.to_toml()
    other = parse_experiment(regression(task={"loss": "mse"}))
    assert parse_experiment(tomllib.loads(other.to_toml())) == other


KEPT = [
    ("quickstart", "feddd, 4 bits", "fashion-mnist-mini-noniid-b-mlp/feddd-seed-1-1892f8a69b59"),
    ("mnist-noniid-b", "feddd", "mnist-noniid-b-mlp/feddd-seed-1-7ac2ff1ef160"),
    ("cifar10-iid", "fedavg", "cifar10-iid-cnn2/fedavg-seed-1-9d92da19da23"),
]


def test_the_keys_of_kept_cells_are_what_they_were() -> None:
    for name, label, folder in KEPT:
        found = {cell.label: cell.folder for cell in cells(load_experiment(name), [1])}
        assert found[label] == folder


def test_tables_from_before_are_read_as_accuracies(tmp_path: Path) -> None:
    results = feddd.run(parse_experiment(document(targets=[0.2])), tmp_path / "run", workers=1)
    path = tmp_path / "run" / "rounds.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["test_metric"]), path)
    older = load_results(tmp_path / "run")
    assert older.tables["rounds"].equals(results.tables["rounds"])
    assert summarise(older) == json.loads((tmp_path / "run" / "summary.json").read_text())
