"""The verb `presets`: the table of contents, what a name stands for, and its TOML."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from feddd.cli_options import Json, Verb, print_json
from feddd.errors import InputError, nearest

SCREEN = 80
"""Columns of a terminal that the table of contents fits into."""


class WordsOrCommand(TyperGroup):
    """A group of commands in which anything else is a word to look for."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take `presets WORD` as `presets find WORD`."""
        return super().resolve_command(ctx, args if args[0] in self.commands else ["find", *args])


presets_app = typer.Typer(
    cls=WordsOrCommand,
    help="What can be run, and its TOML. With a WORD: the presets that have it in their name or description.",
    invoke_without_command=True,
    subcommand_metavar="[WORD... | COMMAND]",
)


@presets_app.callback()
def presets(context: typer.Context, as_json: Json = False) -> None:
    """Print the table of contents."""
    context.obj = as_json
    if context.invoked_subcommand is None:
        from feddd.experiments.presets import presets as known

        if as_json:
            _print_rows(known(), as_json=True)
        else:
            typer.echo(_contents())


@presets_app.command("find", cls=Verb)
def presets_find(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="All must be in a name or its description.")],
    as_json: Json = False,
) -> None:
    """List the presets with all of these words, one line each; the word `find` may be left out."""
    from feddd.experiments.presets import presets as known

    texts = {name: f"{name} {preset.about}".casefold() for name, preset in known().items()}
    found = [name for name, text in texts.items() if all(word.casefold() in text for word in words)]
    if not found:
        hint = nearest(words[0], ("show", *known()), "`feddd presets` lists them")
        raise InputError(f"no preset has {' and '.join(map(repr, words))} in its name or description; {hint}")
    _print_rows(found, as_json=as_json or context.obj)


@presets_app.command("show", cls=Verb)
def presets_show(context: typer.Context, name: str, as_json: Json = False) -> None:
    """Print a preset's TOML, a start for a file of your own; --json prints it with every default filled in."""
    from feddd.experiments.loading import load_experiment
    from feddd.experiments.presets import presets as known

    experiment = load_experiment(name)
    if as_json or context.obj:
        print_json(experiment.model_dump(mode="json", exclude_none=True))
    else:
        typer.echo(known()[name].toml if name in known() else experiment.to_toml(), nl=False)


def _print_rows(names: Iterable[str], *, as_json: bool) -> None:
    from feddd.experiments.presets import presets as known

    rows = [known()[name] for name in names]
    if as_json:
        print_json([{"name": row.name, "group": row.family, "about": row.about} for row in rows])
        return
    width = max(len(row.name) for row in rows)
    for row in rows:
        typer.echo(f"{row.name:<{width}}  {row.about}")


def _contents() -> str:
    """Write the table of contents: a line for each world and partition with its endings, then what they mean."""
    from feddd.experiments.presets import partitions
    from feddd.experiments.presets import presets as known

    headings: dict[str, dict[str, list[str]]] = {}
    endings: dict[str, str] = {}
    for preset in known().values():
        row = headings.setdefault(preset.heading, {}).setdefault(preset.stem if preset.ending else preset.name, [])
        if preset.ending:
            row.append(f"-{preset.ending}")
            endings.setdefault(f"-{preset.ending}", preset.family)
    lines = []
    width = max(len(name) for rows in headings.values() for name, row in rows.items() if row)
    for heading, rows in headings.items():
        lines += [heading, *(f"  {name:<{width}}  {' '.join(row)}" for name, row in rows.items() if row)]
        lines += [*_wrapped([name for name, row in rows.items() if not row]), ""]
    meanings = partitions() | endings
    width = max(map(len, meanings))
    lines += ["What the parts of a name mean", *(f"  {part:<{width}}  {text}" for part, text in meanings.items())]
    lines += ["", "`feddd presets WORD` describes those with that word, `… show NAME` prints one."]
    return "\n".join(lines)


def _wrapped(names: list[str]) -> list[str]:
    return textwrap.wrap(
        "  ".join(names), SCREEN - 1, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
