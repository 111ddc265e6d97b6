"""What a testbed leaves when it is killed is cleaned up."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from feddd.testbed.reaper import left_over

OWNER = """
import subprocess, sys, time
from feddd.testbed.reaper import Reaper

with Reaper() as reaper:
    sleepers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
    for sleeper in sleepers:
        reaper.watch("group", sleeper.pid)
    reaper.forget("group", sleepers[1].pid)
    print(*(sleeper.pid for sleeper in sleepers), flush=True)
    time.sleep(600)
"""


def test_what_is_watched_and_not_forgotten_is_left_over() -> None:
    lines = ["watch group 7\n", "watch namespace a\n", "watch group 8\n", "forget group 7\n", "forget group 9\n"]
    assert left_over(lines) == [("namespace", "a"), ("group", "8")]


def test_processes_do_not_outlive_an_owner_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        watched, forgotten = map(int, owner.stdout.readline().split())
        owner.kill()
    try:
        for _ in range(200):
            if not _runs(watched):
                break
            time.sleep(0.1)
        assert not _runs(watched)
        assert _runs(forgotten)
    finally:
        for process in (watched, forgotten):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _runs(process: int) -> bool:
    """Whether it is there and more than a corpse that nobody has asked about."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
