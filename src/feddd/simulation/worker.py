"""The main loop of a worker process: ``python -m feddd.simulation.worker FD`` serves one shard over a socket."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection


def serve(connection: Connection) -> None:
    """Build the shard, then answer calls until the other end closes."""
    path, spec = connection.recv()
    sys.path[:] = path
    problem = shard = None
    try:
        from feddd.simulation.shard import Shard

        shard = Shard(spec)
    except Exception:  # whatever goes wrong here and below belongs to the coordinator, with its trace
        problem = traceback.format_exc()
    while True:
        method, arguments = connection.recv()
        result = None
        if shard is not None:
            try:
                result = getattr(shard, method)(*arguments)
            except Exception:
                problem = traceback.format_exc()
        connection.send((problem, result))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    # The coordinator may leave at any moment, also while this end reads, works or writes.
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
