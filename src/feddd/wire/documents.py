"""Chains and downloads as texts that travel in messages; a receiver makes only what it knows, by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from feddd.wire.difference import Difference, Feedback
from feddd.wire.down import Down, Moves, SubModel, Values
from feddd.wire.eden import Eden
from feddd.wire.exchange import Chain
from feddd.wire.quantised import Bits, Ternary
from feddd.wire.select import Blocks, Given, Select, TopK
from feddd.wire.stage import Stage

BUILT_IN: tuple[type[Stage], ...] = (Select, Given, Blocks, TopK, Difference, Feedback, Bits, Ternary, Eden)
_DOWNS: dict[str, type[Any]] = {"values": Values, "sub-model": SubModel, "moves": Moves}

Vocabulary = Mapping[str, Callable[..., Any]]
"""What a receiver knows: stages, and functions that stages are given, by name."""


def vocabulary(more: Iterable[Callable[..., Any]] = ()) -> Vocabulary:
    """Return the stages of this package and those of the user's own, by name."""
    known: list[Callable[..., Any]] = [*BUILT_IN, *more]
    return {one.__name__: one for one in known}


def chain_text(line: Chain) -> str:
    """Return a chain as JSON: stages by name with their settings."""
    return json.dumps([[type(stage).__name__, _settings(stage)] for stage in line.stages])


def read_chain(text: str, known: Vocabulary) -> Chain:
    """Return the chain; ValueError for a stage that is not known here, and for settings that it refuses."""
    stages = []
    for name, settings in json.loads(text):
        made = known.get(name)
        if not (isinstance(made, type) and issubclass(made, Stage)):
            raise ValueError(f"stage {name!r} is not known here; feddd_mod(…, stages=[{name}]) makes a client know it")
        stages.append(made(**{key: _value(value, known) for key, value in settings.items()}))
    return Chain(tuple(stages))


def down_text(down: Down) -> str:
    """Return a download as JSON. The mask of values is left out: a client knows what it sent last."""
    name = next(name for name, kind in _DOWNS.items() if type(down) is kind)
    document: dict[str, Any] = {"kind": name, "masked": down.mask is not None}
    if isinstance(down, SubModel):
        document["mask"] = (down.mask or b"").hex()
    if isinstance(down, Moves):
        document |= {"coding": chain_text(down.coding), "broadcast": down.broadcast}
    return json.dumps(document)


def read_down(text: str, mask: bytes | None, known: Vocabulary) -> Down:
    """Return the download; mask: what the client sent last, None if it knows nothing of that."""
    document = json.loads(text)
    kind = document.get("kind")
    own = mask if document.get("masked") is True else None
    if document.get("masked") is True and mask is None and kind != "sub-model":
        raise ValueError("the download is of the units that this client sent last, and it knows of none")
    if kind == "values":
        return Values(own)
    if kind == "sub-model":
        return SubModel(bytes.fromhex(document["mask"]))
    if kind == "moves":
        return Moves(own, read_chain(document["coding"], known), document["broadcast"] is True)
    raise ValueError(f"download {kind!r} is not known here")


def _settings(stage: Stage) -> dict[str, Any]:
    fields = dataclasses.fields(stage)  # type: ignore[arg-type]  # stages are dataclasses
    return {one.name: _plain(getattr(stage, one.name)) for one in fields}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if callable(value):
        return {"known": value.__name__}
    return value


def _value(value: Any, known: Vocabulary) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "tuple":
        return tuple(_value(item, known) for item in content)
    if kind == "known" and content in known:
        return known[content]
    raise ValueError(f"{content!r} is not known here; feddd_mod(…, stages=[…]) lists what a client knows")
