"""What the verbs have in common: options that mean the same everywhere, and JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand

from feddd.errors import RunError

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where the data sets lie (else $FEDDD_DATA, else the user's cache).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. training.epochs=3, strategy.feddd.budget=0.4."),
]
Seeds = Annotated[
    int | None, typer.Option(metavar="N", help="Run N seeds, from the experiment's upwards, into one folder.")
]
Sweep = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=A,B,…", help="Run with each of these values; several times: every combination."),
]
Track = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Tell tensorboard, mlflow, wandb or package.module:Class of every round."),
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


class Verb(TyperCommand):
    """A command that refuses an option of one value given twice, instead of taking the last one silently."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Look at the options as they were given, then parse them as always."""
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in given:
            one_value = isinstance(option, click.Option) and not (option.multiple or option.is_flag or option.count)
            if one_value and given.count(option) > 1:
                raise click.UsageError(f"{option.opts[0]} is given {given.count(option)} times; it takes one value")
        return super().parse_args(ctx, args)


class Stopped(RunError):
    """Somebody asked a verb to end; the message says how to go on."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Terminated(KeyboardInterrupt):
    """SIGTERM: all that tidies up after Ctrl-C tidies up after it too."""


@contextlib.contextmanager
def stoppable(advice: str = "") -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is inside tidily, as `Stopped`; advice: how to go on, if nobody inside knows."""

    def terminate(_: int, __: FrameType | None) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        what, number = ("ended by SIGTERM", signal.SIGTERM) if isinstance(error, _Terminated) else _CTRL_C
        notes = getattr(error, "__notes__", None) or ([advice] if advice else [])
        raise Stopped("; ".join([what, *notes]), 128 + number) from error
    finally:
        signal.signal(signal.SIGTERM, before)


_CTRL_C = ("interrupted", signal.SIGINT)


def print_json(document: Any) -> None:
    """A document on stdout; NaN and infinity are refused."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))
