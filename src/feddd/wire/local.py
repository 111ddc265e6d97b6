"""What local training needs besides the data: rules that travel with a task, by value.

A rule changes how a client trains. The simulator's trainers carry it out; in a deployment it travels in the `config`
of the message, the user's train function carries it out, and confirms it by reporting the same numbers as metrics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


class Rule:
    """One thing that is different in training. Subclasses are frozen dataclasses.

    `each` names the fields in which clients of one stack may differ. `lasting`: clients keep something for it.
    """

    each: ClassVar[tuple[str, ...]] = ()
    lasting: ClassVar[bool] = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to train as one stack."""
        settings = {name: value for name, value in vars(self).items() if name not in self.each}
        return type(self), *settings.items()

    @property
    def config(self) -> dict[str, float]:
        """Return what a train function is told in a deployment, and has to confirm."""
        raise NotImplementedError(f"{type(self).__name__} is for simulations: it says nothing to a train function")


@dataclass(frozen=True)
class Scaler(Rule):
    """Divide the outputs of hidden layers by a client's width while it trains, as the full model will not be."""

    width: float = 1.0

    each: ClassVar[tuple[str, ...]] = ("width",)

    @property
    def config(self) -> dict[str, float]:
        """Return the width."""
        return {"hidden-scaler": self.width}
