"""Weights & Biases: one run per strategy, those of one folder as a group; WANDB_MODE=offline needs no network."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

import wandb

from feddd.files import portable_name, write_atomically
from feddd.tracking.protocol import Tracked


class WandB:
    """Logs the rounds as steps; its files lie below the run's folder."""

    def __init__(self, tracked: Tracked) -> None:
        tracked.folder.mkdir(parents=True, exist_ok=True)
        name = tracked.folder / f"{portable_name(tracked.label)}.run-id"
        if not name.is_file():
            write_atomically(name, secrets.token_hex(4).encode())
        offline = os.environ.get("WANDB_MODE", "online") != "online"
        self._run = wandb.init(
            project=tracked.experiment,
            group=tracked.run,
            name=tracked.label,
            id=name.read_text(encoding="utf-8").strip(),
            resume=None if offline else "allow",  # files of one id become one run when they are synced
            dir=str(tracked.folder),
            config=dict(tracked.settings),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )
        self._known = self._run.step
        url = None if offline else self._run.url
        self.view = url or f"wandb sync {tracked.folder / 'wandb'}/offline-run-*"

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Log one step; a step that the server has is not told twice."""
        if number >= self._known:
            self._run.log(dict(values), step=number)

    def close(self, *, finished: bool) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if finished else 1)
