"""What a run's folder must look like before anything is made of it: it may come from a stranger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from feddd.files import parse_json, read_text

# A table may have so many rows for every byte of its file, and a few without: real ones have less than one. A file of
# a few bytes can announce billions, all the same.
ROWS_PER_BYTE, ROWS_BESIDES = 4, 100_000
_MOST_CHARACTERS = 1000
_WORDS = pa.dictionary(pa.int32(), pa.string())
_MOST_INTEGER, _MOST_NUMBER = 2**53, 1e39  # the loss of a model that is about to diverge may be any float32
# What names a row; everything else is null where it is not known.
_NEEDED = {"strategy", "seed", "round", "client", "status", "label"}


class _Strategy(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    label: str
    participation: float = 1.0


class _Task(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    metric: Annotated[str, Field(max_length=_MOST_CHARACTERS)] = "accuracy"
    higher_is_better: bool = True


class _Config(BaseModel):
    """Of a resolved config, what tables and pages are made from; other versions may have other keys."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str
    seed: int
    rounds: int
    targets: list[Annotated[float, Field(ge=-_MOST_NUMBER, le=_MOST_NUMBER)]]
    task: _Task = _Task()
    data: dict[str, Any] = {}
    fleet: dict[str, Any] = {}
    model: dict[str, Any] = {}
    strategy: Annotated[list[_Strategy], Field(min_length=1)]

    @model_validator(mode="after")
    def _labels_are_unique(self) -> _Config:
        if len({one.label for one in self.strategy}) < len(self.strategy):
            raise ValueError("two strategies have the same label")
        return self


def check_config(config: Mapping[str, Any]) -> None:
    """ValueError if a resolved config lacks what tables and pages are made from."""
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"config.toml, {key or 'as a whole'}: {first['msg']}") from None


def read_checked(path: Path, schema: Any) -> Any:
    """Return the table with exactly these columns; ValueError, OSError or ArrowException if it is not one of ours."""
    texts = [field.name for field in schema if field.type == pa.string()]
    try:
        # Texts as a dictionary: one long text a million times over stays one until its length is known.
        file = pq.ParquetFile(path, read_dictionary=texts)
    except KeyError as error:
        raise ValueError(f"{path.name} has no column {error}") from None
    with file:
        # Tables from before metrics had names: what was tested is the accuracy.
        older = "test_metric" in schema.names and "test_metric" not in file.schema_arrow.names
        wanted, schema = schema, _without_metric(schema) if older else schema
        for field in schema:
            at = file.schema_arrow.get_field_index(field.name)  # −1 also where there are two
            found = file.schema_arrow.field(at).type if at >= 0 else None
            if found != (_WORDS if field.name in texts else field.type):
                raise ValueError(f"{path.name}: the column {field.name} is {found or 'missing'}, not {field.type}")
        found = pa.Table.from_batches(_bounded(file, schema, path), schema=schema)
        return found.append_column("test_metric", found["test_accuracy"]).select(wanted.names) if older else found


def _without_metric(schema: Any) -> Any:
    return schema.remove(schema.get_field_index("test_metric"))


def read_names(path: Path, key: str) -> tuple[str, ...]:
    """Return the names that a run's data.json has under a key; none where it has none that can be shown."""
    try:
        found = parse_json(read_text(path)).get(key, []) if path.is_file() else []
    except (OSError, ValueError):
        return ()
    fine = isinstance(found, list) and all(isinstance(name, str) and len(name) <= _MOST_CHARACTERS for name in found)
    return tuple("".join(c if c.isprintable() else "\ufffd" for c in name) for name in found) if fine else ()


def _bounded(file: Any, schema: Any, path: Path) -> Iterator[Any]:
    """Return the rows that the file announces, which may not be too many for its size, a batch at a time."""
    # No more is asked of what a file says about itself: pyarrow ends the process over some lies there.
    announced, size, seen = file.metadata.num_rows, path.stat().st_size, 0
    if announced > ROWS_BESIDES + ROWS_PER_BYTE * size:
        raise ValueError(f"{path.name} announces {announced} rows in {size} bytes")
    for batch in file.iter_batches(columns=schema.names):
        seen += batch.num_rows
        if seen > announced:
            raise ValueError(f"{path.name} has more than the {announced} rows that it announces")
        for field in schema:
            if problem := _problem(batch.column(field.name), field):
                raise ValueError(f"{path.name}: {field.name} {problem}")
        yield batch.select(schema.names).cast(schema)


def _problem(column: Any, field: Any) -> str | None:
    if column.null_count and field.name in _NEEDED:
        return "is null"
    if field.type == pa.string():
        longest = pc.max(pc.utf8_length(column.dictionary)).as_py() or 0
        return f"has {longest} characters" if longest > _MOST_CHARACTERS else None
    most = _MOST_INTEGER if field.type == pa.int64() else _MOST_NUMBER
    within = pc.less_equal(pc.abs(column.drop_null().cast(pa.float64(), safe=False)), most)
    return None if pc.all(within, min_count=0).as_py() else f"is not finite, or larger than {most:g}"
