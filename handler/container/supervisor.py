"""Supervisor of a server that does not drain itself at SIGTERM, such as DJL Serving's Java side.

SageMaker sends SIGTERM to the container and kills it after 30 seconds. The supervisor passes the signal on to the
server when all responses have been sent, and kills the server before SageMaker would. Java does not report which
connections are waiting for a response, or that its Python worker has died. The supervisor therefore asks the kernel
when bytes were last received and sent on each connection (sock_diag(7), tcp_info), and which processes live. It asks
Java whether the model was loaded, and whether the thread that calls the worker still runs.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from handler.core.numbers import is_digits

log = logging.getLogger("handler.container")

DRAIN = 22.0  # maximum seconds to wait for responses to finish
END = 28.0  # seconds after SIGTERM until the server is killed
_QUIET = 2000  # milliseconds without a byte after which a response counts as finished
_POLL = 2.0  # seconds between checks of the worker
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}

PATIENCE = 6.0  # seconds without a worker; if Java starts another worker, it does so within two
_MAX_LOSSES = 3  # losses in a row before the model is loaded, after which a model that was loaded once is given up
_RESPONSE_SECONDS = 5.0  # for a response of Java
_MAX_RESPONSE = 1 << 20  # bytes
_WORKER = b"djl_python_engine.py"  # also in the command line of mpirun, if that runs the worker
_ADDRESS = (b"--sock-name", b"--port")

_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2  # NLMSG_DONE, NLMSG_ERROR
_INFO = 2  # INET_DIAG_INFO: the attribute with struct tcp_info
_STATES = 1 << 1 | 1 << 8  # ESTABLISHED, CLOSE_WAIT
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_REQUEST = struct.Struct("=BBBxI2s2s44x")  # inet_diag_req_v2
_MESSAGE = 72  # inet_diag_msg, before the attributes
_TCP_INFO = struct.Struct("=44xI4xI72xQ")  # tcpi_last_data_sent, tcpi_last_data_recv, tcpi_bytes_received


# -- connections, as the kernel lists them -----------------------------------------------------------------------


class Connection(NamedTuple):
    """State of a TCP connection.

    Attributes:
        sent: milliseconds since bytes were last sent to the client.
        received: milliseconds since bytes were last received from the client.
        num_bytes: the total number of bytes received.
    """

    sent: int
    received: int
    num_bytes: int

    def waits(self, quiet: int) -> bool:
        """Return whether the client is waiting for a response.

        It is waiting if it has sent bytes since bytes were last sent to it, or if bytes were sent to it less than
        `quiet` milliseconds ago.
        """
        return self.num_bytes > 0 and (self.received < self.sent or self.sent < quiet)


def connections(port: int) -> list[Connection]:
    """List the open connections to the server on a port.

    Raises:
        OSError: if this kernel does not report connections.
    """
    return [each for family in (socket.AF_INET, socket.AF_INET6) for each in _of_family(family, port)]


def _of_family(family: int, port: int) -> Iterator[Connection]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        kernel.settimeout(2)
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, _STATES, port.to_bytes(2, "big"), b"\0\0")
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP, 1, 0) + body)
        while True:
            data = kernel.recv(1 << 18)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", message)[0]
                    raise OSError(number, os.strerror(number))
                yield from _tcp_info(message[_MESSAGE:])


def _tcp_info(attributes: bytes) -> Iterator[Connection]:
    while len(attributes) >= 4:
        length, kind = struct.unpack_from("=HH", attributes)
        value, attributes = attributes[4:length], attributes[(length + 3) & ~3 :]
        if kind == _INFO and len(value) >= _TCP_INFO.size:
            yield Connection(*_TCP_INFO.unpack_from(value))


# -- the worker --------------------------------------------------------------------------------------------------


class _Since:
    """When something that should not be so began.

    Args:
        patience: the number of seconds after which it counts.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._began: float | None = None

    def seconds(self, is_so: bool) -> float:
        """Return for how many seconds it has counted, or a negative number if it does not count yet."""
        now = time.monotonic()
        if not is_so:
            self._began = None
        elif self._began is None:
            self._began = now
        return -1.0 if self._began is None else now - self._began - self._patience


