"""Watching deployments: how a run ended, and SuperNodes whose death is noticed sooner."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from feddd.testbed.deployment import Deployment

PATIENCE = 420.0

_HASTY = """
import sys
from flwr.common import constant
constant.HEARTBEAT_DEFAULT_INTERVAL = constant.HEARTBEAT_MIN_INTERVAL
from flwr.supernode.cli import flower_supernode
sys.exit(flower_supernode())
"""


def hasty(number: int, command: Sequence[str]) -> list[str]:
    """For `Deployment.wrap`: a SuperNode that promises a sign of life every 10 seconds, not every 30."""
    if number < 0 or not command[0].endswith("flower-supernode"):
        return list(command)
    return [sys.executable, "-c", _HASTY, *command[1:]]


def ending(running: Deployment, run: int) -> str:
    """Wait for the end of a run, and return its status; each look starts a process, so it does not look often."""
    begun = time.monotonic()
    while not (status := running.status(run)).startswith("finished"):
        assert time.monotonic() - begun < PATIENCE, running.run_log(run)[-2000:]
        time.sleep(3.0)
    return status
