"""The paper's figures: cells, scales, statistics, measures, claims, the theorem and the motivation."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import feddd
from feddd.errors import InputError
from feddd.experiments.cells import Cell, Store, cells
from feddd.experiments.checkpoints import FORMAT
from feddd.experiments.config import Experiment, parse_experiment
from feddd.experiments.loading import load_experiment
from feddd.experiments.presets import presets
from feddd.experiments.results import SCHEMAS, Results
from feddd.experiments.statistics import difference, estimate, saving
from feddd.paper import measures, theorem
from feddd.paper.catalogue import FIGURES, LEARNING_RATES, figure_named
from feddd.paper.claims import CLAIMS
from feddd.paper.motivation import _mixture, loss_by_width
from feddd.paper.panels import Need, Panel, read_panel
from feddd.paper.reproduce import Request, draw
from feddd.paper.scales import SCALES, scaled
from feddd.paper.tables import as_markdown, exchange_table, panel_table
from feddd.simulation.simulator import RoundRecord
from feddd.world import models, synthetic
from feddd.world.problems import PROBLEMS

ROOT = Path(__file__).parents[1]


def tiny(*strategies: dict[str, Any], **change: Any) -> Experiment:
    document = {
        "name": "tiny",
        "rounds": 2,
        "data": {"dataset": "fashion-mnist-mini", "partition": "noniid-b", "train_limit": 150},
        "fleet": {"clients": 4},
        "strategy": list(strategies) or [{"name": "feddd"}, {"name": "fedavg"}],
        "targets": (0.05, 0.99),
        **change,
    }
    return parse_experiment(document)


def made_up(curves: dict[str, list[list[float]]], seconds: dict[str, float], **change: Any) -> Panel:
    """A panel with these accuracies, [seeds][rounds] per label, in rounds that take these seconds."""
    experiment = tiny(*({"name": "feddd", "label": label} for label in curves), **change)
    experiment = experiment.model_copy(update={"rounds": len(next(iter(curves.values()))[0])})
    runs = []
    for seed in range(len(next(iter(curves.values())))):
        rows = [
            dict.fromkeys(SCHEMAS["rounds"].names)
            | {"strategy": label, "seed": seed, "round": number + 1, "test_accuracy": accuracy}
            | {"clock_seconds": seconds[label] * (number + 1), "upload_bytes": 5, "download_bytes": 5}
            for label, seeds in curves.items()
            for number, accuracy in enumerate(seeds[seed])
        ]
        tables = {name: schema.empty_table() for name, schema in SCHEMAS.items()}
        tables["rounds"] = pa.Table.from_pylist(rows, schema=SCHEMAS["rounds"])
        runs.append(Results(Path(f"run-{seed}"), {}, {}, {}, tables))
    return Panel(experiment, tuple(runs))


# Statistics


def test_an_estimate_is_students_interval_around_the_mean() -> None:
    found = estimate([1.0, 2.0, 6.0])
    # mean 3, deviation √7, and the 97.5 % point of Student's t with 2 degrees of freedom is 4.302653
    half = 4.302653 * math.sqrt(7) / math.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), rel=1e-6)


def test_an_interval_ends_where_its_quantity_does() -> None:
    found = estimate([90.0, 99.0, 60.0], (0.0, 100.0))
    free = estimate([90.0, 99.0, 60.0])
    assert free.high is not None
    assert free.high > 100.0
    assert (found.mean, found.low, found.high) == (free.mean, free.low, 100.0)


def test_one_seed_has_no_interval() -> None:
    assert (estimate([2.5]).low, estimate([2.5]).high) == (None, None)


def test_a_saving_pairs_seeds_and_takes_the_mean_of_the_logarithms() -> None:
    found = saving([10.0, 40.0], [100.0, 100.0])
    assert found.mean == pytest.approx(80.0)  # √(0.1 · 0.4) = 0.2
    assert found.values == pytest.approx((90.0, 60.0))
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.mean < found.high < 100.0
    assert saving([30.0, 60.0], [100.0, 200.0]).low == pytest.approx(70.0)  # equal ratios leave no doubt


def test_differences_are_paired_by_seed() -> None:
    found = difference([90.0, 80.0], [89.0, 79.0])
    assert (found.mean, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


# Cells


def test_a_strategy_is_the_same_cell_wherever_it_is_asked_for() -> None:
    methods, rules, budgets = (
        load_experiment(name) for name in ("mnist-noniid-b", "mnist-noniid-b-selectors", "mnist-noniid-b-budgets")
    )
    folders = [
        next(cell.folder for cell in cells(experiment, [0]) if cell.label == label)
        for experiment, label in ((methods, "feddd"), (rules, "importance"), (budgets, "feddd 60 %"))
    ]
    assert len(set(folders)) == 1


@pytest.mark.parametrize(
    "change",
    [
        "seed=1",
        "rounds=3",
        "data.partition=iid",
        "training.learning_rate=0.02",
        "model.output=softmax",
        "fleet.clients=5",
        "strategy.feddd.budget=0.5",
        "strategy.feddd.selector=random",
        "strategy.feddd.broadcast_later=[[2, 1]]",
    ],
)
def test_everything_that_moves_the_tables_moves_the_cell(change: str) -> None:
    plain, moved = (load_experiment("mnist-noniid-b", changes) for changes in ([], [change]))
    assert cells(plain, [plain.seed])[0].folder != cells(moved, [moved.seed])[0].folder


def test_cells_that_were_kept_before_are_found() -> None:
    kept = Store(ROOT / "docs" / "results" / "cells")
    for name in ("mnist-noniid-b", "fashion-mnist-noniid-b"):
        first = cells(load_experiment(name), [0])[0]
        assert kept.has(first), f"{first.folder}: a new setting must not move the cells of experiments without it"


def test_names_labels_and_targets_do_not_move_the_cell() -> None:
    plain = load_experiment("mnist-noniid-b")
    moved = load_experiment("mnist-noniid-b", ["name=other", "targets=[0.1]", "strategy.feddd.label=mine"])
    assert cells(plain, [0])[0].folder == cells(moved, [0])[0].folder


def test_cells_together_are_the_run_they_were_taken_from(tmp_path: Path) -> None:
    experiment = tiny({"name": "feddd", "label": "a"}, {"name": "fedcs"}, {"name": "oort"})
    whole = feddd.run(experiment, tmp_path / "run", workers=1)
    store = Store(tmp_path / "cells")
    assert len(list(store.run(cells(experiment, [0]), workers=1))) == 3
    combined = store.combine(experiment, 0)
    for name in ("rounds", "clients", "classes", "partition"):
        assert combined.tables[name].equals(whole.tables[name]), name


def test_interrupted_work_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    experiment = tiny()
    store = Store(tmp_path)
    running = store.run(cells(experiment, [0]), workers=1)
    first = next(running)
    running.close()
    assert store.has(first)
    assert [cell.label for cell in store.missing(cells(experiment, [0]))] == ["fedavg"]
    # What lies there under another name, and is not an interrupted run of this cell, is of no use.
    (left,) = store.missing(cells(experiment, [0]))
    partial = tmp_path / f"{left.folder}.partial"
    partial.mkdir()
    (partial / "rounds.parquet").write_text("half", encoding="utf-8")
    assert not store.has(left)
    assert [cell.label for cell in store.run(cells(experiment, [0]), workers=1)] == ["fedavg"]
    assert store.missing(cells(experiment, [0])) == []
    assert not partial.exists()


def test_a_cell_that_was_cut_off_goes_on_from_its_checkpoint_and_ends_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    experiment = tiny({"name": "feddd"}).model_copy(update={"rounds": 5})
    (cell,) = cells(experiment, [0])
    whole = Store(tmp_path / "whole")
    list(whole.run([cell], workers=1))

    def stop(_: Cell, record: RoundRecord) -> None:
        if record.round == 4:
            raise KeyboardInterrupt

    store, seen = Store(tmp_path / "cut", checkpoint_seconds=0.0), list[int]()
    with pytest.raises(KeyboardInterrupt):
        list(store.run([cell], workers=1, watch=stop))
    assert not store.has(cell)
    list(store.run([cell], workers=1, watch=lambda _, record: seen.append(record.round)))
    assert seen == [4, 5]
    for name in ("rounds", "clients", "classes", "partition"):
        assert store.combine(experiment, 0).tables[name].equals(whole.combine(experiment, 0).tables[name]), name
    assert sorted(path.name for path in (store.folder / cell.folder).iterdir()) == sorted(
        path.name for path in (whole.folder / cell.folder).iterdir()
    )


def test_a_cell_that_another_version_began_is_refused_and_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(tiny({"name": "feddd"}).model_copy(update={"rounds": 5}), [0])

    def stop(_: Cell, record: RoundRecord) -> None:
        if record.round == 4:
            raise KeyboardInterrupt

    store = Store(tmp_path, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        list(store.run([cell], workers=1, watch=stop))
    kept = sorted(tmp_path.rglob("*.safetensors"))
    monkeypatch.setattr("feddd.experiments.checkpoints.FORMAT", FORMAT + 1)
    with pytest.raises(InputError, match=f"has checkpoint format {FORMAT}, and this version reads {FORMAT + 1}"):
        list(store.run([cell], workers=1))
    assert kept == sorted(tmp_path.rglob("*.safetensors"))
    assert kept


def test_what_was_not_run_yet_is_empty_in_the_combined_run(tmp_path: Path) -> None:
    experiment = tiny()
    store = Store(tmp_path)
    next(store.run(cells(experiment, [0]), workers=1))
    panel = read_panel(store, Need(experiment, (0, 1)))
    assert len(panel.finished("feddd")) == 1
    assert panel.finished("fedavg") == []
    assert panel_table(panel)[2][:2] == ["fedavg", "not run"]


# Scales and the catalogue


def test_full_is_the_preset() -> None:
    for name in presets():
        assert scaled(load_experiment(name), SCALES["full"]) == load_experiment(name)


def test_small_keeps_the_ratios_of_the_widths() -> None:
    experiment = scaled(load_experiment("heterogeneous-b-iid"), SCALES["small"])
    assert experiment.model.name == "heterogeneous-b/4"
    full, quarter = (
        [models.build(name, (3, 32, 32), 10, width)[0].out_channels for width in range(5)]  # type: ignore[index]
        for name in ("heterogeneous-b", experiment.model.name)
    )
    assert [4 * channels for channels in quarter] == full


def test_small_heterogeneous_clients_have_as_many_images_as_the_papers() -> None:
    experiment = scaled(load_experiment("heterogeneous-a-noniid-b"), SCALES["small"])
    assert experiment.data.train_limit == 500 * experiment.fleet.clients
    assert experiment.fleet.clients % models.widths(experiment.model.name) == 0
    assert experiment.rounds == 30
    assert scaled(load_experiment("cifar10-noniid-b"), SCALES["small"]).fleet.clients == 25


def test_a_schedule_turns_as_early_in_a_shorter_run() -> None:
    experiment = load_experiment("cifar10-iid-broadcast")
    small = scaled(experiment, SCALES["small"])
    assert experiment.rounds == 100
    assert small.rounds == 40
    assert small.strategy[-1].options["broadcast_later"] == ((20, 5), (32, 1))


def test_every_preset_of_the_simulator_belongs_to_a_figure() -> None:
    used = {preset for figure in FIGURES for preset in figure.presets}
    assert used == set(used_presets())


def test_every_data_set_has_one_learning_rate() -> None:
    rates: dict[str, set[tuple[float, int, int]]] = {}
    for name in presets():
        experiment = load_experiment(name)
        if name == "quickstart" or experiment.data.dataset in PROBLEMS:
            continue
        training = experiment.training
        rates.setdefault(experiment.data.dataset, set()).add(
            (training.learning_rate, training.batch_size, training.epochs)
        )
    assert {len(found) for found in rates.values()} == {1}
    assert {rate for found in rates.values() for rate, _, _ in found} <= set(LEARNING_RATES)


def used_presets() -> list[str]:
    """Name the presets that pictures are drawn of; those beyond pictures have a page of their own."""
    others = [name for name in presets() if load_experiment(name).data.dataset in PROBLEMS]
    return [name for name in presets() if name not in ("quickstart", *others) and not name.startswith("faults-")]


def test_the_papers_settings_are_in_the_presets() -> None:
    for name in used_presets():
        experiment = load_experiment(name)
        assert name.startswith("testbed-") or experiment.fleet == Experiment().fleet
        assert experiment.training.epochs == {"mnist": 1, "fashion-mnist": 3, "cifar10": 5}[experiment.data.dataset]


def test_learning_rates_are_chosen_away_from_the_test_set_and_the_seeds() -> None:
    needs = figure_named("learning-rates").needs(SCALES["full"])
    sweep = [need for need in needs if "-rate-" in need.experiment.name]
    assert len(sweep) == 3 * len(LEARNING_RATES)
    for need in sweep:
        assert need.experiment.data.validation_share == 0.1
        assert [strategy.name for strategy in need.experiment.strategy] == ["fedavg"]
        assert not set(need.seeds) & set(SCALES["full"].seeds)


def test_unknown_figures_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="accuracy-iid"):
        figure_named("accuracy-idd")


def test_only_what_is_named_is_needed() -> None:
    request = Request([figure_named("accuracy-iid")], SCALES["small"], Path(), only=["mnist", "cif*-iid"])
    assert [need.experiment.name for need in request.needs()["accuracy-iid"]] == ["mnist-iid", "cifar10-iid"]
    with pytest.raises(InputError, match="nonsense"):
        Request([figure_named("accuracy-iid")], SCALES["small"], Path(), only=["nonsense"]).needs()


# Measures and claims

CURVES = {
    "feddd": [[0.5, 0.7, 0.9], [0.6, 0.8, 0.92]],
    "fedavg": [[0.4, 0.7, 0.88], [0.5, 0.81, 0.9]],
    "fedcs": [[0.4, 0.5, 0.6], [0.5, 0.7, 0.75]],
}
SECONDS = {"feddd": 10.0, "fedavg": 40.0, "fedcs": 20.0}


def test_a_gap_is_in_points_and_paired() -> None:
    panels = {"p": made_up(CURVES, SECONDS)}
    found = measures.gap("p", "fedavg")(panels)
    assert found.value == pytest.approx(2.0)
    assert found.seeds == 2
    assert measures.off_by(1.5, found.value) == "+0.5"


def jumping(level: float, size: float) -> list[float]:
    """Twelve rounds that go up and down around a level; the last is an upper one."""
    return [level + (size if number % 2 else -size) for number in range(12)]


def test_where_a_curve_jumps_finals_of_all_are_means_of_the_last_rounds_and_say_so() -> None:
    curves = {"feddd": [jumping(0.5, 0.05)], "fedavg": [[0.48] * 12]}
    panel = made_up(curves, SECONDS)
    assert panel.final_rounds == 5
    # Five rounds of ±5 points that begin and end with an upper one: their mean is one point above the level.
    found = measures.gap("p", "fedavg")({"p": panel})
    assert found.value == pytest.approx(3.0)
    assert found.words == "+3.0 points (one seed), mean of the last 5 rounds"
    assert measures.final("p", "feddd")({"p": panel}).value == pytest.approx(51.0)
    assert measures.best_rule("p", "feddd", ("fedavg",))({"p": panel}).value == pytest.approx(3.0)
    assert panel_table(panel)[0][1] == "final accuracy (%), mean of the last 5 rounds"


def test_where_no_curve_jumps_a_final_is_that_of_the_last_round() -> None:
    rising = [[0.3 + 0.02 * number for number in range(12)]]  # steep, but steady
    calm = made_up({"feddd": [jumping(0.5, 0.001)], "fedavg": rising}, SECONDS)
    assert calm.final_rounds == 1
    assert measures.final("p", "fedavg")({"p": calm}).value == pytest.approx(52.0)
    assert made_up(CURVES, SECONDS).final_rounds == 1  # too short to be judged


def test_an_early_gap_is_read_over_a_window() -> None:
    flat, one_dip = [0.5] * 40, [0.6] * 40
    one_dip[9] = 0.1  # a quarter of the way, in this round alone
    panels = {"p": made_up({"h = 1": [flat], "h = 20": [one_dip]}, {"h = 1": 1.0, "h = 20": 1.0})}
    # (4 · 10 − 40) / 5: the dip counts for a fifth
    assert measures.early_gap("p", "h = 1", "h = 20", 0.25)(panels).value == pytest.approx(0.0)


def test_time_saved_is_to_the_papers_target_if_it_is_reached() -> None:
    panels = {"p": made_up(CURVES, SECONDS, targets=(0.6, 0.99))}
    # 88 %: feddd after round 3 of 10 s, fedavg after round 3 of 40 s, in both runs
    found = measures.time_saved("p", "fedavg", 0.88)(panels)
    assert found.value == pytest.approx(75.0)
    assert "at" not in found.words


def test_a_target_out_of_reach_is_replaced_by_the_highest_that_both_reach_and_said() -> None:
    panels = {"p": made_up(CURVES, SECONDS, targets=(0.6, 0.7, 0.99))}
    found = measures.time_saved("p", "fedavg", 0.95)(panels)
    # 70 %: feddd rounds 2 and 2 (10 s each), fedavg rounds 2 and 2 (40 s each)
    assert found.value == pytest.approx(75.0)
    assert found.words.endswith("at 70 %")


def test_never_stays_never() -> None:
    panels = {"p": made_up(CURVES, SECONDS, targets=(0.7,))}
    found = measures.time_saved("p", "fedcs", 0.88)(panels)
    assert found.value is None
    assert found.words == "fedcs never reaches 88 %"
    some = measures.time_saved("p", "fedcs", 0.7)(panels)
    assert "never on 1 of 2 seeds" in some.words
    assert measures.never_reaches("p", "fedcs", 0.88)(panels).words == "never reaches 88 % on 2 of 2 seeds"


def test_a_strategy_that_diverged_is_told_and_not_left_out_in_silence() -> None:
    whole = made_up(CURVES, SECONDS)
    rows = whole.runs[1].tables["rounds"]
    early = rows.filter(pc.or_(pc.not_equal(rows["strategy"], "feddd"), pc.less(rows["round"], 3)))
    cut = Results(Path("b"), {}, {}, {}, dict(whole.runs[1].tables) | {"rounds": early})
    one, both = Panel(whole.experiment, (whole.runs[0], cut)), Panel(whole.experiment, (cut, cut))
    assert "; diverged in round 3" in panel_table(one)[1][1]
    assert panel_table(both)[1][1] == "diverged in round 3, 3"
    found = measures.gap("p", "fedavg")({"p": both})
    assert (found.words, found.value, found.seeds) == ("feddd diverged in round 3, 3", None, 2)


def test_a_cell_that_diverges_does_not_keep_the_others_from_being_run(tmp_path: Path) -> None:
    wild = tiny({"name": "fedavg"}, {"name": "feddd"}, training={"learning_rate": 1e30})
    store = Store(tmp_path)
    wanted = cells(wild, [0])
    assert list(store.run(wanted, workers=1)) == wanted
    assert store.missing(wanted) == []
    panel = read_panel(store, Need(wild, (0,)))
    assert [panel.diverged(label) for label in ("fedavg", "feddd")] == [[2], [2]]


def test_a_range_over_settings_says_which_were_run() -> None:
    panels = {"a": made_up(CURVES, SECONDS), "b": made_up({k: v[::-1] for k, v in CURVES.items()}, SECONDS)}
    found = measures.over(["a", "b", "c"], lambda preset: measures.gap(preset, "fedcs"))(panels)
    assert found.value == pytest.approx((23.5, 23.5))
    assert "2 of 3 settings run" in found.words
    assert measures.off_by((20.0, 30.0), found.value) == "+3.5 / −6.5"


def test_a_range_over_settings_names_those_that_were_run_and_never_got_there() -> None:
    panels = {"a": made_up(CURVES, SECONDS), "b": made_up(CURVES, SECONDS)}
    targets = {"a": 0.6, "b": 0.88}
    found = measures.over(["a", "b"], lambda preset: measures.time_saved(preset, "fedcs", targets[preset]))(panels)
    assert isinstance(found.value, tuple)
    assert "settings run" not in found.words
    assert found.words.endswith("b: fedcs never reaches 88 %")


def test_the_best_rule_is_compared_with_the_best_of_the_others() -> None:
    panels = {"p": made_up(CURVES, SECONDS)}
    found = measures.best_rule("p", "feddd", ("fedavg", "fedcs"))(panels)
    assert found.value == pytest.approx(2.0)
    assert found.words.endswith("feddd 91.0, fedavg 89.0, fedcs 67.5")


def test_seeds_that_are_not_finished_do_not_count() -> None:
    whole = made_up(CURVES, SECONDS)
    cut = whole.runs[1].tables["rounds"]
    runs = (whole.runs[0], Results(Path("b"), {}, {}, {}, dict(whole.runs[1].tables) | {"rounds": cut.slice(0, 5)}))
    found = measures.gap("p", "fedavg")({"p": Panel(whole.experiment, runs)})
    assert found.seeds == 1
    assert "one seed" in found.words


def test_claims_of_what_was_not_run_say_so_and_belong_to_a_figure() -> None:
    names = {figure.name for figure in FIGURES}
    for claim in CLAIMS:
        assert claim.figure in names
        assert claim.answer({}) == (measures.NOT_RUN, "")
    assert len({(claim.figure, claim.says) for claim in CLAIMS}) == len(CLAIMS)


def test_tables_are_markdown_with_a_head() -> None:
    assert as_markdown([["a", "b"], ["1|2", "3"]]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 |"


def test_a_table_pairs_savings_with_the_same_seeds_fedavg() -> None:
    experiment = tiny({"name": "fedavg"}, {"name": "feddd"}, targets=(0.7, 0.95))
    made = made_up({"fedavg": CURVES["fedavg"], "feddd": CURVES["feddd"]}, SECONDS)
    panel = Panel(experiment.model_copy(update={"rounds": 3}), made.runs)
    rows = panel_table(panel)
    assert rows[0] == ["strategy", "final accuracy (%)", "bytes", "time to 70 %", "time to 95 %"]
    assert rows[1] == ["fedavg", "89.0 (88.0, 90.0)", "30 B", "80.0 s", "never"]
    assert rows[2] == ["feddd", "91.0 (90.0, 92.0)", "30 B", "20.0 s, −75 % [−75, −75]", "never"]


def test_an_exchange_table_has_time_and_bytes_to_what_fedavg_reaches() -> None:
    experiment = tiny({"name": "fedavg"}, {"name": "feddd"}, {"name": "oort"}, targets=(0.7, 0.95))
    made = made_up({"fedavg": CURVES["fedavg"], "feddd": CURVES["feddd"]}, SECONDS)
    rows = exchange_table(Panel(experiment.model_copy(update={"rounds": 3}), made.runs))
    assert rows[0] == ["strategy", "final accuracy", "bytes", "time to 70 %", "bytes to 70 %", "seeds"]
    assert rows[1] == ["fedavg", "89.0 % [76.3, 100.0]", "30 B", "80.0 s", "20 B", "2"]
    assert rows[2][:2] == ["feddd", "91.0 % [78.3, 100.0]"]
    assert rows[3] == ["oort", "not run", "", "", "", ""]


# The theorem and the motivation


def test_the_problem_is_what_the_docstring_says() -> None:
    problem = theorem.make_problem(0.5)
    rng = np.random.default_rng(0)
    model = rng.normal(size=problem.start.shape)
    gradients = problem.gradients(np.repeat(model[None], len(problem.targets), 0))
    mean = gradients.mean(0)
    assert problem.squared_gradient(model) == pytest.approx((mean**2).sum())
    # σ_n² does not depend on W, and L bounds how fast gradients change.
    assert ((gradients - mean) ** 2).sum((1, 2)).mean() == pytest.approx(problem.variance)
    other = rng.normal(size=model.shape)
    moved = problem.gradients(np.repeat(other[None], len(problem.targets), 0))
    steps = np.sqrt(((gradients - moved) ** 2).sum((1, 2)))
    assert (steps <= problem.smoothness * np.linalg.norm(model - other) * (1 + 1e-9)).all()
    assert problem.gap(problem.targets.mean(0)) == pytest.approx(0.0)


def test_equal_clients_with_random_masks_have_no_mask_error_and_keep_the_bound() -> None:
    found = theorem.check("random", 0.0, 5, rounds=20)
    assert found.weight_error < 1e-20
    assert found.gradient_error < 1e-20
    for bound in found.bounds.values():
        assert bound is not None
        assert found.measured <= bound


def test_equal_clients_with_importance_all_keep_the_same_units_back_and_break_the_bound() -> None:
    found = theorem.check("importance", 0.0, 1, rounds=100)
    assert found.gradient_error > 0.1
    for bound in found.bounds.values():
        assert bound is not None
        assert found.measured > bound


def test_the_proofs_error_may_be_too_large_for_the_theorem_to_say_anything() -> None:
    found = theorem.check("random", 1.0, 1, rounds=100)
    assert found.gradient_error > 1.0 > found.weight_error
    assert found.bounds["gradients", "printed"] is None


def test_a_mixture_has_the_share_of_the_label_and_the_rest_evenly() -> None:
    data = synthetic.make("synthetic-grey")
    chosen = _mixture(data, 3, 0.4, 150, np.random.default_rng(0))
    counts = np.bincount(data.train_labels[chosen], minlength=10)
    assert counts[3] == 60
    assert set(np.delete(counts, 3)) == {10}
    assert len(set(chosen)) == len(chosen)


def test_losses_by_width_are_means_over_the_clients_of_a_width() -> None:
    rows = [
        dict.fromkeys(SCHEMAS["clients"].names)
        | {"strategy": "fedavg", "seed": 0, "round": number, "client": client, "status": "ok", "train_loss": loss}
        for number, losses in ((1, (4.0, 2.0, 6.0)), (2, (3.0, 1.0, 5.0)))
        for client, loss in enumerate(losses)
    ]
    tables = {"clients": pa.Table.from_pylist(rows, schema=SCHEMAS["clients"])}
    assert loss_by_width(Results(Path(), {}, {}, {}, tables), "fedavg", 2) == [[5.0, 4.0], [2.0, 1.0]]


# All of it


@pytest.mark.slow
def test_smoke_runs_draws_and_answers_every_figure_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDDD_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    request = Request(FIGURES, SCALES["smoke"], tmp_path / "out")
    for _ in request.store.run(request.cells(), workers=1):
        pass
    drawn = draw(request)
    assert [one.figure.name for one in drawn] == [figure.name for figure in FIGURES]
    folder = tmp_path / "out" / "smoke"
    for figure in FIGURES:
        assert (folder / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{figure.name}.svg").stat().st_size > 5000
        document = json.loads((folder / f"{figure.name}.json").read_text(encoding="utf-8"))
        assert document["command"] == f"feddd reproduce {figure.name} --scale smoke"
        assert document["tables"]
        assert all(entry["ours"]["words"] != "not run" for entry in document["claims"])
        assert all(cell != "not run" for table in document["tables"] for row in table["rows"] for cell in row)
    assert request.store.missing(request.cells()) == []
    assert all(row["kept"] == row["cells"] for row in request.progress())


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "feddd", *arguments]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_reproduce_lists_its_figures_and_runs_one(tmp_path: Path) -> None:
    listed = json.loads(command("reproduce", "--json", cwd=tmp_path).stdout)
    assert [row["figure"] for row in listed] == [figure.name for figure in FIGURES]
    arguments = ("reproduce", "imbalance", "--scale", "smoke", "--only", "fashion", "--workers", "1")
    first = command(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "labels 0–2 rare" in " ".join(first.stdout.split())
    kept = sorted((tmp_path / "runs/reproduce/cells").rglob("rounds.parquet"))
    assert len(kept) == 4
    times = [path.stat().st_mtime_ns for path in kept]
    again = json.loads(command(*arguments, "--report", "--json", cwd=tmp_path).stdout)
    assert [path.stat().st_mtime_ns for path in kept] == times  # nothing was run twice
    assert {entry["paper"] for entry in again[0]["claims"]} >= {"83.1 %", "94.9 %", "59.3 %"}
    assert (tmp_path / "runs/reproduce/smoke/imbalance.html").stat().st_size > 1e6


def test_wrong_figures_and_words_are_one_line(tmp_path: Path) -> None:
    for arguments, reason in (
        (("reproduce", "acuracy-iid"), "accuracy-iid"),
        (("reproduce", "accuracy-iid", "--only", "imagenet"), "imagenet"),
    ):
        failed = command(*arguments, cwd=tmp_path)
        assert failed.returncode == 2
        assert failed.stderr.count("\n") == 1
        assert reason in failed.stderr


# The documentation


def test_the_page_of_numbers_is_what_the_published_results_say() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from publish_results import numbers_page
    finally:
        sys.path.pop(0)
    page = (ROOT / "docs" / "numbers.md").read_text(encoding="utf-8")
    assert page == numbers_page(), "run `python tools/publish_results.py`"
    for claim in CLAIMS:
        assert claim.says in page


def test_every_figure_has_a_page_with_its_command() -> None:
    for figure in FIGURES:
        page = (ROOT / "docs" / "figures" / f"{figure.name}.md").read_text(encoding="utf-8")
        said = page
        for scale in ("full", "small"):
            result = ROOT / "docs" / "results" / scale / f"{figure.name}.md"
            if result.is_file():
                assert f"results/{scale}/{figure.name}.md" in page, f"{figure.name}: {scale} is not shown"
                said += result.read_text(encoding="utf-8")
        assert f"    feddd reproduce {figure.name}" in said


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    line = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(docs), str(tmp_path / "html")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "figures/accuracy-iid.html" in (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
