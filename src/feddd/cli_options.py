"""What the verbs have in common: options that mean the same everywhere, and JSON on stdout."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where the data sets lie (else $FEDDD_DATA, else the user's cache).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. training.epochs=3, strategy.feddd.budget=0.4."),
]


class Engine(StrEnum):
    """Where the workers of a simulation run."""

    local = "local"
    ray = "ray"


class ScaleChoice(StrEnum):
    """How large the paper's experiments are run."""

    smoke = "smoke"
    small = "small"
    full = "full"


def print_json(document: Any) -> None:
    """A document on stdout; NaN and infinity are refused."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))
