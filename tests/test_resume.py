"""Interrupted runs: whatever ends a run, wherever it was, resuming it leaves what it would have left undisturbed."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from safetensors import safe_open
from safetensors.torch import save

import feddd
from feddd import FedAvg, InputError
from feddd.cli import main
from feddd.experiments import checkpoints, folders
from feddd.experiments.config import Experiment
from feddd.experiments.folders import Lock
from feddd.experiments.loading import load_experiment
from feddd.experiments.running import Progress
from feddd.files import write_atomically
from feddd.strategies.protocol import digest
from worlds import experiment

ROUNDS = 8
FEDDD: dict[str, Any] = {"name": "feddd", "broadcast_every": 3}
NEVER: dict[str, Any] = {"name": "feddd", "label": "never", "broadcast_every": 0, "selector": "random"}


class Stop(Exception):
    """What a test stops a run with."""


def tiny(*strategies: dict[str, Any], **changes: Any) -> Experiment:
    """Six clients on 120 images that are made on the fly."""
    data = {"dataset": "synthetic-grey", "train_limit": 120} | changes.pop("data", {})
    base: dict[str, Any] = {"rounds": ROUNDS, "data": data, "fleet": {"clients": 6}}
    return experiment(**base | {"strategy": list(strategies)} | changes)


def stop_after(label: str, number: int) -> Callable[[Progress], None]:
    def watch(done: Progress) -> None:
        if (done.label, done.record.round) == (label, number):
            raise Stop

    return watch


def interrupted(folder: Path, one: Experiment, label: str, number: int, **options: Any) -> Path:
    """A run that was stopped in the middle: the last checkpoint is that of the round before."""
    options = {"workers": 1, "checkpoint_seconds": 0} | options
    with pytest.raises(Stop):
        feddd.run(one, folder, watch=stop_after(label, number), **options)
    return folder


def resumed_rounds(folder: Path, **options: Any) -> list[tuple[str, int]]:
    """Resume, and say which rounds were done for it."""
    done: list[tuple[str, int]] = []
    feddd.resume(folder, watch=lambda seen: done.append((seen.label, seen.record.round)), **{"workers": 1} | options)
    return done


def assert_same(found: Path, expected: Path) -> None:
    """All files that are a function of the experiment, byte for byte, and none besides those of an undisturbed run."""
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}
    for name in ("rounds", "clients", "classes", "partition"):
        assert pq.read_table(found / f"{name}.parquet").equals(pq.read_table(expected / f"{name}.parquet")), name
    own = ("environment.json", "timings.parquet", "report.html", "last")  # which checkpoint is kept is up to the clock
    for path in expected.iterdir():
        assert path.name in own or path.read_bytes() == (found / path.name).read_bytes(), path.name
    timed = [
        pq.read_table(folder / "timings.parquet").select(["strategy", "round", "phase"]) for folder in (found, expected)
    ]
    assert timed[0].equals(timed[1])


@pytest.fixture(scope="module")
def both() -> Experiment:
    return tiny(FEDDD, NEVER)


@pytest.fixture(scope="module")
def undisturbed(both: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return feddd.run(both, tmp_path_factory.mktemp("undisturbed") / "run", workers=1).path


@pytest.fixture(scope="module")
def stopped_once(both: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return interrupted(tmp_path_factory.mktemp("stopped") / "run", both, "never", 6)


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A run that was stopped in round 6 of its second strategy: rounds 4 and 5 are saved."""
    return shutil.copytree(stopped_once, tmp_path / "stopped")


