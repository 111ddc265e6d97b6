"""An experiment as one frozen value, equal to its TOML after a round trip.

Unknown keys and wrong values are errors of one line that name the key and the nearest right one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from feddd.errors import InputError, nearest
from feddd.experiments.methods import (
    BUILT_IN,
    COMPARED,
    IMPORT_PATH,
    checked_rules,
    checked_server,
    construct,
    construct_rule,
    construct_server,
    explain,
    imported,
)
from feddd.experiments.problem import Count, DataSection, Positive, Section, TaskSection
from feddd.simulation.faults import Faults
from feddd.strategies.protocol import Strategy
from feddd.strategies.server_optimizers import WithServerOptimizer
from feddd.strategies.with_rules import WithRules
from feddd.world.models import MODELS, SOFTMAX, known
from feddd.world.objectives import LOSSES, Objective

UNNAMED = "the experiment"
"""What errors call an experiment that comes from no file."""
OPTIMIZERS = ("sgd", "adam", "adamw")
SHANNON = ("bandwidth_hz", "power_w", "gain", "noise_w")

Share = Annotated[float, Field(ge=0, le=1)]
Range = Positive | tuple[Positive, Positive]


def _goes_up(value: Range | None) -> Range | None:
    if isinstance(value, tuple) and value[0] > value[1]:
        raise ValueError(f"a range goes from low to high, not from {value[0]:g} to {value[1]:g}")
    return value


class FleetSection(Section):
    """Links and devices: `[low, high]` is drawn uniformly per client, one number is the same for all.

    clients: left out under partition "natural", all owners of samples (None)
    """

    clients: Count | None = 100
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
        return _goes_up(value)

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


class ModelSection(Section):
    """Which network: one of the paper's ("cnn2/4": a quarter of its widths), or package.module:function.

    output: "softmax" takes the Softmax of the paper's tables literally, with the same loss on top; left out, logits
    units: package.module:function that makes the layer table of a network; left out, single channels and neurons
    arguments: keyword arguments of the function
    """

    name: str = "mlp"
    output: Literal["softmax"] | None = None
    units: str | None = None
    arguments: dict[str, Any] | None = None

    @field_validator("name")
    @classmethod
    def _known(cls, value: str) -> str:
        if ":" not in value and (not known(value) or value.endswith(SOFTMAX)):
            raise ValueError(f"unknown model {value!r}; {nearest(value, (*MODELS, IMPORT_PATH))}")
        return value

    @field_validator("units")
    @classmethod
    def _imported(cls, value: str | None) -> str | None:
        if value is not None and ":" not in value:
            raise ValueError(f"{value!r} is not of the form {IMPORT_PATH}")
        return value

    @model_validator(mode="after")
    def _own_models_have_their_own_output(self) -> ModelSection:
        if self.output and ":" in self.name:
            raise ValueError(f"output belongs to the networks that come with the package, not to {self.name!r}")
        if self.arguments and ":" not in self.name:
            raise ValueError(f"arguments belong to a model by {IMPORT_PATH}, not to {self.name!r}")
        return self

    @property
    def network(self) -> str:
        """Return what `world.models.build` is asked for."""
        return self.name + (SOFTMAX if self.output else "")


class TrainingSection(Section):
    """Local training; trainer "auto" is replaced by the one that the model gets when a run resolves its config.

    optimizer: "sgd", "adam", "adamw" or package.module:function, called with (parameters, lr=…) for every client and
    round    momentum, weight_decay: as torch.optim has them    max_gradient_norm: longer gradients are shortened to it
    learning_rate_later: [round, rate] pairs, from that round on    learning_rate_decay: a factor from round to round
    """

    epochs: Count = 1
    batch_size: Count = 32
    learning_rate: Positive = 0.01
    trainer: Literal["auto", "reference", "channels_last", "batched", "stacked"] = "auto"
    device: str = "cpu"
    optimizer: str = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_gradient_norm: Positive | None = None
    learning_rate_later: tuple[tuple[Count, Positive], ...] = ()
    learning_rate_decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("optimizer")
    @classmethod
    def _known(cls, value: str) -> str:
        if ":" not in value and value not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {value!r}; {nearest(value, (*OPTIMIZERS, IMPORT_PATH))}")
        return value

    @field_validator("learning_rate_later")
    @classmethod
    def _rounds_go_up(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        turns = [turn for turn, _ in value]
        if turns != sorted(set(turns)) or any(turn < 2 for turn in turns):
            raise ValueError(f"takes [round, rate] pairs with rounds that go up from 2, not {[list(p) for p in value]}")
        return value

    @model_validator(mode="after")
    def _settings_belong_to_the_optimizer(self) -> TrainingSection:
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f'momentum belongs to optimizer "sgd", not to {self.optimizer!r}, which has its own')
        if self.weight_decay and ":" in self.optimizer:
            raise ValueError(f"weight_decay belongs to {', '.join(OPTIMIZERS)}; {self.optimizer!r} sets its own")
        return self


class FaultsSection(Section):
    """How the fleet misbehaves, and how long a round waits for it; see `simulation.faults.Faults`."""

    unreliable: Share = 1.0
    lost: Share = 0.0
    gone: Share = 0.0
    crashed: Share = 0.0
    late: Share = 0.0
    late_seconds: Range = (60.0, 600.0)
    slow: Share = 0.0
    slow_factor: Positive = 10.0
    links: Share = 0.0
    link_factor: Range = (0.1, 1.0)
    spell_rounds: Count = 5
    garbage: Share = 0.0
    corrupted: Share = 0.0
    non_finite: Share = 0.0
    wrong_model: Share = 0.0
    replayed: Share = 0.0
    lying: Share = 0.0
    lie_factor: Positive = 10.0
    deadline_seconds: Positive | None = None
    quorum: Annotated[int, Field(ge=0, strict=True)] = 1

    @field_validator("late_seconds", "link_factor")
    @classmethod
    def _ranges_go_up(cls, value: Range) -> Range | None:
        return _goes_up(value)

    @model_validator(mode="after")
    def _fit_together(self) -> FaultsSection:
        self.build()
        return self

    def build(self) -> Faults:
        """Return the settings for the simulator."""
        return Faults(**self.model_dump())


class StrategySection(BaseModel):
    """A method by name, with the method's own fields as keys.

    local: rules that its clients train by, in order    server: a server optimiser; both with names and fields of theirs
    """

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
        if not isinstance(label, str) or not _names_a_file(label):
            raise ValueError(f"label {label!r} must be 1 to 80 characters without slashes: it names files")
        options = {key: value for key, value in given.items() if key not in ("name", "label", "local", "server")}
        section: dict[str, Any] = {"name": name, "label": label}
        if "local" in given:
            section["local"] = checked_rules(given["local"])
        if "server" in given:
            section["server"] = checked_server(given["server"])
        if ":" in name:
            return section | options
        if name not in BUILT_IN:
            raise ValueError(f"unknown strategy {name!r}; {nearest(name, (*BUILT_IN, IMPORT_PATH))}")
        # What is to be imported stays the path that names it: where modules are looked for is not known yet.
        paths = {key: options.pop(key) for key in imported(BUILT_IN[name], options)}
        return section | dataclasses.asdict(construct(name, options)) | paths

    @property
    def options(self) -> dict[str, Any]:
        """Return the method's own keys, and `local` and `server` if it has them."""
        return dict(self.model_extra or {})

    def build(self) -> Strategy:
        """Return the strategy object."""
        options = self.options
        rules = tuple(construct_rule(given) for given in options.pop("local", ()))
        server = options.pop("server", None)
        built: Strategy = construct(self.name, options)
        built = WithRules(built, rules) if rules else built
        return WithServerOptimizer(built, construct_server(server)) if server else built


