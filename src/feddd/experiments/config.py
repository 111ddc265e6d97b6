"""An experiment as one frozen value, equal to its TOML after a round trip.

Unknown keys and wrong values are errors of one line that name the key and the nearest right one.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddd.errors import InputError
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.fedcs import FedCS
from feddd.strategies.feddd import FedDD
from feddd.strategies.oort import Oort
from feddd.strategies.protocol import Strategy
from feddd.world.models import MODELS, import_object

BUILT_IN: Mapping[str, type[FedDD | FedAvg | FedCS | Oort]] = {
    "feddd": FedDD,
    "fedavg": FedAvg,
    "fedcs": FedCS,
    "oort": Oort,
}
SHANNON = ("bandwidth_hz", "power_w", "gain", "noise_w")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]
Range = Positive | tuple[Positive, Positive]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(_Section):
    """Which data, and how it is spread over the clients."""

    dataset: Literal["mnist", "fashion-mnist", "cifar10", "fashion-mnist-mini"] = "mnist"
    partition: Literal["iid", "noniid-a", "noniid-b", "imbalanced", "dirichlet"] = "noniid-b"
    classes_per_client: Count | None = None
    alpha: Positive | None = None
    train_limit: Count | None = None

    @model_validator(mode="after")
    def _keys_belong_to_the_partition(self) -> DataSection:
        if self.classes_per_client is not None and self.partition not in ("noniid-b", "imbalanced"):
            raise ValueError("classes_per_client belongs to partition noniid-b or imbalanced")
        if self.alpha is not None and self.partition != "dirichlet":
            raise ValueError("alpha belongs to partition dirichlet")
        return self


class FleetSection(_Section):
    """Links and devices: `[low, high]` is drawn uniformly per client, one number is the same for all."""

    clients: Count = 100
    uplink_bits_per_s: Range | None = (1e4, 5e4)
    downlink_bits_per_s: Range | None = (4e4, 2e5)
    cpu_hz: Range | None = (1e9, 1e10)
    cycles_per_sample: Range | None = (1e6, 1e7)
    bandwidth_hz: Range | None = None
    power_w: Range | None = None
    gain: Range | None = None
    noise_w: Range | None = None
    file: str | None = None

    @field_validator("uplink_bits_per_s", "downlink_bits_per_s", "cpu_hz", "cycles_per_sample", *SHANNON)
    @classmethod
    def _ranges_go_up(cls, value: Range | None) -> Range | None:
        if isinstance(value, tuple) and value[0] > value[1]:
            raise ValueError(f"a range goes from low to high, not from {value[0]:g} to {value[1]:g}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _one_source_of_links(cls, given: Any) -> Any:
        """Shannon's quantities or a file replace the default rates; mixing them is refused."""
        if not isinstance(given, dict):
            return given
        drawn = [k for k in ("uplink_bits_per_s", "downlink_bits_per_s", "cpu_hz", "cycles_per_sample") if given.get(k)]
        shannon = [key for key in SHANNON if given.get(key) is not None]
        if given.get("file") is not None:
            if drawn or shannon:
                raise ValueError(f"{(drawn + shannon)[0]} and file cannot both be given: the file has the links")
            return given | dict.fromkeys(("uplink_bits_per_s", "downlink_bits_per_s", "cpu_hz", "cycles_per_sample"))
        if shannon:
            rates = [key for key in drawn if key.endswith("_bits_per_s")]
            if rates:
                raise ValueError(f"{rates[0]} and {shannon[0]} cannot both be given: rates or Shannon's quantities")
            missing = [key for key in SHANNON if key not in shannon]
            if missing:
                raise ValueError(f"Shannon links need {', '.join(SHANNON)}; {missing[0]} is missing")
            return given | {"uplink_bits_per_s": None, "downlink_bits_per_s": None}
        return given


class ModelSection(_Section):
    """Which network: one of the paper's, or package.module:function."""

    name: str = "mlp"

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if ":" not in value and value not in MODELS:
            raise ValueError(_nearest(value, MODELS, f"known are {', '.join(MODELS)} and package.module:function"))
        return value


