"""What every preset says, as digests to compare with, so that nobody changes one by accident.

A digest is over what differs from the defaults, and the defaults are pinned beside them: a new option leaves all
digests as they are, and another value of an old one is noticed wherever it stands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from feddd import load_experiment
from feddd.experiments.config import Experiment, FaultsSection
from feddd.experiments.methods import BUILT_IN, construct
from feddd.experiments.presets import presets

FILE = Path(__file__).with_name("presets.json")
REGENERATE = "python tools/pin_presets.py"


def digest(experiment: Experiment) -> str:
    """Give 16 letters that stand for all that an experiment says."""
    facts = experiment.model_dump(mode="json", exclude_defaults=True, exclude={"strategy"})
    facts["strategy"] = [
        {"name": one.name, "label": one.label} | _beside(_defaults_of(one.name), one.options)
        for one in experiment.strategy
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def defaults() -> dict[str, dict[str, Any]]:
    """Give the defaults of every section and strategy, as JSON has them."""
    whole = Experiment().model_dump(mode="json", exclude={"strategy"})
    sections = {key: value for key, value in whole.items() if isinstance(value, dict)}
    plain = {key: value for key, value in whole.items() if key not in sections}
    found = {"experiment": plain, **sections, "faults": FaultsSection().model_dump(mode="json")}
    return found | {f"strategy.{name}": _defaults_of(name) for name in BUILT_IN}


def pins() -> dict[str, Any]:
    """Give what is to be pinned, as of now."""
    return {"defaults": defaults(), "presets": {name: digest(load_experiment(name)) for name in presets()}}


def _defaults_of(strategy: str) -> dict[str, Any]:
    return _as_json(dataclasses.asdict(construct(strategy, {})))


def _beside(plain: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _as_json(options).items() if key not in plain or plain[key] != value}


def _as_json(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(table))
    return found
