"""The main loop of a worker process: ``python -m feddd.simulation.worker SOCKET`` serves a shard.

SOCKET is the descriptor of the connection to the coordinator, which says what to be and then what to do.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from feddd.simulation.processes import receive


def serve(connection: Connection) -> None:
    """Build the shard, then answer calls until the other end closes."""
    problem = shard = None
    try:
        # Before anything arrives: this takes seconds, and the coordinator has much to do itself.
        from feddd.simulation.shard import Shard
        from feddd.simulation.workers import mapped
    except Exception:  # whatever goes wrong here and below belongs to the coordinator, with its trace
        problem = traceback.format_exc()
    path, spec, layout = receive(connection)
    samples = recv_handle(connection)
    sys.path[:] = path
    while True:
        method, arguments = receive(connection)
        result = None
        if problem is None:
            try:
                # The samples are there from the first call on.
                shard = shard or Shard(spec, mapped(samples, layout))
                result = getattr(shard, method)(*arguments)
            except Exception:
                problem = traceback.format_exc()
        connection.send((problem, result))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    # The coordinator may leave at any moment, also while this end reads, works or writes.
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