class TrainingSection(_Section):
    """Local SGD."""

    epochs: Count = 1
    batch_size: Count = 32
    learning_rate: Positive = 0.01


class StrategySection(BaseModel):
    """A method by name, with the method's own fields as keys."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    label: str

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: Any) -> Any:
        """Fill in the method's defaults, so that a resolved config says everything."""
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise ValueError('a strategy needs a name: name = "feddd"')
        name = given["name"]
        label = given.get("label", name)
        if not isinstance(label, str) or not re.fullmatch(r"[^/\\\x00-\x1f]{1,80}", label) or label in (".", ".."):
            raise ValueError(f"label {label!r} must be 1 to 80 characters without slashes: it names files")
        options = {key: value for key, value in given.items() if key not in ("name", "label")}
        if ":" in name:
            return {"name": name, "label": label, **options}
        if name not in BUILT_IN:
            raise ValueError(_nearest(name, BUILT_IN, f"known are {', '.join(BUILT_IN)} and package.module:function"))
        built = _construct(name, BUILT_IN[name], options)
        return {"name": name, "label": label, **_fields(built)}

    @property
    def options(self) -> dict[str, Any]:
        """The method's own keys."""
        return dict(self.model_extra or {})

    def build(self) -> Strategy:
        """The strategy object."""
        make = BUILT_IN.get(self.name) or import_object(self.name)
        built: Strategy = _construct(self.name, make, self.options)
        return built


class Experiment(_Section):
    """One experiment: everything that its tables are a function of."""

    name: str = "experiment"
    seed: Annotated[int, Field(ge=0, strict=True, lt=2**63)] = 0
    rounds: Count = 100
    evaluate_every: Count = 1
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.8, 0.85, 0.88, 0.9)
    data: DataSection = DataSection()
    fleet: FleetSection = FleetSection()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    strategy: tuple[StrategySection, ...] = tuple(StrategySection(name=name, label=name) for name in BUILT_IN)

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value):
            raise ValueError(f"{value!r} must consist of letters, digits, '.', '_' and '-': it names a folder")
        return value

    @field_validator("strategy")
    @classmethod
    def _labels_are_unique(cls, value: tuple[StrategySection, ...]) -> tuple[StrategySection, ...]:
        if not value:
            raise ValueError("an experiment needs at least one [[strategy]]")
        labels = [strategy.label for strategy in value]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice:
            raise ValueError(f"two strategies are labelled {twice!r}; give one of them another label")
        return value

    def to_toml(self) -> str:
        """The resolved experiment; reading it back gives an equal value."""
        return tomli_w.dumps(_without_none(self.model_dump()))


def presets() -> dict[str, str]:
    """Name → TOML text of the experiments that come with the package."""
    folder = resources.files("feddd.experiments") / "presets"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def load_experiment(
    path_or_name: str | os.PathLike[str], overrides: Iterable[str] = (), base: Mapping[str, Any] | None = None
) -> Experiment:
    """An experiment from a TOML file or a preset's name.

    overrides: "dotted.key=value" with the value in TOML syntax    base: values that win over everything (seed, rounds)
    """
    text, where = _find(path_or_name)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} is not valid TOML: {error}") from error
    document.setdefault("name", where if where in presets() else Path(where).stem)
    _name_strategies(document)
    for override in overrides:
        _override(document, override)
    _relative_to(document, where)
    return parse_experiment(document | dict(base or {}), where)


def parse_experiment(document: Mapping[str, Any], where: str = "the experiment") -> Experiment:
    """Validate a document; the first thing wrong becomes one line."""
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{where}: {_explain(error, document)}") from error


