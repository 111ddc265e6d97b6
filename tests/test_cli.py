"""The command line as its users meet it: real processes, real folders."""

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from feddd.cli import main
from feddd.experiments.results import SCHEMAS, load_results
from feddd.reporting import print_summary

TINY = """
name = "tiny"
rounds = 3
targets = [0.15, 0.99]
[data]
dataset = "fashion-mnist-mini"
train_limit = 300
[fleet]
clients = 8
[training]
batch_size = 16
learning_rate = 0.05
"""
FLEET = """client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds
slow,1e4,4e4,1
middle,2e4,8e4,2
quick,5e4,2e5,0.5
"""


def feddd(*arguments, cwd=None, **options):
    return subprocess.run(
        [sys.executable, "-m", "feddd", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished run, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.toml").write_text(TINY)
    done = feddd("run", "tiny.toml", "--out", "out", "--workers", 1, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_prints_a_table_and_leaves_everything_behind(finished):
    folder, done = finished
    assert all(label in done.stdout for label in ("feddd", "fedavg", "fedcs", "oort"))
    assert "report: out/report.html" in done.stdout
    # A busy machine may take so long that a line says how far it is.
    assert all(re.fullmatch(r"feddd: \w+, round \d of 3, .* left", line) for line in done.stderr.splitlines())
    left = {path.name for path in (folder / "out").iterdir()}
    assert left >= {
        "config.toml",
        "environment.json",
        "rounds.parquet",
        "clients.parquet",
        "classes.parquet",
        "timings.parquet",
        "summary.json",
        "report.html",
        *(f"model-{label}.safetensors" for label in ("feddd", "fedavg", "fedcs", "oort")),
    }
    assert not any(name.startswith(".") for name in left)


def test_the_summary_leaves_out_a_target_rather_than_cut_a_column(finished, monkeypatch, capsys):
    results = load_results(finished[0] / "out")
    both = dataclasses.replace(results, config={**results.config, "targets": [0.15, 0.15]})
    for width, times in ((200, 2), (60, 1)):
        monkeypatch.setenv("COLUMNS", str(width))
        print_summary(both)
        shown = capsys.readouterr().out
        assert shown.count("to 15%") == times
        assert "…" not in shown.partition("report:")[0]


def test_tables_have_the_promised_columns_in_the_promised_order(finished):
    folder, _ = finished
    for name in ("rounds", "clients", "classes"):
        table = pq.read_table(folder / "out" / f"{name}.parquet")
        assert table.schema.equals(SCHEMAS[name])
    clients = pq.read_table(folder / "out" / "clients.parquet").to_pylist()
    order = ["feddd", "fedavg", "fedcs", "oort"]
    keys = [(order.index(row["strategy"]), row["round"], row["client"]) for row in clients]
    assert keys == sorted(keys)
    assert {row["status"] for row in clients} == {"ok"}
    rounds = pq.read_table(folder / "out" / "rounds.parquet").to_pylist()
    assert [row["round"] for row in rounds if row["strategy"] == "oort"] == [1, 2, 3]
    assert all(row["upload_bytes"] > 0 and 0 <= row["test_accuracy"] <= 1 for row in rounds)


def test_the_summary_is_what_the_tables_say(finished):
    folder, _ = finished
    summary = json.loads((folder / "out" / "summary.json").read_text())["strategies"]
    rounds = pq.read_table(folder / "out" / "rounds.parquet").to_pylist()
    for label, found in summary.items():
        rows = [row for row in rounds if row["strategy"] == label]
        assert found["final_accuracy"] == rows[-1]["test_accuracy"]
        assert found["best_accuracy"] == max(row["test_accuracy"] for row in rows)
        assert found["clock_seconds"] == rows[-1]["clock_seconds"]
        assert found["upload_bytes"] == sum(row["upload_bytes"] for row in rows)
        first = next((row["clock_seconds"] for row in rows if row["test_accuracy"] >= 0.15), None)
        assert found["time_to_accuracy"][0]["seconds"] == first
        assert found["time_to_accuracy"][1] == {"target": 0.99, "seconds": None, "ratio_to_fedavg": None}


def test_json_goes_to_stdout_alone(finished, tmp_path):
    folder, _ = finished
    done = feddd(
        "run",
        folder / "tiny.toml",
        "--out",
        tmp_path / "o",
        "--rounds",
        1,
        "--seed",
        4,
        "--json",
        "--workers",
        1,
        cwd=tmp_path,
    )
    document = json.loads(done.stdout)
    assert document["seed"] == 4
    assert set(document["strategies"]) == {"feddd", "fedavg", "fedcs", "oort"}
    quiet = feddd("run", folder / "tiny.toml", "--rounds", 1, "--quiet", cwd=tmp_path)
    assert (quiet.stdout, quiet.stderr, quiet.returncode) == ("", "", 0)
    assert next((tmp_path / "runs").iterdir()).name.startswith("tiny-")


def test_an_output_folder_that_holds_something_is_refused_and_left_alone(finished, tmp_path):
    folder, _ = finished
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    for target in ("precious", "precious/thesis.tex"):
        done = feddd("run", folder / "tiny.toml", "--out", target, cwd=tmp_path)
        assert done.returncode == 2
        assert "already holds something" in done.stderr
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["thesis.tex"]


WRONG = [
    (["run", "nope"], "no preset or file 'nope'"),
    (["run", "tiny.toml", "--set", "data.partion=iid"], "did you mean 'partition'?"),
    (["run", "tiny.toml", "--set", "strategy.feddd.budget=0.1"], "infeasible"),
    (["run", "tiny.toml", "--set", "fleet.clients=301"], "clients"),
    (["run", "tiny.toml", "--set", "data.classes_per_client=11"], "classes"),
    (["run", "tiny.toml", "--set", "model.name=json:dumps"], "json:dumps"),
    (["run", "tiny.toml", "--set", "model.name=narrow:net"], "labels need (10,)"),
    (["run", "tiny.toml", "--set", "fleet.file=missing.csv"], "no fleet file"),
    (["run", "tiny.toml", "--set", "strategy.feddd.always_send=['fc9']"], "no layer 'fc9'"),
    (["run", "tiny.toml", "--set", "training.trainer=stacked", "--set", "model.name=wide:net"], "does not fit"),
    (["run", "tiny.toml", "--workers", "0"], "workers"),
    (["run", "tiny.toml", "--rounds", "0"], "rounds"),
    (["run", "tiny.toml", "--rounds", "x"], "--rounds"),
    (["run", "tiny.toml", "--set", "data.dataset=mnist", "--data-dir", "nowhere"], "feddd data fetch mnist"),
    (["run", "--unknown"], "--unknown"),
    (["plan", "missing.csv"], "no fleet file"),
    (["plan", "fleet.csv", "--budget", "0.1"], "infeasible"),
    (["plan", "fleet.csv", "--penalty", "nan"], "penalty"),
    (["plan", "bad.csv"], "bad.csv, row 3: uplink_bits_per_s is 0"),
    (["report", "nowhere"], "not a run's folder"),
    (["data", "fetch", "minst"], "did you mean 'mnist'?"),
    (["presets", "show", "quickstrt"], "did you mean 'quickstart'?"),
    (["presets", "quickstrt"], "no preset has 'quickstrt' in its name or description; did you mean 'quickstart'?"),
    (["presets", "shwo", "quickstart"], "did you mean 'show'?"),
    (["frobnicate"], "frobnicate"),
    (["bench", "engin"], "did you mean 'engine'?"),
    (["bench", "--peer", "flower"], "--peer takes NAME=PYTHON, not 'flower'"),
    (["run", "tiny.toml", "--set", "training.device=warp"], "training.device 'warp' cannot be used here"),
    (["run", "tiny.toml", "--state-dir", "nowhere"], "the state folder 'nowhere' does not exist"),
    (["run", "tiny.toml", "--seed", "0", "--seed", "1"], "--seed is given 2 times; it takes one value"),
    (["plan", "fleet.csv", "--budget=0.5", "--budget", "0.5"], "--budget is given 2 times"),
    (["run", "tiny.toml", "--set", "fleet.clients=x"], "--set fleet.clients=x: fleet.clients: should be"),
    (["run", "tiny.toml", "--seed", "-1"], "--seed -1: seed: should be"),
    (["data", "show", "tiny.toml", "--out", "q.xyz"], "q.xyz: pictures cannot be written as 'xyz'"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_input_is_one_line_on_stderr_and_exit_code_2(arguments, expected, tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "fleet.csv").write_text(FLEET)
    (tmp_path / "bad.csv").write_text(FLEET.replace("middle,2e4", "middle,0"))
    (tmp_path / "narrow.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 9))\n"
    )
    (tmp_path / "wide.py").write_text(
        "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(784, 10))\n"
    )
    before = {path.name for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDDD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "__pycache__"))
    monkeypatch.setattr(sys, "argv", ["feddd", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert expected in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == before


def test_wrong_input_ends_a_real_process_with_2_and_no_traceback(tmp_path):
    done = feddd("run", "nope", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "feddd: no preset or file 'nope'; `feddd presets` lists the presets\n"
    assert done.stderr.count("\n") == 1


def test_when_everybody_diverges_the_reason_is_one_line_and_exit_code_1(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    wild = ["--set", "training.learning_rate=1e30", "--set", "training.epochs=4"]
    done = feddd("run", "tiny.toml", *wild, "--out", "o", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "every client diverged" in done.stderr


def test_a_full_disk_is_one_line_and_keeps_what_was_written(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # tables fit, the model (343 kB) does not

    options = ["--out", "o", "--workers", 1, "--checkpoint-seconds", 3600]
    done = feddd("run", "tiny.toml", *options, cwd=tmp_path, preexec_fn=limit)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    rounds = pq.read_table(tmp_path / "o" / "rounds.parquet").to_pylist()
    assert [(row["strategy"], row["round"]) for row in rounds] == [("feddd", 1), ("feddd", 2), ("feddd", 3)]
    assert not any(path.name.startswith((".", "model")) for path in (tmp_path / "o").iterdir())


def test_ctrl_c_leaves_the_finished_rounds_readable(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "feddd", "run", "tiny.toml", "--out", "o", "--rounds", "100000"]

    def interruptible():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,  # noqa: PLW1509
    )
    try:
        table = tmp_path / "o" / "rounds.parquet"
        deadline = time.monotonic() + 120
        while not table.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert stderr.count("\n") == 1
    assert "interrupted" in stderr
    assert pq.read_table(table).num_rows > 0
    report = feddd("report", "o", cwd=tmp_path)
    assert report.returncode == 0, report.stderr


def test_plan_prints_rates_that_meet_the_budget_and_the_curve(tmp_path):
    (tmp_path / "fleet.csv").write_text(FLEET)
    planned = json.loads(feddd("plan", "fleet.csv", "--budget", 0.5, "--json", cwd=tmp_path).stdout)
    rates = {row["client"]: row["dropout"] for row in planned["clients"]}
    assert rates["slow"] > rates["middle"] > rates["quick"]
    assert sum(1 - rate for rate in rates.values()) / 3 == pytest.approx(0.5)
    assert planned["round_seconds"] == pytest.approx(max(row["seconds"] for row in planned["clients"]))
    assert planned["full_round_seconds"] == pytest.approx(1 + 85_614 * 32 * (1 / 1e4 + 1 / 4e4))
    seconds = [point["round_seconds"] for point in planned["curve"]]
    assert seconds == sorted(seconds)
    people = feddd("plan", "fleet.csv", cwd=tmp_path)
    assert "3 clients at budget 0.6" in people.stdout


def test_report_and_data_show_make_pictures(finished, tmp_path):
    folder, _ = finished
    done = feddd("report", folder / "out", "--out", tmp_path / "r", "--json")
    made = json.loads(done.stdout)
    assert all(os.path.getsize(path) > 1000 for path in [made["report"], *made["figures"]])
    shown = feddd("data", "show", folder / "tiny.toml", "--out", tmp_path / "p.png")
    assert "8 clients, 300 samples" in shown.stdout
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "verb", [[], ["run"], ["plan"], ["report"], ["presets"], ["data"], ["data", "fetch"], ["bench"]]
)
def test_help_teaches_every_verb(verb, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["feddd", *verb, "--help"])
    main()
    printed = capsys.readouterr().out
    assert "Usage: feddd" in printed
    assert "--help" in printed


def test_a_page_about_several_runs_replaces_no_page_of_one(finished, tmp_path):
    folder, _ = finished
    before = (folder / "out" / "report.html").read_bytes()
    pages = []
    for _ in range(2):
        done = feddd("report", folder / "out", folder / "out", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        pages.append(json.loads(done.stdout)["report"])
    assert (folder / "out" / "report.html").read_bytes() == before
    assert len(set(pages)) == 2
    assert all((tmp_path / page).is_file() and page.startswith("runs/comparison-") for page in pages)


@pytest.mark.parametrize("package", ["flwr", "cryptography"])
def test_the_testbed_without_flower_names_the_extra(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["feddd", "testbed", "testbed-cifar10-iid"])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.err == 'feddd: the testbed needs the extra flower: pip install "feddd[flower]"\n'
