"""The problem of an experiment as its config has it: which data, what is learnt from it, how that is judged."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from feddd.errors import nearest
from feddd.experiments.methods import IMPORT_PATH
from feddd.world.objectives import LOSSES, METRICS, Objective, make_objective
from feddd.world.partitions import KINDS
from feddd.world.sources import ENDINGS, KNOWN_DATA, TABLES, is_own, is_table

PARTITIONS = (*KINDS, "natural")

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Section(BaseModel):
    """A table of an experiment's TOML: complete, frozen, without other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSection(Section):
    """Which data, and how it is spread over the clients.

    dataset: a name, package.module:function with its keyword arguments, or a file or folder of one's own
    target, client, test_share, standardise: of a table; see `world.tables`
    validation_share: hold out so much of the training samples and test on them, never on the test set: for choosing
    """

    dataset: str = "mnist"
    partition: str = "noniid-b"
    classes_per_client: Count | None = None
    alpha: Positive | None = None
    train_limit: Count | None = None
    validation_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    arguments: dict[str, Any] | None = None
    target: str | None = None
    client: str | None = None
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    standardise: bool | None = None

    @field_validator("dataset")
    @classmethod
    def _data_is_known(cls, value: str) -> str:
        if value not in KNOWN_DATA and not is_own(value):
            own = (IMPORT_PATH, *(f"file{ending}" for ending in ENDINGS), "folder/")
            raise ValueError(f"unknown data set {value!r:.200}; {nearest(value[:200].lower(), (*KNOWN_DATA, *own))}")
        return value

    @field_validator("partition")
    @classmethod
    def _partition_is_known(cls, value: str) -> str:
        if value not in PARTITIONS and ":" not in value:
            raise ValueError(f"unknown partition {value!r:.200}; {nearest(value[:200], (*PARTITIONS, IMPORT_PATH))}")
        return value

    @model_validator(mode="after")
    def _keys_belong_to_the_data(self) -> DataSection:
        if self.arguments is not None and ":" not in self.dataset:
            raise ValueError(f"arguments belong to a data set of the form {IMPORT_PATH}")
        for key in ("target", "client", "test_share", "standardise"):
            if getattr(self, key) is not None and not is_table(self.dataset):
                raise ValueError(f"{key} belongs to a table, {' or '.join(TABLES)}")
        if is_table(self.dataset) and self.target is None:
            raise ValueError('a table needs the name of its target\'s column: target = "…"')
        return self

    @model_validator(mode="after")
    def _keys_belong_to_the_partition(self) -> DataSection:
        if self.classes_per_client is not None and self.partition not in ("noniid-b", "imbalanced"):
            raise ValueError("classes_per_client belongs to partition noniid-b or imbalanced")
        if self.alpha is not None and self.partition not in ("dirichlet", "quantity"):
            raise ValueError("alpha belongs to partition dirichlet or quantity")
        return self


class TaskSection(Section):
    """What is learnt and how it is judged; what is left out follows from the loss.

    evaluate_clients: the metric of the global model on every client's own training samples too
    """

    loss: str = "cross-entropy"
    metric: str | None = None
    higher_is_better: bool | None = None
    evaluate_clients: bool = False

    @model_validator(mode="before")
    @classmethod
    def _filled_in(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        loss, metric = given.get("loss", "cross-entropy"), given.get("metric")
        for key, value, names in (("loss", loss, LOSSES), ("metric", metric, METRICS)):
            if isinstance(value, str) and ":" not in value and value not in names:
                raise ValueError(f"unknown {key} {value!r:.200}; {nearest(value[:200], (*names, IMPORT_PATH))}")
        higher = given.get("higher_is_better")
        if not isinstance(loss, str) or not isinstance(metric, str | None) or not isinstance(higher, bool | None):
            return given
        made = make_objective(loss, metric, higher)
        return given | {"metric": made.metric, "higher_is_better": made.higher_is_better}

    def build(self) -> Objective:
        """Return the loss and the metric."""
        return make_objective(self.loss, self.metric, self.higher_is_better)
