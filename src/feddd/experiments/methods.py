"""The methods, local rules and server optimisers that an experiment may name, and how their settings are checked."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from feddd.errors import nearest
from feddd.strategies.eden import Eden
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.fedcs import FedCS
from feddd.strategies.feddd import FedDD
from feddd.strategies.federated_dropout import FederatedDropout
from feddd.strategies.fedprox import FedProx, Proximal
from feddd.strategies.fedrolex import FedRolex
from feddd.strategies.fjord import FjORD
from feddd.strategies.heterofl import HeteroFL
from feddd.strategies.local_optimizers import Clip
from feddd.strategies.oort import Oort
from feddd.strategies.scaffold import SCAFFOLD, ControlVariates
from feddd.strategies.server_optimizers import FedAdam, FedAvgM
from feddd.strategies.stc import STC
from feddd.strategies.topk import TopK
from feddd.strategies.with_rules import Momentum, WeightDecay
from feddd.wire.local import Rule
from feddd.world.models import import_object

COMPARED: Mapping[str, Any] = {"feddd": FedDD, "fedavg": FedAvg, "fedcs": FedCS, "oort": Oort}
"""The methods of the paper: what an experiment compares if it names none."""
BUILT_IN: Mapping[str, Any] = {
    **COMPARED,
    "heterofl": HeteroFL,
    "fjord": FjORD,
    "fedrolex": FedRolex,
    "federated-dropout": FederatedDropout,
    "topk": TopK,
    "stc": STC,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "eden": Eden,
}
"""Every method by name."""
RULES: Mapping[str, Any] = {
    "proximal": Proximal,
    "momentum": Momentum,
    "weight-decay": WeightDecay,
    "clip": Clip,
    "control-variates": ControlVariates,
}
"""Every rule of local training by name: `local` takes them in any strategy."""
SERVER_OPTIMIZERS: Mapping[str, Any] = {"fedavgm": FedAvgM, "fedadam": FedAdam}
"""Every server optimiser by name: `server` takes one in any strategy."""
IMPORT_PATH = "package.module:function"


def explain(error: ValidationError, document: Mapping[str, Any], sections: type[BaseModel]) -> str:
    """Return the first problem as "key: what is wrong"; an unknown key with the nearest known one."""
    problems = error.errors()
    # A value that may be of several types has a problem with each: the most specific one helps most.
    problem = max((p for p in problems if p["loc"][:1] == problems[0]["loc"][:1]), key=lambda p: len(p["loc"]))
    place = [str(part) for part in problem["loc"] if str(part) not in _TYPE_NAMES]
    if len(place) > 1 and place[0] == "strategy" and place[1].isdigit():
        table = document["strategy"][int(place[1])]
        place[1] = str(table.get("label", table.get("name", place[1]))) if isinstance(table, Mapping) else place[1]
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        section: Any = sections
        for part in place[:-1]:
            # A section that may be left out is one of several types.
            kind = section.model_fields[part].annotation
            section = next((one for one in get_args(kind) if hasattr(one, "model_fields")), kind)
        return f"unknown key {key}; {nearest(place[-1], section.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "should").replace("\n", " ")
    if problem["type"] == "literal_error":
        options = re.findall(r"'([^']*)'", str(problem["ctx"]["expected"]))
        return f"{key} cannot be {problem['input']!r:.200}; {nearest(str(problem['input'])[:200], options)}"
    given = problem.get("input")
    ours = problem["type"] == "value_error"
    shown = f", not {given!r:.200}" if not ours and isinstance(given, str | int | float | list | bool) else ""
    return f"{key}: {message}{shown}" if key else f"{message}{shown}"


# What pydantic adds to a key's place when a value may be of several types.
_TYPE_NAMES = (
    "float",
    "int",
    "tuple[float, float]",
    "constrained-float",
    "tuple[constrained-float, constrained-float]",
)


def construct_server(given: Mapping[str, Any]) -> Any:
    """Return the server optimiser that a strategy's `server` describes."""
    options = {key: value for key, value in given.items() if key != "name"}
    return construct(given["name"], options, SERVER_OPTIMIZERS, "server optimiser")


def checked_server(given: Any) -> dict[str, Any]:
    """Return a strategy's `server` with all of its optimiser's settings."""
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError('server needs a name: server = { name = "fedavgm" }')
    name = given["name"]
    if ":" in name:
        return dict(given)
    if name not in SERVER_OPTIMIZERS:
        raise ValueError(f"server: unknown optimiser {name!r}; {nearest(name, (*SERVER_OPTIMIZERS, IMPORT_PATH))}")
    try:
        return {"name": name, **dataclasses.asdict(construct_server(given))}
    except ValueError as error:
        raise ValueError(f"server: {error}") from error


def construct(
    name: str, options: Mapping[str, Any], known: Mapping[str, Any] = BUILT_IN, what: str = "strategy"
) -> Any:
    """The strategy object, or what else is known by name; options are checked against the fields of known ones."""
    if name not in known:
        try:
            return import_object(name)(**options)
        except TypeError as error:
            raise ValueError(f"{what} {name!r} cannot be made: {error}") from error
    method = known[name]
    hints = get_type_hints(method)
    by_path = imported(method, options)
    fields: dict[str, Any] = {
        field.name: (_plain(hints[field.name]), field.default) for field in dataclasses.fields(method)
    }
    form = create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    try:
        checked = form.model_validate({key: value for key, value in options.items() if key not in by_path})
    except ValidationError as error:
        raise ValueError(explain(error, options, form)) from error
    functions = {key: import_object(options[key]) for key in by_path}
    return method(**{key: getattr(checked, key) for key in fields} | functions)


def imported(method: Any, options: Mapping[str, Any]) -> list[str]:
    """Return the options that name a function by its import path, where a field may be one."""
    hints = get_type_hints(method)
    return [
        key
        for key, value in options.items()
        if isinstance(value, str) and ":" in value and key in hints and _plain(hints[key]) != hints[key]
    ]


def _plain(hint: Any) -> Any:
    """Return a field's type without the functions that it may be."""
    kinds = get_args(hint)
    plain = [kind for kind in kinds if get_origin(kind) is not Callable]
    return hint if len(plain) == len(kinds) else functools.reduce(operator.or_, plain)


def checked_rules(given: Any) -> list[dict[str, Any]]:
    """Return rules of local training with all of their settings."""
    tables = isinstance(given, Sequence) and all(isinstance(one, Mapping) for one in given)
    if not tables or not all(isinstance(one.get("name"), str) for one in given):
        raise ValueError('local takes rules with their names: local = [{ name = "momentum", beta = 0.9 }]')
    found = []
    for one in given:
        name = one["name"]
        if ":" not in name and name not in RULES:
            raise ValueError(f"local: unknown rule {name!r}; {nearest(name, (*RULES, IMPORT_PATH))}")
        found.append(dict(one) if ":" in name else {"name": name, **dataclasses.asdict(construct_rule(one))})
    return found


def construct_rule(given: Mapping[str, Any]) -> Any:
    """Return the rule of local training that one entry of a strategy's `local` describes."""
    name = given["name"]
    made = construct(name, {key: value for key, value in given.items() if key != "name"}, RULES, "rule")
    if not isinstance(made, Rule):
        raise ValueError(f"{name!r} makes a {type(made).__name__}, not a rule of local training")
    return made
