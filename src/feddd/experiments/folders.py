"""A run's folder: it appears with its config, belongs to one process at a time, and is summed up at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import json
import logging
import os
import platform
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.torch
from torch import Tensor

from feddd.errors import InputError
from feddd.experiments.config import Experiment
from feddd.experiments.report import write_report
from feddd.experiments.results import CHECKPOINTS, FLEET_FILE, LAST, Results, is_finished, load_results, summarise
from feddd.files import distinct_names, portable_name, sync_folder, write_atomically

IDENTITY = "run.json"
"""Among the checkpoints: what the run's numbers come from."""
REFRESH_SECONDS = 30
"""An open page about a run that goes on loads itself again after so long."""

log = logging.getLogger("feddd")


class Lock:
    """Holds a run's folder for this process; the system lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        path = folder / CHECKPOINTS / "lock"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(f"{folder} is in use: another process is running or resuming it") from None
        except OSError as error:  # a file system without locks
            log.warning("%s cannot be locked (%s); see to it that only one process runs it", folder, error.strerror)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def create_folder(
    experiment: Experiment, out: str | os.PathLike[str] | None, identity: Mapping[str, Any]
) -> tuple[Path, Lock]:
    """A run's folder with its config, both at once, and ours already; identity: what `resume` must find again."""
    folder = free_folder(experiment, out)
    about = environment(experiment.seed)
    # Made under another name: nobody sees a folder without a config. One that is there already is filled, config last.
    made = folder if folder.exists() else folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        made.mkdir(parents=True, exist_ok=True)
        lock = Lock(made)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        _write_text(made / CHECKPOINTS / IDENTITY, to_json(identity))
        begin_folder(made, experiment, about)
        sync_folder(made)
        if made != folder:
            made.rename(folder)
            sync_folder(folder.parent)
    except BaseException as error:
        with lock:
            if made == folder:
                (made / FLEET_FILE).unlink(missing_ok=True)
            shutil.rmtree(made / CHECKPOINTS if made == folder else made, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise _taken(folder) from None
        raise
    return folder, lock


def free_folder(experiment: Experiment, out: str | os.PathLike[str] | None) -> Path:
    """Return the folder for a new run; one that holds something is refused."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = Path(out) if out is not None else Path("runs") / portable_name(f"{experiment.name}-{stamp}")
    try:
        if folder.exists() and (not folder.is_dir() or not _is_empty(folder)):
            raise _taken(folder)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return folder


def _taken(folder: Path) -> InputError:
    begun = any((folder / name).is_file() for name in ("config.toml", "sweep.toml")) and not is_finished(folder)
    hint = f"; `feddd run --resume {folder}` goes on with it" if begun else ""
    return InputError(f"{folder} already holds something; give --out another folder, nothing is overwritten{hint}")


def _is_empty(folder: Path) -> bool:
    """Return whether nothing is in it but what a run leaves that was killed before it had written its config."""
    inner = {path.name for path in (folder / CHECKPOINTS).glob("*")}
    # Without the run's own folder beside it a fleet's file is somebody else's.
    ours = rf"|\.?{re.escape(FLEET_FILE)}(\.\w{{8}})?" if IDENTITY in inner else ""
    unborn = re.compile(rf"environment\.json|{CHECKPOINTS}|\.(config\.toml|environment\.json)\.\w{{8}}{ours}")
    return all(unborn.fullmatch(path.name) for path in folder.iterdir()) and inner <= {"lock", IDENTITY}


def new_folder(experiment: Experiment, out: str | os.PathLike[str] | None) -> Path:
    """Return a folder that holds nothing yet; anything that does is refused."""
    folder = free_folder(experiment, out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return folder


def begin_folder(folder: Path, experiment: Experiment, about: Mapping[str, Any] | None = None) -> None:
    """What a run's folder holds from the start: where it runs, its fleet's file, and the resolved config."""
    write_environment(folder, about or environment(experiment.seed))
    if experiment.fleet.file is not None:
        write_atomically(folder / FLEET_FILE, Path(experiment.fleet.file).read_bytes())
    _write_text(folder / "config.toml", recorded(experiment).to_toml())


def recorded(experiment: Experiment) -> Experiment:
    """The experiment as a run's config.toml has it: the fleet's file lies beside, wherever the folder is moved."""
    if experiment.fleet.file is None:
        return experiment
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"file": FLEET_FILE})})


def write_environment(folder: Path, about: Mapping[str, Any]) -> None:
    """environment.json"""
    _write_text(folder / "environment.json", to_json(about))


def environment(seed: int) -> dict[str, Any]:
    """Versions, machine and commit behind a run."""
    return {
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "versions": versions(),
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Return the versions of this package and those that numbers depend on."""
    return {name: metadata.version(name) for name in ("feddd", "torch", "numpy", "scipy", "pyarrow")}


@functools.cache
def _commit() -> str | None:
    """Return the commit of the checkout that this package runs from; None for an installed package."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        top = subprocess.run([*command[:3], "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() if top.returncode == 0 and found.returncode == 0 else None


def report_so_far(folder: Path) -> None:
    """A page about a run that goes on, which loads itself again when it is open."""
    # Where there is no room for the page there may be for the tables, which are what counts; and a table that was
    # damaged before the run was resumed is written anew.
    with contextlib.suppress(OSError, InputError):
        write_report([load_results(folder)], folder / "report.html", refresh_seconds=REFRESH_SECONDS)


def finish_folder(folder: Path) -> Results:
    """Sum up and draw what the tables say; after that there is nothing to go on with."""
    tables = load_results(folder)
    results = dataclasses.replace(tables, summary=summarise(tables))
    _write_text(folder / "summary.json", to_json(results.summary))
    write_report([results], folder / "report.html")
    keep_identity(folder)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return results


def keep_identity(folder: Path) -> None:
    """What `resume` must find again is asked again when a finished run gets more rounds."""
    found, kept = folder / CHECKPOINTS / IDENTITY, folder / LAST
    if kept.is_dir() and found.is_file():
        write_atomically(kept / IDENTITY, found.read_bytes())


def model_file(folder: Path, experiment: Experiment, label: str) -> Path:
    """Return where a strategy's final model is; it is there when the strategy is finished."""
    names = distinct_names(section.label for section in experiment.strategy)
    return folder / f"model-{names[label]}.safetensors"


def write_model(path: Path, model: Mapping[str, Tensor]) -> None:
    """Save a global model; tied tensors once each, because the format does not share memory."""
    first: dict[int, str] = {}
    untied = {
        name: t.contiguous() for name, t in model.items() if first.setdefault(t.data_ptr() or id(t), name) == name
    }
    sync_folder(path.parent)  # the tables come first
    write_atomically(path, safetensors.torch.save(untied))
    sync_folder(path.parent)


def to_json(document: Any) -> str:
    """Return a document for people and programs; NaN and infinity are refused."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, text.encode())
