"""SIGTERM at random moments of many servers' lives: each must exit with status 0, and no request may fail for it.

Usage: python -m tests.process.http.stop_stress [NUMBER [SEED [ARGUMENT OF `lmi serve` ...]]].
One round starts a server as the container does (the signal blocked until it has handlers), streams to it without a
pause, and sends SIGTERM up to 4 s after the start. Requests that begin later may be refused, with 503 or unanswered.
"""

from __future__ import annotations

import collections
import json
import math
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import httpx

from tests.app.test_engine_failures import ECHO
from tests.environment import clean_environment
from tests.servers import LiveServer, ServerProcess

_NUM_CLIENTS = 8
_NUM_TOKENS = 20


@dataclass
class Clients:
    """Streams, one after the other, from several clients. `outcomes` counts how they ended."""

    server: LiveServer
    signalled_at: float = math.inf
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        client = httpx.Client(
            timeout=40, trust_env=False, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        body = {"inputs": "a b c", "parameters": {"max_new_tokens": _NUM_TOKENS}, "stream": True}
        while not self.stopped.wait(0.002):
            if not self.server.url and "listening on" in self.server.log:
                self.server.url = self.server.log.split("listening on ")[1].split(";")[0]
            if self.server.url:
                self.outcomes[self._one(client, body)] += 1

    def _one(self, client: httpx.Client, body: object) -> str:
        began = time.monotonic()
        answered = False
        try:
            with client.stream("POST", self.server.url + "/invocations", json=body) as found:
                answered = True
                if found.status_code != 200:
                    found.read()
                    stopping = found.status_code == 503 and "stopping" in found.text
                    return "refused: stopping" if stopping else f"failed: status {found.status_code}: {found.text}"
                lines = [json.loads(line) for line in found.iter_lines()]
        except httpx.TransportError as error:
            if not answered and began > self.signalled_at:  # it came to a server that was leaving
                return f"refused: {type(error).__name__}"
            return f"failed: {type(error).__name__}: {error}, begun {self.signalled_at - began:.3f} s before SIGTERM"
        whole = len(lines) == _NUM_TOKENS and "error" not in lines[-1]
        return "whole" if whole else f"failed: {len(lines)} lines, {lines[-1:]}"


def one_round(seconds: float, arguments: list[str]) -> tuple[int, float, Clients, str]:
    """The exit status, the seconds that the server took to end, what became of the requests, and the log."""
    command = [sys.executable, "-m", "handler", "serve", "--port", "0", *ECHO, *arguments]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited by the server
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=clean_environment())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    clients = Clients(ServerProcess(process))
    threads = [threading.Thread(target=clients.run) for _ in range(_NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    clients.signalled_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    try:
        status = process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    took = time.monotonic() - began
    clients.stopped.set()
    for thread in threads:
        thread.join()
    return status, took, clients, clients.server.log


def main(number: int, seed: int, arguments: list[str]) -> int:
    moments = random.Random(seed)
    total: collections.Counter[str] = collections.Counter()
    statuses: collections.Counter[int] = collections.Counter()
    longest = 0.0
    for index in range(number):
        moment = moments.uniform(0, 4)
        status, took, clients, log = one_round(moment, arguments)
        statuses[status] += 1
        total += clients.outcomes
        longest = max(longest, took)
        failed = [outcome for outcome in clients.outcomes if outcome.startswith("failed")]
        if status or failed:
            print(f"round {index}, SIGTERM after {moment:.3f} s: exit status {status}, {failed}\n{log}", flush=True)
    failures = sum(count for outcome, count in total.items() if outcome.startswith("failed"))
    print(f"{number} servers, seed {seed}: exit statuses {dict(statuses)}, at most {longest:.1f} s to end")
    print(f"requests: {dict(total.most_common())}")
    return int(set(statuses) != {0} or failures > 0)


if __name__ == "__main__":
    number, seed = [*sys.argv[1:3], *("50", "1")[len(sys.argv[1:3]) :]]
    raise SystemExit(main(int(number), int(seed), sys.argv[3:]))
