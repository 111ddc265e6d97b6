"""A compressor from outside the package, named by its import path in a TOML, runs like one of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import feddd

THEIRS = Path(__file__).parent / "strangers" / "sign_compression.py"
TOML = """
rounds = 3
data = { dataset = "fashion-mnist-mini", train_limit = 200 }
fleet = { clients = 5 }

[[strategy]]
name = "sign_compression:make"
label = "signs"
feedback = true

[[strategy]]
name = "fedavg"
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_it_runs_and_the_bytes_charged_are_the_bytes_written(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(THEIRS, tmp_path)
    (tmp_path / "experiment.toml").write_text(TOML, encoding="utf-8")
    plain, written = (
        feddd.run(tmp_path / "experiment.toml", tmp_path / f"wire-{wire}", workers=workers, wire=wire)
        for wire in (False, True)
    )
    for name in ("rounds", "clients", "classes"):
        assert plain.tables[name].equals(written.tables[name])
    sizes = {row["strategy"]: row["upload_bytes"] for row in plain.tables["clients"].to_pylist()}
    assert 30 < sizes["fedavg"] / sizes["signs"] < 32
    losses = [row["test_loss"] for row in plain.tables["rounds"].to_pylist() if row["strategy"] == "signs"]
    assert losses[-1] < losses[0]
