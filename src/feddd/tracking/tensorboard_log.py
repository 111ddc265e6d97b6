"""TensorBoard: one folder of event files per strategy, so that the same number of all of them is one picture."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from feddd.files import portable_name
from feddd.tracking.protocol import Tracked


class TensorBoard:
    """Writes event files below the run's folder; rounds are the steps."""

    def __init__(self, tracked: Tracked) -> None:
        folder = tracked.folder / portable_name(tracked.label)
        # What was written behind the round that a resumed run goes on from is hidden.
        behind = tracked.after + 1 if folder.is_dir() else None
        begun = behind is not None
        self._writer = SummaryWriter(str(folder), purge_step=behind, flush_secs=5)
        if not begun:
            rows = "\n".join(f"| {key} | {value} |" for key, value in tracked.settings.items())
            self._writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", 0)
        self.view = f"tensorboard --logdir {tracked.folder}"

    def log(self, number: int, values: Mapping[str, float]) -> None:
        """Write one point of every curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def close(self, *, finished: bool) -> None:
        """Write what is left."""
        self._writer.close()
