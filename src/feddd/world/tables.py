"""A table as a data set: a column is the target, another may be the owner, all the others are what is learnt from.

Numbers become float32 with the training rows' mean 0 and deviation 1; true and false become 1 and 0; a text column
becomes one column for each of its values in the training rows (one-hot), all zero for a value that only test rows have.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from feddd.errors import InputError, nearest
from feddd.world.dataset import Dataset

SPLIT = "split"
"""The column that says train or test."""
TEST_SHARE = 0.2
MOST_VALUES = 200
"""A text column may have so many different values: each becomes a column."""


def read_table(
    path: Path,
    *,
    target: str,
    client: str | None = None,
    test_share: float | None = None,
    standardise: bool = True,
    classes: bool = True,
    rng: np.random.Generator,
) -> Dataset:
    """Read a CSV or Parquet table.

    test_share: of the rows, drawn with rng, where no column "split" says train or test (0.2 if left out)
    classes: whether targets are classes, whatever values they have, or numbers
    """
    try:
        table = pyarrow.csv.read_csv(path) if path.suffix.lower() == ".csv" else pq.read_table(path)
        names: list[str] = table.column_names
    except (pa.ArrowException, ValueError) as error:
        raise InputError(f"it cannot be read: {' '.join(str(error).split())}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"it has two columns {twice!r}")
    for what, name in (("target", target), ("client", client)):
        if name is not None and name not in names:
            raise InputError(f"it has no column {name!r} for {what}; {nearest(name, names)}")
    for name in names:
        if missing := _missing(table[name]):
            raise InputError(f"column {name!r} has no value in {missing} of {table.num_rows} rows; fill or drop them")
    test = _test_rows(table, test_share, rng)
    features = [name for name in names if name not in (target, client, SPLIT)]
    if not features:
        raise InputError("it has no columns to learn from beside the target and the client")
    columns = [_feature(table[name], name, ~test, standardise=standardise) for name in features]
    inputs = np.concatenate(columns, axis=1)
    targets, labels = _targets(table[target], target, classes=classes)
    owners = None if client is None else _texts(table[client])[~test]
    return Dataset(inputs[~test], targets[~test], inputs[test], targets[test], owners, labels)


def _missing(column: Any) -> int:
    count = column.null_count
    if pa.types.is_floating(column.type):
        count += pc.sum(pc.is_nan(column)).as_py() or 0
    return int(count)


def _test_rows(table: Any, share: float | None, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which rows are for testing."""
    rows = table.num_rows
    if SPLIT in table.column_names:
        if share is not None:
            raise InputError(f"it has a column {SPLIT!r}; leave test_share out, or the column")
        words = _texts(table[SPLIT])
        wrong = next((word for word in words.tolist() if word not in ("train", "test")), None)
        if wrong is not None:
            raise InputError(f"column {SPLIT!r} holds {wrong!r}; it says train or test")
        test: NDArray[np.bool_] = words == "test"
    else:
        count = round((TEST_SHARE if share is None else share) * rows)
        test = np.zeros(rows, np.bool_)
        test[rng.permutation(rows)[: min(max(count, 1), rows)]] = True
    if test.all() or not test.any():
        raise InputError(f"{rows} rows leave nothing to {'train' if test.all() else 'test'} on")
    return test


def _texts(column: Any) -> NDArray[Any]:
    return np.array([str(value) for value in column.to_pylist()], dtype=str)


def _is_text(kind: Any) -> bool:
    words = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(words) or pa.types.is_large_string(words))


def _feature(column: Any, name: str, train: NDArray[np.bool_], *, standardise: bool) -> NDArray[np.float64]:
    """Return a column as numbers, [rows, 1], or [rows, values] for a text."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.to_numpy().astype(np.float64)[:, None]  # type: ignore[no-any-return]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        numbers = column.cast(pa.float64()).to_numpy()
        if not np.isfinite(numbers).all():
            raise InputError(f"column {name!r} holds {numbers[~np.isfinite(numbers)][0]}; all numbers must be finite")
        if standardise:
            mean, deviation = numbers[train].mean(), numbers[train].std()
            numbers = (numbers - mean) / (deviation if deviation > 0 else 1.0)
        return numbers[:, None]  # type: ignore[no-any-return]
    if not _is_text(kind):
        raise InputError(f"column {name!r} holds {kind}; columns are numbers, true and false, or texts")
    words = _texts(column)
    values = np.unique(words[train])
    if len(values) > MOST_VALUES:
        raise InputError(
            f"text column {name!r} has {len(values)} different values, more than {MOST_VALUES}: leave it out"
        )
    hot: NDArray[np.float64] = (words[:, None] == values[None]).astype(np.float64)
    return hot


def _targets(column: Any, name: str, *, classes: bool) -> tuple[NDArray[Any], Sequence[str] | None]:
    """Return the targets, and the names of classes in the order of their values."""
    kind = column.type
    if _is_text(kind) or pa.types.is_boolean(kind):
        words = _texts(column)
        names, numbers = np.unique(words, return_inverse=True)
        return numbers.astype(np.int64), names.tolist()
    if pa.types.is_integer(kind) and classes:
        values, numbers = np.unique(column.to_numpy(), return_inverse=True)
        return numbers.astype(np.int64), [str(value) for value in values.tolist()]
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(), None
    raise InputError(f"the target's column {name!r} holds {kind}; it takes numbers or texts")