def saved(folder: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted((folder / "checkpoint").glob("*.safetensors"), key=lambda path: int(path.name.split("-")[1]))


# Where it goes on


def test_a_run_goes_on_after_its_last_checkpoint_and_finished_strategies_are_left_alone(
    both: Experiment, undisturbed: Path, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path / "run", both, "never", 5)
    assert [path.name.split("-")[:2] for path in saved(folder)] == [["1", "3"], ["1", "4"]]
    assert resumed_rounds(folder) == [("never", number) for number in range(5, ROUNDS + 1)]
    assert_same(folder, undisturbed)
    assert resumed_rounds(folder) == []


def test_workers_and_state_files_may_differ_between_the_halves(
    both: Experiment, undisturbed: Path, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path / "run", both, "never", 4, workers=2)
    assert resumed_rounds(folder, state_dir=tmp_path)[0] == ("never", 4)
    assert_same(folder, undisturbed)
    folder = interrupted(tmp_path / "again", both, "never", 4)
    assert resumed_rounds(folder, workers=2)[0] == ("never", 4)
    assert_same(folder, undisturbed)


def test_by_default_only_moments_are_saved_at_which_nobody_holds_anything(
    both: Experiment, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", 1e9)  # cost is no object, clients' values stay rare
    monkeypatch.setattr(checkpoints, "DEAR_SECONDS", 3600.0)
    folder = interrupted(tmp_path / "run", both, "feddd", 8, checkpoint_seconds=None)
    # Everybody has sent everything in round 1; the full model goes down after rounds 3 and 6.
    assert [path.name.split("-")[1] for path in saved(folder)] == ["3", "6"]
    assert resumed_rounds(folder)[0] == ("feddd", 7)
    assert_same(folder, undisturbed)


def test_an_interrupted_run_may_be_interrupted_again(both: Experiment, undisturbed: Path, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run", both, "feddd", 2)
    for label, number in (("feddd", 4), ("feddd", 5), ("never", 1), ("never", 8)):
        with pytest.raises(Stop):
            feddd.resume(folder, workers=1, checkpoint_seconds=0, watch=stop_after(label, number))
    assert resumed_rounds(folder) == [("never", 8)]
    assert_same(folder, undisturbed)


def test_a_run_killed_before_its_last_file_is_brought_to_its_end(
    both: Experiment, undisturbed: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(undisturbed, tmp_path / "run")
    (folder / "checkpoint").mkdir()
    (folder / "report.html").write_text("half")
    (folder / ".summary.json.0123abcd").write_text("{")
    assert resumed_rounds(folder) == []
    assert_same(folder, undisturbed)
    assert (folder / "report.html").stat().st_size > 1000


# Damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
@pytest.mark.parametrize("count", [1, 2])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(
    damage: Callable[[Path], None],
    count: int,
    stopped: Path,
    undisturbed: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for path in saved(stopped)[-count:]:
        damage(path)
    assert resumed_rounds(stopped)[0] == ("never", 5 if count == 1 else 1)
    assert_same(stopped, undisturbed)
    assert len(caplog.records) == (0 if damage is Path.unlink else count)
    assert all("cannot be used" in record.message for record in caplog.records)


def of_another_version(path: Path) -> Path:
    """The same checkpoint as an earlier version might have written it: whole, but in a format of its own."""
    with safe_open(path, framework="pt") as file:
        document = json.loads(file.metadata()["feddd"]) | {"format": 2}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = save(tensors, {"feddd": json.dumps(document)})
    path.unlink()
    renamed = path.with_name(f"{path.name.rpartition('-')[0]}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors")
    renamed.write_bytes(content)
    return renamed


@pytest.mark.parametrize("newest_is_damaged", [False, True])
def test_checkpoints_of_another_version_are_refused_and_left_as_they_are(
    newest_is_damaged: bool, stopped: Path, undisturbed: Path
) -> None:
    before, newest = (of_another_version(path) for path in saved(stopped))
    if newest_is_damaged:
        flip(newest)
    met = before if newest_is_damaged else newest
    with pytest.raises(InputError) as caught:
        feddd.resume(stopped, workers=1)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(
        f"{met} has checkpoint format 2, and this version reads {checkpoints.FORMAT}: go on with the version of feddd"
    )
    assert saved(stopped) == ([before] if newest_is_damaged else [before, newest])
    shutil.rmtree(stopped / "checkpoint")  # what the line says if one does not mind
    assert resumed_rounds(stopped)[0] == ("never", 1)
    assert_same(stopped, undisturbed)


def test_damaged_rows_count_as_a_damaged_checkpoint(stopped: Path, undisturbed: Path) -> None:
    truncate(stopped / "checkpoint" / "1.rows")  # the end belongs to the latest checkpoint alone
    assert resumed_rounds(stopped)[0] == ("never", 5)
    assert_same(stopped, undisturbed)


@pytest.mark.parametrize(
    ("name", "damage", "first"),
    [
        ("checkpoint", shutil.rmtree, ("never", 1)),
        ("clients.parquet", truncate, ("feddd", 1)),
        ("model-feddd.safetensors", truncate, ("feddd", 1)),
        ("partition.parquet", Path.unlink, ("never", 6)),
        ("environment.json", empty, ("never", 6)),
    ],
)
def test_as_much_is_repeated_as_is_needed(
    name: str, damage: Callable[[Path], None], first: tuple[str, int], stopped: Path, undisturbed: Path
) -> None:
    damage(stopped / name)
    assert resumed_rounds(stopped)[0] == first
    assert_same(stopped, undisturbed)


# Strategies of one's own


@dataclass(frozen=True)
class Counting(FedAvg):
    """Remembers something: how, says `box`."""

    box: str = "list"

    def absorb(self, state: Any, fleet: Any, plan: Any, uploads: Any, model: Any) -> Any:
        memory: Any = [plan.round, (0.1 * plan.round, torch.full((2,), plan.round))]
        if self.box == "set":
            memory = {plan.round}
        return digest(state, plan, uploads, model, memory=memory)


@pytest.mark.parametrize(("box", "first"), [("list", 5), ("set", 1)])
def test_an_own_strategys_memory_is_saved_where_a_file_can_hold_it_and_else_the_strategy_begins_again(
    box: str, first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = tiny({"name": "test_resume:Counting", "label": "own", "participation": 0.5, "box": box})
    whole = feddd.run(one, tmp_path / "whole", workers=1, checkpoint_seconds=0).path
    warnings = [record.message for record in caplog.records]
    folder = interrupted(tmp_path / "run", one, "own", 5)
    assert resumed_rounds(folder)[0] == ("own", first)
    assert_same(folder, whole)
    assert len(warnings) == (box == "set")
    assert all("'own'" in text and "(set)" in text and "begin again" in text for text in warnings)


# One process at a time, and only what can be resumed


FLEET = "client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds,samples,loss\n" + "".join(
    f"{name},{2 + n}e4,1e5,{n}.5,3,1\n" for n, name in enumerate(("oslo", "<b>rio", "7", "ulm", "ä ö"))
)


def test_a_run_with_a_fleet_file_is_moved_resumed_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "links.csv").write_text(FLEET, encoding="utf-8")
    document = tomllib.loads(tiny(FEDDD, rounds=3).to_toml())
    (tmp_path / "own.toml").write_text(tomli_w.dumps(document | {"fleet": {"file": "links.csv"}}))
    one = load_experiment(tmp_path / "own.toml")
    expected = feddd.run(one, tmp_path / "expected", workers=1).path
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "links.csv: a run does not use samples, loss, only `feddd plan` does" in warning
    folder = interrupted(tmp_path / "stopped", one, "feddd", 2)
    (tmp_path / "links.csv").unlink()
    moved = folder.rename(tmp_path / "moved")
    config = tomllib.loads((moved / "config.toml").read_text())
    assert config["fleet"] == {"clients": 5, "file": "fleet.csv"}
    assert (moved / "fleet.csv").read_text(encoding="utf-8") == FLEET
    monkeypatch.chdir("/")
    assert feddd.resume(moved, workers=1).clients == ("oslo", "<b>rio", "7", "ulm", "ä ö")
    assert_same(moved, expected)
    again = feddd.run(moved / "config.toml", tmp_path / "again", workers=1)
    assert_same(again.path, expected)
    page = (again.path / "report.html").read_text(encoding="utf-8")
    assert "<li>5 clients</li>" in page
    assert '"oslo"' in page
    assert "<b>rio" not in page


def test_a_file_named_in_an_experiment_is_looked_for_beside_it_and_then_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("beside", "here"):
        (tmp_path / folder).mkdir()
    (tmp_path / "beside" / "own.toml").write_text('[fleet]\nfile = "fleet.csv"\n')
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here" / "fleet.csv").write_text(FLEET)
    assert load_experiment(tmp_path / "beside" / "own.toml").fleet.file == str(tmp_path / "here" / "fleet.csv")
    (tmp_path / "beside" / "fleet.csv").write_text(FLEET)
    assert load_experiment(tmp_path / "beside" / "own.toml").fleet.file == str(tmp_path / "beside" / "fleet.csv")


def test_somebodys_fleet_file_alone_in_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "fleet.csv").write_text(FLEET)
    with pytest.raises(InputError, match="already holds something"):
        feddd.run(tiny(FEDDD, rounds=1), tmp_path, workers=1)


def test_code_beside_an_experiment_is_found_from_elsewhere_by_workers_and_on_resume(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "own_parts.py").write_text(
        "import feddd\nfrom torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
        "def method():\n    return feddd.FedAvg()\n"
    )
    one = tiny({"name": "own_parts:method", "label": "own"}, rounds=3, model={"name": "own_parts:net"})
    (code / "own.toml").write_text(one.to_toml())
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "out"

    def python(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False)

    begun = python(
        "import feddd\ndef stop(done):\n    if done.record.round == 2: raise KeyboardInterrupt\n"
        f"feddd.run({str(code / 'own.toml')!r}, {str(out)!r}, workers=2, checkpoint_seconds=0, watch=stop)"
    )
    assert "KeyboardInterrupt" in begun.stderr, begun.stderr
    assert str(tmp_path) not in (out / "config.toml").read_text()
    resumed = f"import sys, feddd.cli\nsys.argv = ['feddd', 'run', '--resume', {str(out)!r}]\nfeddd.cli.main()"
    hidden = code.rename(tmp_path / "gone")
    lost = python(resumed)
    assert lost.returncode == 2
    assert f"the run was begun with code from {code}, which is gone" in lost.stderr
    assert lost.stderr.count("\n") == 1
    hidden.rename(code)
    done = python(resumed)
    assert done.returncode == 0, done.stderr


def feddd_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["feddd", *map(str, arguments)])
    try:
        main()
    except SystemExit as stopped:
        return int(str(stopped.code))
    return 0


def test_a_second_process_is_refused_and_readers_are_not(
    both: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def look(_: Progress) -> None:
        assert feddd_main(monkeypatch, "run", "--resume", tmp_path / "run", "--workers", 1) == 2
        error = capsys.readouterr().err
        assert "is in use" in error
        assert error.count("\n") == 1
        assert feddd.load_results(tmp_path / "run").labels == ["feddd", "never"]
        raise Stop

    with pytest.raises(Stop):
        feddd.run(both, tmp_path / "run", workers=1, watch=look)
    with Lock(tmp_path / "run"), pytest.raises(InputError, match="in use"):
        feddd.resume(tmp_path / "run")


def test_what_cannot_be_resumed_is_one_line_and_a_finished_run_is_done_at_once(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "testbed" / "deployment").mkdir(parents=True)
    (tmp_path / "testbed" / "config.toml").write_text("")
    resume = ["run", "--resume"]
    wrong: list[tuple[Sequence[object], str]] = [
        ([*resume, tmp_path / "nowhere"], "not a run's folder"),
        ([*resume, tmp_path], "not a run's folder"),
        ([*resume, tmp_path / "testbed"], "feddd testbed"),
        (["run", "quickstart", "--resume", undisturbed], "EXPERIMENT cannot be given with --resume"),
        ([*resume, undisturbed, "--rounds", 3], "has 8 rounds already, and none can be taken away"),
        ([*resume, undisturbed, "--set", "a=1"], "--set cannot be given with --resume"),
        ([*resume, undisturbed, "--out", "x"], "--out cannot be given with --resume"),
        ([*resume, undisturbed, "--seed", 0], "--seed cannot be given with --resume"),
        (["run", "--checkpoint-seconds", -1], "--checkpoint-seconds must be"),
    ]
    for arguments, message in wrong:
        assert feddd_main(monkeypatch, *arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    before = {path: path.stat().st_mtime_ns for path in undisturbed.iterdir()}
    assert feddd_main(monkeypatch, *resume, undisturbed, "--workers", 1) == 0
    assert "is finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in undisturbed.iterdir()} == before


def test_a_run_does_not_go_on_with_another_config_and_its_folder_is_named_when_it_is_in_the_way(
    both: Experiment, stopped: Path
) -> None:
    with pytest.raises(InputError, match=f"feddd run --resume {stopped}"):
        feddd.run(both, stopped, workers=1)
    config = stopped / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.05", "learning_rate = 0.06"))
    with pytest.raises(InputError, match=r"its config\.toml"):
        feddd.resume(stopped, workers=1)


# Disks, permissions, signals


@pytest.mark.parametrize("file", ["rounds.parquet", "2-", "model-feddd.safetensors", "summary.json", "report.html"])
def test_a_full_disk_ends_with_one_line_that_says_how_to_go_on(
    file: str,
    both: Experiment,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(path: Path, content: bytes) -> None:
        if file in path.name and ("report" not in file or b'http-equiv="refresh"' not in content):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_atomically(path, content)

    (tmp_path / "both.toml").write_text(both.to_toml())
    run = ["run", tmp_path / "both.toml", "--out", tmp_path / "run", "--workers", 1, "--checkpoint-seconds", 0]
    with monkeypatch.context() as patch:
        for module in ("checkpoints", "folders", "tables", "report"):
            patch.setattr(f"feddd.experiments.{module}.write_atomically", full)
        assert feddd_main(monkeypatch, *run) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"No space left on device; go on with: feddd run --resume {tmp_path / 'run'}\n" in error
    assert feddd_main(monkeypatch, "run", "--resume", tmp_path / "run", "--workers", 1) == 0
    assert_same(tmp_path / "run", undisturbed)


def test_a_folder_that_cannot_be_filled_is_not_left_behind(
    both: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with monkeypatch.context() as patch:
            patch.setattr(folders, "write_atomically", full)
            with pytest.raises(OSError, match="No space"):
                feddd.run(both, tmp_path / name, workers=1)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_what_a_run_leaves_that_died_before_its_config_is_no_obstacle(tmp_path: Path) -> None:
    one = tiny({"name": "fedavg"}, rounds=1)
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "lock").touch()
    (tmp_path / "run" / ".config.toml.01234567").write_text("name =")
    feddd.run(one, tmp_path / "run", workers=1)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_ends_a_run_with_one_line_that_says_how_to_go_on(
    number: int, code: int, word: str, tmp_path: Path
) -> None:
    one = tiny(FEDDD, rounds=100_000)
    (tmp_path / "one.toml").write_text(one.to_toml())
    command = [sys.executable, "-m", "feddd", "run", "one.toml", "--out", "my run", "--checkpoint-seconds", "0"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        deadline = time.monotonic() + 120
        while not saved(tmp_path / "my run") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert stderr.count("\n") == 1
    assert word in stderr
    assert stderr.endswith("; go on with: feddd run --resume 'my run'\n")
    done = tmp_path / "my run"
    with pytest.raises(Stop):
        feddd.resume(done, workers=1, watch=lambda seen: (_ for _ in ()).throw(Stop) if seen.record.round > 1 else None)


def test_an_interrupted_reproduction_says_that_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("feddd.experiments.cells.Store.run", interrupt)
    command = ["reproduce", "accuracy-iid", "--only", "mnist", "--scale", "smoke", "--out", tmp_path]
    assert feddd_main(monkeypatch, *command) == 143
    assert capsys.readouterr().err.endswith(
        "ended by SIGTERM; what is finished is kept, and the same command goes on\n"
    )


# Kills at any moment


class Server:
    """Starts runs quickly, and kills them: tests/kill_server.py in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, one: Experiment, folder: Path, kill_after: float | None = None, workers: int = 1) -> dict[str, Any]:
        order = {"experiment": one.model_dump(mode="json", exclude_none=True), "folder": str(folder)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order | {"workers": workers, "kill_after": kill_after}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert answer["code"] in (0, -signal.SIGKILL)
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = [sys.executable, str(Path(__file__).parent / "kill_server.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def kill_and_resume(server: Server, one: Experiment, tmp_path: Path, kills: int, workers: Sequence[int] = (1,)) -> None:
    """Kill at so many random moments, resume, and compare; a run that was quicker is compared, and another begun."""
    whole = server.run(one, tmp_path / "whole")
    assert whole["code"] == 0
    moments, folder = random.Random(one.name), tmp_path / "0"
    for number in range(kills):
        while not server.run(one, folder, moments.uniform(0.0, whole["seconds"]), workers[number % len(workers)])[
            "code"
        ]:
            assert_same(folder, tmp_path / "whole")
            folder = folder.with_name(f"{int(folder.name) + 1}")
        assert not folder.exists() or (folder / "config.toml").is_file()
    assert server.run(one, folder)["code"] == 0
    assert_same(folder, tmp_path / "whole")


OORT = tiny({"name": "oort"}, name="oort", rounds=45, fleet={"clients": 4}, data={"train_limit": 40})
"""The pacer first compares two windows in round 40."""
EXPERIMENTS = [
    tiny(FEDDD, name="every-3"),
    tiny(NEVER, name="never"),
    tiny(FEDDD | {"broadcast_every": 100}, name="every-100", evaluate_every=3),
    tiny({"name": "fedavg", "participation": 0.5}, name="fedavg"),
    tiny({"name": "fedcs"}, name="fedcs"),
    tiny(FEDDD | {"value_bits": 2, "error_feedback": "all"}, name="feedback"),
    OORT,
    tiny(FEDDD, NEVER, {"name": "oort"}, {"name": "fedavg"}, {"name": "fedcs"}, name="all", rounds=4),
    tiny(
        FEDDD,
        NEVER,
        name="widths",
        rounds=4,
        model={"name": "heterogeneous-b/16"},
        data={"dataset": "synthetic-colour", "train_limit": 60},
    ),
]


def test_a_run_that_is_killed_at_random_moments_ends_as_if_nothing_had_happened(
    server: Server, both: Experiment, tmp_path: Path
) -> None:
    kill_and_resume(server, both, tmp_path, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("one", EXPERIMENTS, ids=lambda one: one.name)
def test_every_strategy_survives_kills_at_random_moments(one: Experiment, server: Server, tmp_path: Path) -> None:
    kill_and_resume(server, one, tmp_path, kills=4)


@pytest.mark.slow
def test_kills_with_other_numbers_of_workers_change_nothing(server: Server, tmp_path: Path) -> None:
    kill_and_resume(server, tiny(FEDDD, NEVER, name="workers", rounds=20), tmp_path, kills=4, workers=(2, 1, 3, 2))
