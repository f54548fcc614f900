"""Base class of engines that use remote servers. All requests share one event loop, which runs inside `step`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from handler.config.environment import secrets
from handler.core.errors import ConfigError, client_words, log_words
from handler.core.values import Extras, Finish, Sampling, StructuredOutput
from handler.engines.base import (
    EngineConfig,
    EngineInfo,
    EngineRequest,
    Interrupted,
    NoAdapters,
    Output,
    OwnServerLost,
    Silence,
    Step,
    Unsupported,
)
from handler.engines.process.own_server import OwnServer
from handler.engines.remote.servers import (
    A,
    BrokeOff,
    Busy,
    Failed,
    Ill,
    Lost,
    M,
    NoConnection,
    NotLoaded,
    Part,
    Refused,
    RemoteServer,
    Silent,
    Software,
    choose,
    find_model,
)
from handler.engines.remote.steps import Deliver, StepLoop

_IDLE = 0.25  # maximum seconds between two steps, which may be empty; the supervisor would consider silence a hang
_LAST = 0.05  # seconds without output after which the output of an own server that has ended is complete
_ATTEMPTS = 3  # at one server; each further server adds one
_MAX_BROKEN = 2  # servers that may close the connection during a request; the request itself may be the cause
_PAUSE = 0.1  # seconds before the second attempt at the same server, doubled for the third
_ASK_AGAIN = 1.0  # minimum seconds between two checks of a server after refused requests
_LINGER = 1.0  # maximum seconds from the finish_reason to the end of a stream
TLS_CLOSE = 0.25  # seconds in which TLS connections close; only then can uvloop's loop be closed
_SPINS = 16  # rounds of the event loop, in which connections close
_MAX_SILENT = 3  # failures in a row, of which the last is a timeout, after which the engine restarts its server
_REAP, _REAP_INTERVAL = 1.0, 0.01  # seconds in which a process whose connections are closed ends; between two looks
_PROBE_KEY = -1  # key of requests that find out whether a server enforces structured output
TRUST = 60.0  # seconds after which a server is queried again; it may have been restarted with other flags


class RemoteCall(Protocol):
    """A request to a server, and its response."""

    @property
    def begun(self) -> bool:
        """Whether a token has arrived. If so, the request can no longer be sent to another server."""


C = TypeVar("C", bound=RemoteCall)
T = TypeVar("T")


@dataclass
class Running(Generic[C]):
    """A request that was sent to a server.

    Attributes:
        silence: time since the last token, or since the start if no token has arrived.
        silent: whether the request was abandoned because the server was silent.
        held: end of the response, which is held back until the token counts arrive.
        ended: whether the caller has the complete response. The rest is read only to release the connection.
        probe_ids: ids of the response so far if the request is a probe, otherwise None.
    """

    key: int
    call: C
    task: asyncio.Task[None]
    silence: Silence
    silent: bool = False
    held: Part | None = None
    ended: bool = False
    probe_ids: list[int] | None = None


@dataclass
class Probes:
    """Probes that test whether a server enforces structured output on a prompt.

    Attributes:
        silence: time since the last token of a probe. It applies to all requests that wait for the probes.
        num_waiting: number of requests that wait for the probes. The probes end when no request waits for them any
            more.
    """

    task: asyncio.Task[bool]
    silence: Silence
    num_waiting: int = 0


class RemoteEngine(NoAdapters, ABC, Generic[C]):
    """Engine that sends requests to servers; see `engines.base.Engine`. Subclasses implement the servers' protocol.

    Args:
        kind: the software of the servers.
        max_silence: number of seconds without a token after which a request fails.
        close_seconds: number of seconds to wait for connections to close.
        own: server that the engine starts, which ends together with the engine; None if other servers are used.
    """

    no_adapters = "adapters are loaded by the server at option.base_url"
    own_name: ClassVar[str] = "the server"
    """Description of the engine's own server in messages."""

    def __init__(
        self,
        kind: Software,
        urls: Sequence[str],
        max_silence: float,
        close_seconds: float = 0.0,
        own: OwnServer | None = None,
    ) -> None:
        import uvloop

        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._kind = kind
        self._max_silence = max_silence
        self._close_seconds = close_seconds
        self._servers = [RemoteServer(url) for url in urls]
        self._secrets = (*secrets(), *_names(urls))
        self._running: dict[int, Running[C]] = {}
        self._steps = StepLoop(self._loop, min(_IDLE, max_silence / 4), self._end_silent)
        # The probes that are under way, by address, prompt and cache salt.
        self._probes: dict[tuple[str, tuple[int, ...], str], Probes] = {}
        self._own = own
        self._lost: Failed | None = None  # why the engine's own server has to be restarted
        self._interrupted = False

    # -- the protocol ----------------------------------------------------------------------------------------------

    @abstractmethod
    def new_call(self, request: EngineRequest) -> C:
        """Convert a request to the protocol.

        Raises:
            ValueError: the servers do not support the request.
        """

    @abstractmethod
    async def stream(self, server: RemoteServer, running: Running[C]) -> None:
        """Read a response to the end, and pass all of it to `take`.

        Raises:
            Refused: the server refuses the request.
            Failed: the server fails.
        """

    @abstractmethod
    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model.

        Raises:
            Failed: the server does not serve the model.
        """

    @abstractmethod
    async def disconnect(self) -> None:
        """Close all connections."""

    def take(self, server: RemoteServer, running: Running[C], part: Part) -> None:
        """Store a part of a response for the next step."""
        running.silence.begin()
        running.ended = part.finish is not None
        if running.probe_ids is not None:
            running.probe_ids += part.ids
            return
        server.begun()
        self._steps.add(running.key, part)

    def take_token(self, server: RemoteServer, running: Running[C], id: int) -> None:
        """Store a token without a log-probability for the next step."""
        if running.probe_ids is not None:
            return self.take(server, running, Part([id], [None]))
        running.silence.begin()
        server.begun()
        self._steps.add_token(running.key, id)

    def take_result(self, server: RemoteServer, running: Running[C], values: list[float]) -> None:
        """Store an embedding or scores, which end a request, for the next step."""
        self.take(server, running, Part(finish=Finish.EOS, extras=Extras(vector=values)))

    def hold(self, running: Running[C], part: Part) -> None:
        """Hold back the end of a response until its token counts arrive, for at most `_LINGER` seconds."""
        running.silence.begin()
        running.held = part
        self._steps.parts.pop(running.key, None)

    def release(self, server: RemoteServer, running: Running[C]) -> None:
        """Pass the end of a response to the next step if it was held back."""
        if running.held is not None and not running.ended:
            self.take(server, running, running.held)

    def interrupt_on(self, fd: int) -> bool:
        self._loop.add_reader(fd, self._interrupt)
        os.set_blocking(fd, True)  # uvloop makes it non-blocking: reading commands would spin
        return True

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Close the engine if the start that this context contains fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def find(
        self,
        name: str,
        config: EngineConfig,
        ask: Callable[[str], Awaitable[A]],
        fit: Callable[[A, M | None], M],
        model: str = "",
    ) -> M:
        """Wait until a server has a suitable model, and return the model; see `find_model` and `begin`.

        Args:
            model: name of the expected model for the log; "" if it may have any name.

        Raises:
            ConfigError: no server will ever have a suitable model, or the engine's own server has ended.
        """
        address = "option.base_url={}:" if self._own is None else f"{self.own_name} at {{}}"
        urls = [server.url for server in self._servers]
        try:
            common, failed = self.complete(find_model(urls, ask, fit, repr(model) if model else "a model", address))
        except ConfigError:
            if failure := self.own_failure():
                raise ConfigError(f"{self.own_name} {failure}") from None
            raise
        self.begin(name, common.max_tokens, config, failed)
        return common

    def begin(self, name: str, max_tokens: int | None, config: EngineConfig, failed: Mapping[str, Failed]) -> None:
        """Set the engine information from the servers' reports at startup.

        Args:
            name: name of the engine.
            max_tokens: the servers' limit for the prompt and the response together; None if they do not report it.
            failed: errors of servers that failed, by address. For now, other servers are preferred.

        Raises:
            ConfigError: the limit is unknown.
        """
        urls = [server.url for server in self._servers]
        limits = [limit for limit in (max_tokens, config.options.max_model_len) if limit]
        if not limits:
            raise ConfigError(f"{urls[0]} does not report its maximum number of tokens: set option.max_model_len")
        self.info = EngineInfo(name, self._kind.name, ", ".join(urls), "remote", min(limits))
        self._steps.interval = min(self._steps.interval, config.options.engine_timeout / 4)
        for server in self._servers:
            if (error := failed.get(server.url)) is not None:
                self.leave_out(server, error)
            else:
                server.known = True

    def check_max_tokens(self, most: int | None) -> None:
        """Raise Failed if a server's limit on the tokens of a request is lower than this engine's.

        Args:
            most: the server's limit for the prompt and the response together; None if it does not report it.
        """
        if most is not None and most < self.info.max_total_tokens:
            detail = f"{most} instead of {self.info.max_total_tokens}; to use it, restart this handler"
            raise Failed("accepts fewer tokens per request than this handler", detail)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        try:
            call = self.new_call(request)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        if self.rests:
            for _ in range(_SPINS):  # servers may have closed connections while the loop was not running
                self._run_once()
        key = request.key
        most = request.parameters.max_new_tokens if isinstance(request.parameters, Sampling) else 0
        task = self._loop.create_task(self._serve(request, len(request.ids) + most))
        self._running[key] = running = Running(key, call, task, Silence())
        task.add_done_callback(lambda _: self._forget(running))

    @property
    def rests(self) -> bool:
        """Whether no response is expected, so that nothing runs the event loop."""
        return all(running.ended for running in self._running.values())

    def _forget(self, running: Running[C]) -> None:
        if self._running.get(running.key) is running:  # a later request may have the same key
            del self._running[running.key]

    def cancel(self, key: int) -> None:
        self._steps.drop(key)
        running = self._running.pop(key, None)
        if running is None:
            return
        running.task.cancel()
        for _ in range(_SPINS):  # nothing else runs the loop if this was the last request
            self._run_once()
            if running.task.done():
                break
        self._run_once()  # the connection closes one round later

    def step(self) -> Step:
        steps: list[Step] = []
        try:
            self.run_steps(steps.append)
        except (Interrupted, OwnServerLost):
            if not steps:
                raise
        return steps[0] if steps else Step.of([])

    def run_steps(self, deliver: Deliver) -> None:
        """Run the event loop, and pass each step to `deliver` until it returns false; see `RunsLoop`."""
        ended = False
        if self._lost is None and not self._interrupted:
            ended = self._steps.run(deliver)
        if self._lost is not None:
            if not ended and self.own_failure():
                self._read_rest(deliver)
            raise OwnServerLost(f"{self.own_name} {self._lost}")
        if self._interrupted and not ended:
            self._interrupted = False
            raise Interrupted

    def _read_rest(self, deliver: Deliver) -> None:
        """Deliver what the engine's own server has sent before it ended."""
        came = True

        def note(step: Step) -> object:
            nonlocal came
            came = True
            return deliver(step)

        deadline = self._loop.time() + _LINGER
        while came and self._loop.time() < deadline:
            came = False
            timer = self._loop.call_later(_LAST, self._steps.stop)
            if self._steps.run(note):
                break
            timer.cancel()

    def _end_silent(self) -> None:
        """Abandon the requests whose servers are silent."""
        for running in self._running.values():
            has_end = running.ended or running.held is not None
            most = min(_LINGER, self._max_silence) if has_end else self._max_silence
            if running.silence.look() > most and not running.silent:
                running.silent = True
                running.task.cancel()

    def close(self) -> None:
        for key in list(self._running):
            self.cancel(key)
        for server in self._servers:
            if server.asking is not None:
                server.asking.cancel()
        self._steps.close()
        self.complete(self.disconnect())
        self.complete(asyncio.sleep(self._close_seconds))
        self._loop.close()
        if self._own is not None:
            self._own.stop()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _serve(self, request: EngineRequest, num_tokens: int) -> None:
        """Get a response from a server. If it fails before the first token, retry, on another server if possible."""
        running = self._running[request.key]
        tries: Counter[RemoteServer] = Counter()
        broken: set[RemoteServer] = set()
        busy: dict[RemoteServer, Failed] = {}  # servers that were busy at the last attempt
        for attempt in range(len(self._servers) + _ATTEMPTS - 1, 0, -1):
            server = self._choose(tries, busy)
            if tries[server]:
                with running.silence.hold():
                    await asyncio.sleep(_PAUSE * 2 ** (tries[server] - 1))
            tries[server] += 1
            server.outstanding += num_tokens
            try:
                await self.ask(server)
                if await self._enforces(server, running, request):
                    await self.stream(server, running)
                else:
                    self._refuse_rule(running, server)
            except Refused as error:
                self._refuse(running, server, error)
            except Failed as error:
                self.release(server, running)
                if running.ended or await self._has_lost_own(error):
                    return
                self.leave_out(server, error)
                if isinstance(error, BrokeOff):
                    broken.add(server)
                busy.pop(server, None)
                if isinstance(error, Busy):
                    busy[server] = error
                ends = running.call.begun or len(broken) >= _MAX_BROKEN
                if not ends and attempt > 1 and any(_is_available(other, busy) for other in self._servers):
                    continue
                if busy and not ends:
                    self._turn_away(running, busy)
                else:
                    self._fail(running, server, error)
            except asyncio.CancelledError:
                if running.silent:
                    self.release(server, running)
                if not running.silent or running.ended:
                    raise
                self._time_out(running, server)
            except Exception as error:  # a bug here ends this request only
                self._fail(running, server, Failed("sent a response that cannot be processed", repr(error)))
            else:
                server.answered()
            finally:
                server.outstanding -= num_tokens
            return

    async def _enforces(self, server: RemoteServer, running: Running[C], request: EngineRequest) -> bool:
        """Return whether a server enforces a request's structured output, which depends on the server's flags.

        If a server does not enforce it on every prompt, probes test whether the server does so on this prompt. vLLM
        with --reasoning-parser enforces structured output if the reasoning has ended in the prompt
        (vllm/v1/structured_output). vLLM also enforces it after the response's reasoning, which is enough for
        structured output that allows text.
        """
        rule = request.parameters.structured_output if isinstance(request.parameters, Sampling) else None
        if rule is None:
            return True
        if self._loop.time() >= server.enforces_until:
            server.enforces_rules = await self._obeys(server, running, [0])
            server.enforces_until = self._loop.time() + TRUST
        after_reasoning = rule.allows_text and request.sampling.thoughts is not None and self._kind.enforces_later
        if server.enforces_rules or after_reasoning:
            return True
        return await self._obeys(server, running, request.ids, request.sampling.cache_salt)

    async def _obeys(self, server: RemoteServer, running: Running[C], ids: Sequence[int], cache_salt: str = "") -> bool:
        """Return whether a server enforces structured output on a prompt. Concurrent requests share the probes."""
        key = server.url, tuple(ids), cache_salt
        probes = self._probes.get(key)
        if probes is None:
            silence = copy.copy(running.silence)
            task = self._loop.create_task(self._probe(server, ids, cache_salt, silence))
            probes = self._probes[key] = Probes(task, silence)
        probes.num_waiting += 1
        running.silence = probes.silence
        try:
            return await asyncio.shield(probes.task)
        finally:
            running.silence = copy.copy(probes.silence)
            probes.num_waiting -= 1
            if not probes.num_waiting:
                del self._probes[key]
                probes.task.cancel()
                await asyncio.wait([probes.task])

    async def _probe(self, server: RemoteServer, ids: Sequence[int], cache_salt: str, silence: Silence) -> bool:
        """Return whether three requests, each of which allows only a single text, get three different tokens."""
        task = asyncio.current_task()
        assert task is not None
        results: set[tuple[int, ...]] = set()
        for text in ("0", "1", "2"):
            rule = StructuredOutput("choice", f'["{text}"]')
            sampling = Sampling(max_new_tokens=1, logprobs=False, structured_output=rule, cache_salt=cache_salt)
            call = self.new_call(EngineRequest(_PROBE_KEY, ids, sampling))
            probe_ids: list[int] = []
            await self.stream(server, Running(_PROBE_KEY, call, task, silence, probe_ids=probe_ids))
            results.add(tuple(probe_ids))
        return len(results) == 3

    # -- servers -------------------------------------------------------------------------------------------------

    def _choose(self, tries: Counter[RemoteServer], busy: Mapping[RemoteServer, Failed]) -> RemoteServer:
        """Choose a server for a request. Also start checks of the servers whose pause is over.

        Args:
            busy: servers that were too busy for this request.
        """
        now = self._loop.time()
        for server in self._servers:
            if not server.known and not server.is_out(now):
                self._question(server)
        return choose([server for server in self._servers if _is_available(server, busy)], tries, now)

    async def ask(self, server: RemoteServer, *, again: bool = False) -> None:
        """Ensure that a server serves the model. Query it unless it has confirmed this and has not failed since.

        Args:
            again: whether to ask the server even if it has not failed.

        Raises:
            Failed: the server does not serve the model.
        """
        if server.known and not (again and self._loop.time() - server.asked_at > _ASK_AGAIN):
            return
        error = await asyncio.shield(self._question(server))
        if error is not None:
            raise error

    def _question(self, server: RemoteServer) -> asyncio.Task[Failed | None]:
        """Return the running check of a server. Start a check if none is running."""
        if server.asking is None or server.asking.done():
            server.asking = self._loop.create_task(self._check(server))
        return server.asking

    async def _check(self, server: RemoteServer) -> Failed | None:
        """Check a server. Return the error if it cannot serve the model, or None if it can."""
        try:
            await self.check(server)
        except Failed as error:
            self.leave_out(server, error)
            return error
        server.known, server.asked_at = True, self._loop.time()
        return None

    def watch_own(self, own: OwnServer) -> None:
        """Watch for the exit of the server that the engine has started."""
        own.watch()
        if own.end is not None:
            self._loop.add_reader(own.end, self._lose_own)

    def end_of_server(self) -> int | None:
        return None if self._own is None else self._own.end

    def own_failure(self) -> str:
        """Return how the engine's own server has ended, as a verb phrase; "" while it runs, or if there is none."""
        return "" if self._own is None else self._own.failure()

    def check_own(self) -> None:
        """Raise Failed if the engine's own server has ended, or another process has its port."""
        if self._own is None:
            return
        if failure := self.own_failure():
            raise Lost(failure)
        self._own.check_port()

    def _lose_own(self) -> bool:
        """End the engine at the next step if its own server has ended. Return whether it has."""
        assert self._own is not None
        if not (failure := self.own_failure()):
            return False
        if self._own.end is not None:
            self._loop.remove_reader(self._own.end)
        self._lost = Lost(failure)
        self._steps.stop()
        return True

    async def _has_lost_own(self, error: Failed) -> bool:
        """Return whether a request failed because the engine's own server has ended. All requests then end together.

        A killed process closes its connections shortly before it has ended.
        """
        if self._own is None or isinstance(error, Busy):
            return False
        until = self._loop.time() + (_REAP if isinstance(error, BrokeOff | NoConnection) else 0.0)
        while not self._lose_own():
            if self._loop.time() >= until:
                return False
            await asyncio.sleep(_REAP_INTERVAL)
        return True

    def leave_out(self, server: RemoteServer, error: Failed) -> None:
        """Prefer other servers for a while after a failure of this one.

        If the engine started the server, and the server will not recover, the engine ends at the next step. Its
        supervisor then restarts both.
        """
        if isinstance(error, NotLoaded):  # it serves other requests
            return
        if not isinstance(error, Busy):  # it may have been restarted
            server.enforces_until = 0.0
        if pause := server.failed(self._loop.time(), error.retry_after):
            reason = log_words(str(error), secrets())
            name = server.url if self._own is None else self.own_name
            ending = f"; other servers are preferred for {pause:g} s" if len(self._servers) > 1 else ""
            print(f"{name} {reason}{ending}", file=sys.stderr, flush=True)
        ends = isinstance(error, Ill) or (isinstance(error, Silent) and server.num_failures >= _MAX_SILENT)
        if ends and self._own is not None:
            self._lost = error
            self._steps.stop()

    # -- the ends of requests ------------------------------------------------------------------------------------

    def _refuse(self, running: Running[C], server: RemoteServer, error: Refused) -> None:
        """End a request that the server refuses. The client gets the server's message unless a token has arrived."""
        if running.call.begun:
            return self._fail(running, server, Failed(str(error), error.words))
        words = client_words(error.words, self._secrets) or f"the {self._kind.name} server answered {error.status}"
        self._end(running, words, f"{server.url} {error}", refused=True)

    def _refuse_rule(self, running: Running[C], server: RemoteServer) -> None:
        words = f"the {self._kind.name} server does not enforce structured output on this prompt"
        detail = f"{server.url} does not enforce it"
        self._end(running, words + self._kind.not_enforced, detail, refused=True)

    def _time_out(self, running: Running[C], server: RemoteServer) -> None:
        failure = Silent(f"sent no token for {self._max_silence:g} s (option.base_url_timeout)")
        self.leave_out(server, failure)
        self._fail(running, server, failure)

    def _turn_away(self, running: Running[C], busy: dict[RemoteServer, Failed]) -> None:
        """End a request for which servers were busy. The client may retry as soon as any of these servers allows it."""
        server, error = next(reversed(busy.items()))
        waits = [failure.retry_after for failure in busy.values() if failure.retry_after]
        words = f"the {self._kind.name} server is busy: it {error.plain}"
        self._end(running, words, f"{server.url} {error}", retry_after=min(waits, default=0.0))

    def _fail(self, running: Running[C], server: RemoteServer, error: Failed) -> None:
        self._end(running, f"the {self._kind.name} server {error.plain}", f"{server.url} {error}")

    def _end(
        self, running: Running[C], error: str, detail: str, *, refused: bool = False, retry_after: float | None = None
    ) -> None:
        """End a request with an error, unless it has already ended."""
        if not running.ended:
            running.ended = True
            failure = Output(running.key, finish=Finish.ERROR, error=error, refused=refused, retry_after=retry_after)
            part = self._steps.parts.get(running.key) or Part()
            part.failure = failure._replace(detail=log_words(detail, secrets()))
            self._steps.add(running.key, part)

    # -- the loop ------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        self._interrupted = True
        if self._lost is None:
            self._steps.stop()

    def _run_once(self) -> None:
        """Run one iteration of the event loop."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the event loop until `work` is done, and return its result."""
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():  # an earlier stop may still be due
            self._loop.run_forever()
        return task.result()


def _is_available(server: RemoteServer, busy: Mapping[RemoteServer, Failed]) -> bool:
    """Return whether a request may be sent to a server. A busy server that requested a pause is not tried again."""
    return server not in busy or not busy[server].retry_after


def _names(urls: Sequence[str]) -> list[str]:
    """Return the host names to hide in messages. Plain words are omitted, because they could mean anything."""
    hosts = [urlsplit(url) for url in urls]
    names = [host.hostname for host in hosts if host.hostname and not host.hostname.isalpha()]
    return [*(host.netloc for host in hosts), *names]
