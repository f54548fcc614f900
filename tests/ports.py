"""Ports on loopback, without the packages of `dev`: `make djl` needs one too."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Reserve a free port for a minute.

    A connection to it is closed by its own side, which leaves TIME_WAIT. Linux then gives the port to no connection and
    to nobody who binds port 0; a server that names it, with SO_REUSEADDR, gets it.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        listener.accept()[0].close()
        return int(listener.getsockname()[1])