class WorkerWatch:
    """Detects when DJL Serving's Python workers are lost.

    In rolling and dynamic batching, Java does not replace a worker that has died. Each request that Java gives to that
    worker then gets 400 "Backend Python process is stopped.", and /ping stays 200. The same happens if Java has given
    up on a model (`retry_threshold`), or if a worker that replaces another one dies while it loads the model.

    Args:
        group: the process group of DJL Serving and its workers.
        patience: the number of seconds without a worker after which the worker counts as lost.
    """

    def __init__(self, group: int, patience: float = PATIENCE) -> None:
        self._group = group
        self._has_seen_any = False
        self._all, self._some = _Since(patience), _Since(patience)

    def seconds_lost(self, num_threads: int = 0) -> tuple[float, float]:
        """Return for how many seconds all workers have been lost, and at least one. Negative if none is lost.

        Args:
            num_threads: the number of Java's threads that call workers, of which each has its own, or 0 if unknown.
        """
        processes = (Path("/proc") / name for name in os.listdir("/proc") if is_digits(name))
        number = len({address for process in processes if (address := _worker(process, self._group))})
        self._has_seen_any = self._has_seen_any or number > 0
        return self._all.seconds(self._has_seen_any and not number), self._some.seconds(number < num_threads)


def _worker(process: Path, group: int) -> bytes:
    """Return the address of the worker that a process of a group runs, or b"" if it runs none.

    The ranks of an MPI world and mpirun have the same address, as have a worker and another that replaces it.
    """
    with contextlib.suppress(OSError):  # the process has just ended
        state, _, its_group = (process / "stat").read_text().rpartition(")")[2].split()[:3]
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        if state != "Z" and int(its_group) == group and any(_WORKER in each for each in arguments):
            values = (value for name, value in itertools.pairwise(arguments) if name in _ADDRESS)
            return next(values, _WORKER)
    return b""


# -- what Java says ----------------------------------------------------------------------------------------------


class Address(NamedTuple):
    """Where DJL Serving listens, and the name of its model."""

    host: str
    port: int
    model: str


