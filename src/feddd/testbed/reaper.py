"""Cleans up after a testbed whose process is gone, however it went: a small process of its own that waits for that.

It is told what there is, line by line, on its standard input. When that ends, its owner has ended, and what is still
there is removed: process groups are killed, network namespaces emptied and deleted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Literal

Kind = Literal["group", "namespace"]


class Reaper:
    """The owner's end; use it in a `with`, around everything that it is told of."""

    def __enter__(self) -> Reaper:
        command = [sys.executable, "-m", "feddd.testbed.reaper"]
        # A session of its own: what is sent to the owner's terminal does not reach it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()

    def watch(self, kind: Kind, name: str | int) -> None:
        """Something that must not outlive the owner."""
        self._say("watch", kind, name)

    def forget(self, kind: Kind, name: str | int) -> None:
        """It is gone; the name may come to mean something else."""
        self._say("forget", kind, name)

    def _say(self, verb: str, kind: Kind, name: str | int) -> None:
        if self._process.stdin:
            self._process.stdin.write(f"{verb} {kind} {name}\n")
            self._process.stdin.flush()


def left_over(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return what was to be watched and not forgotten, in the order in which it came."""
    watched: dict[tuple[str, str], None] = {}
    for line in lines:
        verb, kind, name = line.split()
        if verb == "watch":
            watched[kind, name] = None
        else:
            watched.pop((kind, name), None)
    return list(watched)


def remove(kind: str, name: str) -> None:
    """End it now; nothing happens if it is gone already."""
    if kind == "group":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(name), signal.SIGKILL)
        return
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def main() -> None:
    """Wait for the owner to end."""
    for kind, name in left_over(sys.stdin):
        remove(kind, name)


if __name__ == "__main__":
    main()