class Experiment(Section):
    """One experiment: everything that its tables are a function of."""

    name: str = "experiment"
    seed: Annotated[int, Field(ge=0, strict=True, lt=2**63)] = 0
    rounds: Count = 100
    evaluate_every: Count = 1
    targets: tuple[Annotated[float, Field(allow_inf_nan=False)], ...] = (0.8, 0.85, 0.88, 0.9)
    data: DataSection = DataSection()
    fleet: FleetSection = FleetSection()
    model: ModelSection = ModelSection()
    training: TrainingSection = TrainingSection()
    task: TaskSection | None = None
    faults: FaultsSection | None = None
    strategy: tuple[StrategySection, ...] = Field(
        default_factory=lambda: tuple(StrategySection.model_validate({"name": name}) for name in COMPARED)
    )

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", value):
            raise ValueError(f"{value!r} must consist of letters, digits, '.', '_' and '-': it names a folder")
        return value

    @model_validator(mode="before")
    @classmethod
    def _no_targets_of_another_metric(cls, given: Any) -> Any:
        """Targets that were left out are accuracies: under another metric there are none."""
        task = given.get("task") if isinstance(given, dict) else None
        other = (
            isinstance(task, dict) and task.get("metric", LOSSES.get(task.get("loss", ""), "accuracy")) != "accuracy"
        )
        return {"targets": ()} | given if other else given

    @model_validator(mode="before")
    @classmethod
    def _all_owners_are_clients(cls, given: Any) -> Any:
        """Give a fleet whose size is not given as many clients as a natural partition has owners."""
        data, fleet = (given.get(key, {}) for key in ("data", "fleet")) if isinstance(given, dict) else (None, None)
        if not isinstance(data, dict) or not isinstance(fleet, dict) or data.get("partition") != "natural":
            return given
        return given | {"fleet": {"clients": None} | fleet}

    @model_validator(mode="after")
    def _clients_are_counted_or_owners(self) -> Experiment:
        if self.fleet.clients is None and self.data.partition != "natural":
            raise ValueError('fleet.clients is needed unless the partition is "natural"')
        return self

    @field_validator("task")
    @classmethod
    def _only_what_is_different(cls, value: TaskSection | None) -> TaskSection | None:
        """Return an experiment that says what is the default says nothing: it is the same as one that does not."""
        return None if value == TaskSection.model_validate({}) else value

    @model_validator(mode="after")
    def _targets_are_accuracies(self) -> Experiment:
        wrong = next((each for each in self.targets if not 0 < each <= 1), None)
        if wrong is not None and self.objective.metric == "accuracy":
            raise ValueError(f"targets: an accuracy lies above 0 and is at most 1, not {wrong:g}")
        return self

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

    @property
    def objective(self) -> Objective:
        """Return the loss and the metric."""
        return self.task.build() if self.task else Objective()

    @property
    def import_paths(self) -> list[str]:
        """Return the package.module:function that it names."""
        names = [self.model.name, self.model.units or "", self.data.dataset, self.data.partition]
        names += [self.objective.loss, self.objective.metric, self.training.optimizer]
        for section in self.strategy:
            names += [section.name, section.options.get("server", {}).get("name", "")]
            names += [rule["name"] for rule in section.options.get("local", ())]
            if section.name in BUILT_IN:
                names += [section.options[key] for key in imported(BUILT_IN[section.name], section.options)]
        return [name for name in names if ":" in name]

    def to_toml(self) -> str:
        """Return the resolved experiment; reading it back gives an equal value."""
        return tomli_w.dumps(_without_none(self.model_dump()))


def _names_a_file(label: str) -> bool:
    """1 to 80 characters and 200 bytes (a file name has 255), no slash, no control character, no half of a pair."""
    plain = re.fullmatch(r"[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,80}", label)
    return plain is not None and len(label.encode()) <= 200 and label not in (".", "..")


def parse_experiment(document: Mapping[str, Any], where: str = UNNAMED) -> Experiment:
    """Validate a document; the first thing wrong becomes one line."""
    try:
        return Experiment.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error, document, Experiment)}") from error


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_none(item) for item in value]
    return value
