"""Starts runs in processes of their own and kills them. Forks of a process that has imported everything start quickly.

Reads orders as lines of JSON: {"experiment", "folder", "workers", "kill_after"}; answers with the seconds it took and
how the process ended. A folder that is there already is resumed.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import feddd.experiments.report  # noqa: F401 - what a run would import on its way
from feddd.experiments.config import parse_experiment
from feddd.experiments.running import resume, run


def work(order):
    folder, options = Path(order["folder"]), {"workers": order["workers"], "checkpoint_seconds": 0}
    if folder.exists():
        resume(folder, **options)
    else:
        run(parse_experiment(order["experiment"]), folder, **options)


def obey(order):
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            work(order)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    if order["kill_after"] is not None:
        time.sleep(order["kill_after"])
        os.kill(child, signal.SIGKILL)  # it is not reaped yet: nobody else has its number
    _, status = os.waitpid(child, 0)
    return {"seconds": time.monotonic() - begun, "code": os.waitstatus_to_exitcode(status)}


for line in sys.stdin:
    print(json.dumps(obey(json.loads(line))), flush=True)  # noqa: T201
