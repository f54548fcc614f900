"""A server of OpenAI's API as an engine: token ids go to its /v1/completions, and token ids come back.

Text, stop strings, templates and errors stay this handler's. All requests share one event loop, which runs in `step`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from handler.config.environment import secrets
from handler.core.errors import ConfigError, Problem, Problems, client_words, log_words
from handler.core.values import Adapter, Finish
from handler.engines.base import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    EngineRequest,
    Interrupted,
    Output,
    Silence,
    Step,
)
from handler.engines.huggingface.files import check_tokenizer, is_fetched, load_tokenizer
from handler.engines.huggingface.files import fetch_descriptions as fetch
from handler.engines.openai.answer import Answer, Failed, Part, Refused
from handler.engines.openai.client import Client, Server, choose, find_kind, find_model, has_tls, suitable
from handler.engines.openai.kinds import KINDS, completion

__all__ = ["UrlEngine", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare"]

_IDLE = 0.05  # seconds without news after which a step is empty: the supervisor counts silence as a hang
_ATTEMPTS = 3  # of one server; further ones have one each
_MOST_BROKEN = 2  # servers whose connections may end under one request: it may be the reason
_PAUSE = 0.1  # seconds before the second attempt at the same server, doubled for the third
_ASK_AGAIN = 1.0  # seconds between questions what a server serves, of those who were refused there
_LINGER = 1.0  # seconds in which a stream has to end after its finish_reason
_TLS_CLOSE = 0.25  # seconds in which TLS connections close; uvloop's loop cannot be closed before
_SPINS = 16  # rounds of the event loop, in which connections close


@dataclass
class _Running:
    """A request at a server.

    Attributes:
        silence: since the last token, or the start.
        silent: it was given up for its silence.
        ended: its caller has all; what is left frees its connection.
    """

    key: int
    answer: Answer
    task: asyncio.Task[None]
    silence: Silence
    silent: bool = False
    ended: bool = False


class UrlEngine:
    """See `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        options = config.options.engine_options
        self._loop = _new_loop()
        self._kind = options["base_url_kind"]
        self._wanted_kind: str | None = None  # any: the operator knows better
        if self._kind == "auto":
            self._kind = self._wanted_kind = find_kind(options["base_url"])
        self._max_silence = float(options["base_url_timeout"])
        self._servers = [Server(url) for url in options["base_url"]]
        self._secrets = (*secrets(), *_names(options["base_url"]))
        self._has_tls = has_tls(options["base_url"])
        self._running: dict[int, _Running] = {}
        self._parts: dict[int, Part] = {}  # by key; what came since the last step
        self._interrupted = False
        self._listen_at = 0.0  # the time of the next look for silent servers
        self._client: Client = self._complete(_new_client(options["base_url_connect_timeout"], self._has_tls))
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            asked = find_model(self._client, options["base_url"], options.get("base_url_model"), self._wanted_kind)
            found = self._complete(asked)
            self._model = found.model
            limits = [limit for limit in (found.max_tokens, config.options.max_model_len) if limit]
            if not limits:
                raise ConfigError(
                    f"{self._servers[0].url} does not say how many tokens it takes: set option.max_model_len"
                )
            on_failure.pop_all()
        self.info = EngineInfo("openai", self._kind, ", ".join(options["base_url"]), "remote", min(limits))
        for server in self._servers:
            if (error := found.out.get(server.url)) is not None:
                self._leave_out(server, error)
            else:
                server.known = True

    def interrupt_on(self, fd: int) -> bool:
        self._loop.add_reader(fd, self._interrupt)
        return True

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        key, ids, sampling = request.key, request.ids, request.sampling
        body = completion(self._kind, self._model, ids, sampling)
        answer = Answer(
            frozenset(sampling.stop_token_ids),
            sampling.top_logprobs,
            body["max_tokens"],
            scored=sampling.logprobs or bool(sampling.top_logprobs),
        )
        if all(running.ended for running in self._running.values()):
            for _ in range(_SPINS):  # while the loop rested, the server may have closed connections
                self._run_once()
        task = self._loop.create_task(self._serve(key, body, len(ids) + sampling.max_new_tokens))
        self._running[key] = _Running(key, answer, task, Silence())
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def cancel(self, key: int) -> None:
        self._parts.pop(key, None)
        running = self._running.pop(key, None)
        if running is None:
            return
        running.task.cancel()
        for _ in range(_SPINS):  # nothing else runs the loop where this was the last request
            self._run_once()
            if running.task.done():
                break
        self._run_once()  # the connection closes one round later

    def step(self) -> Step:
        if self._parts:
            self._run_once()
        else:
            timer = self._loop.call_later(_IDLE, self._loop.stop)
            self._loop.run_forever()
            timer.cancel()
        now = self._loop.time()
        if now >= self._listen_at:
            self._listen_at = now + min(1.0, self._max_silence / 4)
            for running in self._running.values():
                most = min(_LINGER, self._max_silence) if running.ended else self._max_silence
                if running.silence.look() > most and not running.silent:
                    running.silent = True
                    running.task.cancel()
        if self._interrupted:
            self._interrupted = False
            raise Interrupted
        parts, self._parts = self._parts, {}
        keys: list[int] = []
        ids: list[int] = []
        logprobs: list[float | None] = []
        others: list[Output] = []
        for key, part in parts.items():
            if len(part.ids) == 1 and not part.tops and part.finish is None and part.error is None:  # nearly every one
                keys.append(key)
                ids.append(part.ids[0])
                logprobs.append(part.logprobs[0])
                continue
            finish = None if part.error is not None else part.finish
            if part.ids or finish is not None:
                others.append(Output(key, part.ids, part.logprobs, finish, tops=part.tops or None))
            if part.error is not None:
                others.append(_error(key, part))
        return Step(keys, ids, logprobs, others)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError("its adapters are loaded at option.base_url")

    def drop_adapter(self, adapter: Adapter) -> None:
        pass

    def close(self) -> None:
        for key in list(self._running):
            self.cancel(key)
        for server in self._servers:
            if server.asking is not None:
                server.asking.cancel()
        self._complete(self._client.close())
        self._complete(asyncio.sleep(_TLS_CLOSE if self._has_tls else 0))
        self._loop.close()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _serve(self, key: int, body: Mapping[str, Any], num_tokens: int) -> None:
        """Get the answer from one server; after a failure before the first token, from another."""
        running = self._running[key]
        tries: Counter[Server] = Counter()
        broken: set[Server] = set()
        busy: dict[Server, Failed] = {}  # those that had no room when they were last asked
        for attempt in range(len(self._servers) + _ATTEMPTS - 1, 0, -1):
            server = self._choose(tries, busy)
            if tries[server]:
                await asyncio.sleep(_PAUSE * 2 ** (tries[server] - 1))
            tries[server] += 1
            server.outstanding += num_tokens
            try:
                await self._ask(server)
                await self._stream(server, running, body)
            except Refused as error:
                self._refuse(running, server, error)
            except Failed as error:
                if running.ended:
                    return
                self._leave_out(server, error)
                if error.broke_off:
                    broken.add(server)
                busy.pop(server, None)
                if error.busy:
                    busy[server] = error
                ends = running.answer.begun or len(broken) >= _MOST_BROKEN
                if not ends and attempt > 1 and any(_may_be_asked(one, busy) for one in self._servers):
                    continue
                if busy and not ends:
                    self._turn_away(running, busy)
                else:
                    self._fail(running, server, error)
            except asyncio.CancelledError:
                if not running.silent or running.ended:
                    raise
                silent = Failed(f"sent no token for {self._max_silence:g} s (option.base_url_timeout)")
                self._leave_out(server, silent)
                self._fail(running, server, silent)
            except Exception as error:  # a fault of ours ends this request only
                self._fail(running, server, Failed("has sent what this server cannot read", repr(error)))
            else:
                server.answered()
            finally:
                server.outstanding -= num_tokens
            return

    async def _stream(self, server: Server, running: _Running, body: Mapping[str, Any]) -> None:
        """Read an answer to its end; after its finish_reason what follows frees the connection for the next.

        Raises:
            Refused, Failed: it is none.
        """
        try:
            async with self._client.events(server.url, body) as events:
                async for batch in events:
                    for event in batch:
                        if running.ended:
                            break
                        part = self._parts.get(running.key) or Part()
                        if running.answer.read(event, part):
                            running.silence.begin()
                            running.ended = part.finish is not None
                            self._parts[running.key] = part
                            server.begun()
                            self._loop.stop()
                if not running.ended:
                    raise Failed("ended its answer without a finish_reason")
        except Refused:
            if not running.answer.begun:
                await self._ask(server, again=True)  # another model than ours may refuse what ours takes
            raise

    # -- servers -------------------------------------------------------------------------------------------------

    def _choose(self, tries: Counter[Server], busy: Mapping[Server, Failed]) -> Server:
        """Choose a server for a request; those whose pause is over are asked meanwhile what they serve.

        Args:
            busy: those that had no room for it.
        """
        now = self._loop.time()
        for server in self._servers:
            if not server.known and not server.is_out(now):
                self._question(server)
        return choose([server for server in self._servers if _may_be_asked(server, busy)], tries, now)

    async def _ask(self, server: Server, *, again: bool = False) -> None:
        """Make sure that a server serves the model; ask it where it has failed since it last said so.

        Raises:
            Failed: it does not.
        """
        if server.known and not (again and self._loop.time() - server.asked_at > _ASK_AGAIN):
            return
        error = await asyncio.shield(self._question(server))
        if error is not None:
            raise error

    def _question(self, server: Server) -> asyncio.Task[Failed | None]:
        """Return the question that is under way, or a new one."""
        if server.asking is None or server.asking.done():
            server.asking = self._loop.create_task(self._check(server))
        return server.asking

    async def _check(self, server: Server) -> Failed | None:
        """Ask a server whether it serves the model, and as many tokens as this one promises."""
        try:
            model = suitable(await self._client.models(server.url), self._model, self._wanted_kind)
            most = self.info.max_total_tokens
            if model.max_tokens is not None and model.max_tokens < most:
                detail = f"it takes {model.max_tokens}, and {most} were promised at the start: start again to use it"
                raise Failed("takes fewer tokens than the others", detail)
        except Failed as error:
            self._leave_out(server, error)
            return error
        server.known, server.asked_at = True, self._loop.time()
        return None

    def _leave_out(self, server: Server, error: Failed) -> None:
        if pause := server.failed(self._loop.time(), error.retry_after):
            reason = log_words(str(error), secrets())
            print(f"{server.url} gets no requests for {pause:g} s: it {reason}", file=sys.stderr, flush=True)

    # -- the ends of requests ------------------------------------------------------------------------------------

    def _refuse(self, running: _Running, server: Server, error: Refused) -> None:
        """End a request that the server finds fault with: its words are for a client who has no token yet."""
        if running.answer.begun:
            return self._fail(running, server, Failed(str(error), error.words))
        words = client_words(error.words, self._secrets) or f"its server answered {error.status}"
        self._end(running, words, f"{server.url} {error}", refused=True)

    def _turn_away(self, running: _Running, busy: dict[Server, Failed]) -> None:
        """End a request for which no server has room; it may come again when the first of them wants it."""
        server, error = next(reversed(busy.items()))
        detail = log_words(f"{server.url} {error}", secrets())
        waits = [one.retry_after for one in busy.values() if one.retry_after]
        self._end(
            running, f"the {self._kind} server is busy: it {error.plain}", detail, retry_after=min(waits, default=0.0)
        )

    def _fail(self, running: _Running, server: Server, error: Failed) -> None:
        detail = log_words(f"{server.url} {error}", secrets())
        self._end(running, f"the {self._kind} server {error.plain}", detail)

    def _end(
        self, running: _Running, error: str, detail: str, *, refused: bool = False, retry_after: float | None = None
    ) -> None:
        """End a request with an error; one that has ended needs none."""
        if not running.ended:
            running.ended = True
            part = self._parts.setdefault(running.key, Part())
            part.error, part.detail, part.refused, part.retry_after = error, detail, refused, retry_after
            self._loop.stop()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _interrupt(self) -> None:
        self._interrupted = True
        self._loop.stop()

    def _run_once(self) -> None:
        """Do what is ready now."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()

    def _complete(self, work: Any) -> Any:
        task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._loop.stop())
        while not task.done():  # an earlier stop may still be due
            self._loop.run_forever()
        return task.result()


def _may_be_asked(server: Server, busy: Mapping[Server, Failed]) -> bool:
    """Return whether a request may be tried at a server: not again at one that wants to be left alone for a while."""
    return server not in busy or not busy[server].retry_after


def _error(key: int, part: Part) -> Output:
    """Return the output that ends a request with an error."""
    return Output(
        key,
        (),
        (),
        Finish.ERROR,
        error=part.error,
        refused=part.refused,
        detail=part.detail,
        retry_after=part.retry_after,
    )


def _names(urls: Sequence[str]) -> list[str]:
    """Return the servers' names, as a message may have them; a plain word is none that could be told from others."""
    hosts = [urlsplit(url) for url in urls]
    names = [host.hostname for host in hosts if host.hostname and not host.hostname.isalpha()]
    return [*(host.netloc for host in hosts), *names]


async def _new_client(connect_timeout: float, tls: bool) -> Client:
    return Client(connect_timeout, tls=tls)  # aiohttp wants a running loop


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def check(model_id: str | None, config: EngineConfig) -> None:
    problems = Problems()
    with problems:
        _urls(config)
    with problems:
        if not is_fetched(model_id):
            prepare(model_id, config)
    problems.check()


def prepare(model_id: str | None, config: EngineConfig) -> Path:
    """Return the directory of `option.model_id`, of which tokenizer, template and config are read.

    Raises:
        ConfigError: there is none, or it has no tokenizer.
    """
    if model_id is None or not Path(model_id).is_dir():
        given = "" if model_id is None else f"; {model_id!r} is none"
        raise ConfigError(f"the engine openai needs option.model_id, the model's directory or hub name{given}")
    check_tokenizer(Path(model_id))
    return Path(model_id)


def capabilities(config: EngineConfig) -> Capabilities:
    """Return those of the server; for `auto` it is asked for its kind.

    Raises:
        ConfigError: it does not answer, or is of no known kind.
    """
    kind = config.options.engine_options.get("base_url_kind", "auto")
    return KINDS[find_kind(_urls(config)) if kind == "auto" else kind].capabilities


def _urls(config: EngineConfig) -> tuple[str, ...]:
    urls: tuple[str, ...] = config.options.engine_options.get("base_url", ())
    if not urls:
        key = "option.base_url"
        raise ConfigError(Problem("", key, f"the engine openai needs {key}, as -o {key}=http://host:8000/v1"))
    return urls


def load(config: EngineConfig) -> UrlEngine:
    return UrlEngine(config)
