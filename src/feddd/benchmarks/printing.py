"""What `feddd bench` shows while it measures."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console

from feddd.benchmarks.measuring import Figure
from feddd.benchmarks.suite import asked, number, verdict


class BenchProgress:
    """What is being measured, and every figure as soon as it is known."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._header_shown = False
        self._out = Console(soft_wrap=True, highlight=False)
        self._status = Console(stderr=True).status("starting")

    def __enter__(self) -> BenchProgress:
        if not self._hidden:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def begin(self, name: str) -> None:
        """Say what is measured now."""
        self._status.update(f"measuring: {name}")

    def show(self, figure: Figure) -> None:
        """One line."""
        if not self._hidden:
            if not self._header_shown:
                header = f"{'what':<58} {'measured':>12}  {'asked':<16} {'reached':<7}"
                self._out.print(f"{header}\n{'─' * len(header)}")
                self._header_shown = True
            measured = f"{number(figure.measured)} {figure.unit}"
            line = f"{figure.what:<58} {measured:>12}  {asked(figure):<16} {verdict(figure):<7}"
            self._out.print(f"{line} {figure.detail}".rstrip())
