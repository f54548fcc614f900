"""The engine loop as a process that ends with its host; `supervisor.py` starts it."""

from __future__ import annotations

import os
import signal
import socket
import sys

from handler.core import garbage
from handler.core.child_processes import die_with_parent
from handler.engines import load
from handler.engines.base import Engine
from handler.engines.process.engine_loop import Spec, run
from handler.engines.process.ipc import Messages


def main(fd: str) -> None:
    """Read the Spec from the host's socket, then run the loop. The host handles signals to the terminal's group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()
    channel = socket.socket(fileno=int(fd))
    spec: Spec = Messages(channel).next()

    def load_engine() -> Engine:
        engine = load(spec.engine, spec.config)
        garbage.keep_collecting()
        return engine

    run(load_engine, channel)
    # Native threads of an engine may outlive its close(); nothing is left to save.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
