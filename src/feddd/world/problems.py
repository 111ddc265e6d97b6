"""Data sets that are not pictures, read from the plain files that a fetch has left: text, a table, a regression.

shakespeare   the next character in 80, one client per speaker of 36 plays; the last tenth of what each says is for
              testing
letters       one of 26 letters from 16 numbers about its picture; the last 4,000 of 20,000 are for testing, as its
              authors have it
flights       by how many hours a flight from New York arrives late, from what is known at departure, one client per
              carrier; every tenth flight is for testing
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from feddd.world.dataset import Dataset

WINDOW = 80
"""Characters in one sample."""
LEAST_WINDOWS = 10
"""Speakers who say less are left out."""
Floats = NDArray[np.float64]


def shakespeare(folder: Path) -> Dataset:
    """Return windows of characters, and the same windows one character later, by speaker."""
    said: dict[str, list[str]] = {}
    for line in (folder / "speeches.jsonl").read_text(encoding="utf-8").splitlines():
        speech = json.loads(line)
        said.setdefault(f"{speech['play']}: {speech['speaker']}", []).append(speech["text"])
    texts = {speaker: "\n".join(speeches) for speaker, speeches in said.items()}
    characters = sorted(set().union(*texts.values()))
    number = {character: place for place, character in enumerate(characters)}
    parts: dict[str, list[NDArray[np.int64]]] = {"train": [], "test": []}
    owners: list[str] = []
    for speaker, text in sorted(texts.items()):
        windows = _windows(np.array([number[character] for character in text], dtype=np.int64))
        if len(windows) < LEAST_WINDOWS:
            continue
        tested = len(windows) // 10
        parts["train"].append(windows[:-tested])
        parts["test"].append(windows[-tested:])
        owners += [speaker] * (len(windows) - tested)
    train, test = (np.concatenate(windows) for windows in parts.values())
    return Dataset(train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:], clients=owners, classes=characters)


def _windows(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut a text into windows that each begin with the last character of the one before; what is left over is lost."""
    count = (len(tokens) - 1) // WINDOW
    return np.stack([tokens[n * WINDOW : n * WINDOW + WINDOW + 1] for n in range(count)]) if count else tokens[:0]


def letters(folder: Path) -> Dataset:
    """Return the numbers about each picture, standardised by the training samples, and the letter."""
    table = _read(folder / "letters.csv")
    targets = _words(table, "lettr")
    inputs = np.stack([_numbers(table, name) for name in table.column_names if name != "lettr"], axis=1)
    train = slice(0, 16_000)
    inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0)
    names = sorted(set(targets.tolist()))
    return Dataset(inputs[train], targets[train], inputs[16_000:], targets[16_000:], classes=names)


def flights(folder: Path) -> Dataset:
    """Return what is known when a flight departs, by how many hours it arrives late, and the carrier."""
    table = _read(folder / "flights.csv")
    known = {name: _numbers(table, name) for name in ("arr_delay", "dep_delay", "distance", "month", "hour", "day")}
    flown = np.flatnonzero(np.isfinite(known["arr_delay"]) & np.isfinite(known["dep_delay"]))
    known = {name: column[flown] for name, column in known.items()}
    origin, carrier = (_words(table, name)[flown] for name in ("origin", "carrier"))
    inputs = [known["dep_delay"] / 60, known["distance"] / 1000, known["day"] / 31]
    inputs += [np.sin(turn) for turn in _turns(known)] + [np.cos(turn) for turn in _turns(known)]
    inputs += [origin == name for name in sorted(set(origin.tolist()))]
    features, hours = np.stack(inputs, axis=1).astype(np.float32), (known["arr_delay"] / 60).astype(np.float32)
    tested = np.arange(len(hours)) % 10 == 9
    return Dataset(features[~tested], hours[~tested], features[tested], hours[tested], clients=carrier[~tested])


def _turns(known: Mapping[str, Floats]) -> list[Floats]:
    """Return the hour and the month as angles: the last comes before the first."""
    return [2 * np.pi * known["hour"] / 24, 2 * np.pi * known["month"] / 12]


def _read(path: Path) -> pa.Table:
    options = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    return pa.csv.read_csv(path, convert_options=options)


def _numbers(table: pa.Table, name: str) -> Floats:
    """Return a column, NaN where nothing is given."""
    return np.asarray(table[name].to_numpy(), dtype=np.float64)


def _words(table: pa.Table, name: str) -> NDArray[np.str_]:
    return np.array(table[name].to_pylist(), dtype=str)


PROBLEMS: Mapping[str, Callable[[Path], Dataset]] = {
    "shakespeare": shakespeare,
    "letters": letters,
    "flights": flights,
}