def _find(path_or_name: str | os.PathLike[str]) -> tuple[str, str]:
    known = presets()
    if isinstance(path_or_name, str) and path_or_name in known:
        return known[path_or_name], path_or_name
    path = Path(path_or_name)
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        hint = _nearest(str(path_or_name), known, "`feddd presets` lists the presets")
        raise InputError(f"there is no preset or file {str(path_or_name)!r}; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error


def _name_strategies(document: dict[str, Any]) -> None:
    """With no [[strategy]] an experiment compares all four; make them explicit, so that --set can reach them."""
    if "strategy" not in document:
        document["strategy"] = [{"name": name} for name in BUILT_IN]


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise InputError(f"--set takes key=value, not {override!r}")
    value = _toml_value(text.strip())
    target: dict[str, Any] = document
    if parts[0] == "strategy":
        target, parts = _strategy_table(document, parts, override)
    for part in parts[:-1]:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise InputError(f"--set {override}: {part} has no keys below it")
    target[parts[-1]] = value


def _strategy_table(document: dict[str, Any], parts: list[str], override: str) -> tuple[dict[str, Any], list[str]]:
    """`strategy.LABEL.key`; labels may contain dots."""
    tables = [table for table in document["strategy"] if isinstance(table, dict)]
    by_label = {str(table.get("label", table.get("name"))): table for table in tables}
    label, key = ".".join(parts[1:-1]), parts[-1]
    if label not in by_label:
        hint = _nearest(label, by_label, f"labels are {', '.join(by_label)}")
        raise InputError(f"--set {override}: no strategy is labelled {label!r}; {hint}")
    return by_label[label], [key]


def _toml_value(text: str) -> Any:
    """A value in TOML syntax; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        if re.fullmatch(r"[A-Za-z_][\w./:-]*", text):
            return text
        raise InputError(f"--set: {text!r} is neither a TOML value nor a bare word") from None


def _relative_to(document: dict[str, Any], where: str) -> None:
    """A fleet file is looked for beside the experiment that names it."""
    fleet = document.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("file"), str) and where not in presets():
        fleet["file"] = str(Path(where).parent.absolute() / fleet["file"])


def _explain(error: ValidationError, document: Mapping[str, Any]) -> str:
    """The first problem, as "key: what is wrong"; an unknown key with the nearest known one."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"] if not str(part).startswith(("function", "tuple[", "constrained"))]
    place = [part for part in place if part not in ("float", "int")]
    if len(place) > 1 and place[0] == "strategy" and place[1].isdigit():
        table = document["strategy"][int(place[1])]
        place[1] = str(table.get("label", table.get("name", place[1]))) if isinstance(table, dict) else place[1]
    key = ".".join(place)
    if problem["type"] == "extra_forbidden":
        section: Any = Experiment
        for part in place[:-1]:
            section = section.model_fields[part].annotation
        return f"unknown key {key}; {_nearest(place[-1], section.model_fields, 'known are ' + ', '.join(section.model_fields))}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f" (given: {given!r})" if isinstance(given, str | int | float | list) and problem["type"] != "value_error" else ""
    message = message[0].lower() + message[1:] if message.startswith(("Input", "List", "Tuple")) else message
    return f"{key}: {message}{shown}" if key else f"{message}{shown}"


def _construct(name: str, make: Any, options: Mapping[str, Any]) -> Any:
    """Call the method with its options; complaints become one line."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    known = getattr(make, "__dataclass_fields__", None)
    if known is not None:
        for key, value in options.items():
            if key not in known:
                raise ValueError(f"unknown key {key}; {_nearest(key, known, 'known are ' + ', '.join(known))}")
            _check_type(key, value, getattr(make(), key, None) if name != "fedcs" or key != "deadline_seconds" else 1.0)
    try:
        return make(**options)
    except TypeError as error:
        raise ValueError(f"strategy {name!r} cannot be made: {error}") from error


def _check_type(key: str, value: Any, default: Any) -> None:
    """A key's value must be of its default's kind; whole numbers pass for floats."""
    if isinstance(default, bool) or default is None:
        return
    if isinstance(default, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        wanted = "a finite number"
    elif isinstance(default, int):
        fits, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(default, tuple):
        fits, wanted = isinstance(value, tuple) and all(isinstance(x, str) for x in value), "a list of strings"
    else:
        fits, wanted = isinstance(value, type(default)), "a string"
    if not fits:
        raise ValueError(f"{key} must be {wanted}, not {value!r}")


def _fields(built: Any) -> dict[str, Any]:
    values = {name: getattr(built, name) for name in built.__dataclass_fields__}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value is not None}


def _nearest(given: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_none(item) for item in value]
    return value