class JavaWatch:
    """Asks DJL Serving on a separate thread, so that an unresponsive server cannot delay signals.

    In async mode, if a request arrives just as the worker dies, the Java thread that calls the worker ends.
    Java starts another worker process, but no thread. Each request then gets 503, and /ping stays 200.

    Args:
        patience: the number of seconds after which a model without such a thread counts as lost.

    Attributes:
        is_ready: whether /ping has returned 200, which it only does after the model is loaded.
        missing: "all" if no thread has called a worker for `patience` seconds, "some" if only fewer threads than
            `minWorkers` have, and otherwise "".
        num_threads: the number of threads that call workers, or 0 if unknown.
    """

    def __init__(self, address: Address, patience: float = PATIENCE) -> None:
        self._address = address
        self._none, self._few = _Since(patience), _Since(patience)
        self._ended = threading.Event()
        self.is_ready = False
        self.missing = ""
        self.num_threads = 0
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_POLL):
            try:
                self._ask()
            except (OSError, http.client.HTTPException, ValueError):  # not reachable, busy, or another server
                self.num_threads = 0

    def _ask(self) -> None:
        if not self.is_ready:
            self.is_ready = self._get("/ping")[0] == 200
        status, body = self._get(f"/models/{quote(self._address.model, safe='')}")
        number, least = _threads(json.loads(body)) if status == 200 and self.is_ready else (0, 0)
        self.num_threads = number
        no_thread, few_threads = self._none.seconds(not number and least > 0), self._few.seconds(number < least)
        self.missing = "all" if no_thread > 0 else "some" if few_threads > 0 else ""

    def _get(self, path: str) -> tuple[int, bytes]:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._address.host, self._address.host)
        connection = http.client.HTTPConnection(host, self._address.port, timeout=_RESPONSE_SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read(_MAX_RESPONSE)


def _threads(described: Any) -> tuple[int, int]:
    """Return the number of threads that call workers, and how many there should be at least.

    Args:
        described: the response to GET /models/NAME, in which a worker whose thread has ended is `UNLOADING`, and is
            missing after a minute.
    """
    try:
        groups = [group for version in described for model in version["models"] for group in model["workerGroups"]]
        states = [worker["status"] for group in groups for worker in group["workers"]]
        return states.count("READY"), sum(group["minWorkers"] for group in groups)
    except (TypeError, KeyError):
        return 0, 0


# -- the server --------------------------------------------------------------------------------------------------


class _Server:
    """DJL Serving in a process group of its own, and what tells whether it can still serve."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], address: Address, patience: float) -> None:
        self.child = os.posix_spawn(command[0], list(command), dict(environ), setpgroup=0, setsigmask=())
        self._port = address.port
        self._worker = WorkerWatch(self.child, patience)
        self._java = JavaWatch(address, patience)

    @property
    def was_ready(self) -> bool:
        return self._java.is_ready

    def is_lost(self, drain: float) -> bool:
        """Return whether the server has lost its workers, or some of them, and has to be restarted.

        If only some are lost, responses of the others may finish: for up to `drain` seconds if every request to a lost
        worker fails, or else for as long as they take.
        """
        all_lost, some_lost = self._worker.seconds_lost(self._java.num_threads)
        if all_lost > 0 or self._java.missing == "all" or some_lost > drain:
            return True
        return (some_lost > 0 or self._java.missing != "") and not _waiting(self._port)

    def end(self) -> None:
        """Kill the server with its workers and their engines, and reap it."""
        self._java.stop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # it was reaped when it exited
            os.waitpid(self.child, 0)


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    address: Address,
    *,
    drain: float = DRAIN,
    end: float = END,
    patience: float = PATIENCE,
) -> int:
    """Run DJL Serving until it exits, cannot load the model, or this process gets SIGTERM or SIGINT.

    The server runs in a separate process group, and is restarted if it loses a worker. If a worker is lost before
    the model was ever loaded, or `_MAX_LOSSES` times in a row before it is loaded again, this function gives up.
    Orphaned processes are reaped, because this process may be process 1 of a container.

    Returns:
        The server's exit status, 1 if the model cannot be loaded, or 0 after a signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    server = _Server(command, environ, address, patience)
    losses_left = 1
    try:
        while True:
            received = signal.sigtimedwait(_SIGNALS, min(_POLL, patience))
            if received is not None and received.si_signo != signal.SIGCHLD:
                return _stop(server.child, address.port, signal.Signals(received.si_signo).name, drain, end)
            if (status := _reap(server.child)) is not None:
                log.error("the server exited unexpectedly with status %d", status)
                return status
            if server.was_ready:
                losses_left = _MAX_LOSSES
            if not server.is_lost(drain):
                continue
            if not server.was_ready:
                losses_left -= 1
            if not losses_left:
                log.error("DJL Serving's worker cannot load the model: giving up; the lines above say why")
                return 1
            log.error("DJL Serving has lost a worker and has not started a new one: restarting DJL Serving")
            server.end()
            server = _Server(command, environ, address, patience)
    finally:
        server.end()
        _reap(server.child)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def run_as_init(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a server that drains itself. This process acts as process 1, and so also reaps orphaned processes.

    Signals are passed on to the server, which starts with them blocked until it has installed its handlers.

    Returns:
        The server's exit status.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    blocked = _SIGNALS - {signal.SIGCHLD}
    child = os.posix_spawn(command[0], list(command), dict(environ), setpgroup=0, setsigmask=blocked)
    status: int | None = None
    while status is None:
        number = signal.sigwaitinfo(_SIGNALS).si_signo
        if number == signal.SIGCHLD:
            status = _reap(child)
        else:
            os.kill(child, number)  # the process still exists, because only `_reap` waits for it
    return status


def _stop(child: int, port: int, name: str, drain: float, end: float) -> int:
    began = time.monotonic()
    log.info("%s: stopping; responses to finish: %s", name, _waiting(port))

    def wait_until(deadline: float, done: Callable[[], bool]) -> bool:
        """Wait until `done` returns true or the deadline passes, and return whether the server has exited.

        A second signal ends the wait.
        """
        while (left := deadline - time.monotonic()) > 0 and not done():
            received = signal.sigtimedwait(_SIGNALS, min(left, 0.2))
            if received is not None and received.si_signo != signal.SIGCHLD:
                return False
            if _reap(child) is not None:
                return True
        return False

    if wait_until(began + drain, lambda: _waiting(port) == 0):
        return 0
    if left := _waiting(port):
        log.warning("responses cut off after %.0f s: %s", time.monotonic() - began, left)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    if not wait_until(began + end, lambda: False):
        log.warning("the server did not exit within %.0f s; killing it", time.monotonic() - began)
    return 0


def _waiting(port: int) -> int:
    """Return the number of connections waiting for a response, or 0 if the kernel does not report connections."""
    try:
        return sum(connection.waits(_QUIET) for connection in connections(port))
    except OSError as error:
        log.warning("the kernel does not report connections (%s): not waiting for responses to finish", error)
        return 0


def _reap(child: int) -> int | None:
    """Reap all exited child processes.

    Returns:
        The exit status of `child`, 128 + N if signal N killed it, or None if it has not exited.
    """
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
                status = code if code >= 0 else 128 - code
    return status
