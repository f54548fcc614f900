"""A server of OpenAI's API as an engine: token ids go to its /v1/completions, and token ids come back.

Text, stop strings, templates and errors stay this handler's. All requests share one event loop, which runs in `step`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handler.core.errors import ConfigError, Problem, Problems
from handler.core.values import Adapter, Finish, Sampling
from handler.engines.base import Capabilities, EngineConfig, EngineInfo, Interrupted, Output, Step
from handler.engines.huggingface.checkpoint import load_tokenizer
from handler.engines.huggingface.hub import fetch_descriptions as fetch
from handler.engines.huggingface.hub import is_hub_name
from handler.engines.huggingface.model_files import check_tokenizer
from handler.engines.openai.answer import Answer, Failed, Part, Refused
from handler.engines.openai.client import Client, find_kind, find_model
from handler.engines.openai.kinds import KINDS, completion
from handler.engines.openai.servers import Server, choose
from handler.engines.silence import Silence

__all__ = ["UrlEngine", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare"]

_IDLE = 0.05  # seconds without news after which a step is empty: the supervisor counts silence as a hang
_ATTEMPTS = 3
_PAUSE = 0.1  # seconds before the second attempt at the same server, doubled for the third
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
        options = config.options
        self._loop = _new_loop()
        self._kind = options["base_url_kind"]
        if self._kind == "auto":
            self._kind = find_kind(options["base_url"])
        self._max_silence = float(options["base_url_timeout"])
        self._servers = [Server(url) for url in options["base_url"]]
        self._has_tls = any(url.startswith("https:") for url in options["base_url"])
        self._running: dict[int, _Running] = {}
        self._parts: dict[int, Part] = {}  # by key; what came since the last step
        self._interrupted = False
        self._listen_at = 0.0  # the time of the next look for silent servers
        self._client: Client = self._complete(_new_client(options["base_url_connect_timeout"]))
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            found = find_model(self._client, options["base_url"], options.get("base_url_model"))
            self._model, most = self._complete(found)
            limits = [limit for limit in (most, config.max_total_tokens) if limit]
            if not limits:
                raise ConfigError(
                    f"{self._servers[0].url} does not say how many tokens it takes: set option.max_model_len"
                )
            on_failure.pop_all()
        self.info = EngineInfo("openai", self._kind, ", ".join(options["base_url"]), "remote", min(limits))

    def interrupt_on(self, fd: int) -> bool:
        self._loop.add_reader(fd, self._interrupt)
        return True

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, key: int, ids: Sequence[int], sampling: Sampling, *nothing: object) -> None:
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
                if running.silence.look() > self._max_silence and not running.silent:
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
                others.append(Output(key, (), (), Finish.ERROR, error=part.error, refused=part.refused))
        return Step(keys, ids, logprobs, others)

    def load_adapter(self, adapter: Adapter) -> None:
        raise ValueError("its adapters are loaded at option.base_url")

    def drop_adapter(self, adapter: Adapter) -> None:
        pass

    def close(self) -> None:
        for key in list(self._running):
            self.cancel(key)
        self._complete(self._client.close())
        self._complete(asyncio.sleep(_TLS_CLOSE if self._has_tls else 0))
        self._loop.close()

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _serve(self, key: int, body: Mapping[str, Any], num_tokens: int) -> None:
        """Get the answer from one server; after a failure before the first token, from another."""
        running = self._running[key]
        failed = None
        for attempt in range(_ATTEMPTS):
            server = choose(self._servers, self._loop.time())
            if server is failed:
                await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
            server.outstanding += num_tokens
            try:
                await self._stream(server, running, body)
            except Refused as error:
                self._fail(running, f"{server.url} {error}", error.words)
            except Failed as error:
                if running.ended:
                    return
                server.failed(self._loop.time())
                if running.answer.begun or attempt == _ATTEMPTS - 1:
                    self._fail(running, f"{server.url} {error}")
                else:
                    failed = server
                    continue
            except asyncio.CancelledError:
                if not running.silent or running.ended:
                    raise
                server.failed(self._loop.time())
                self._fail(running, f"{server.url} sent no token for {self._max_silence:g} s (option.base_url_timeout)")
            except Exception as error:  # a fault of ours ends this request only
                self._fail(running, f"{server.url}: {type(error).__name__}: {error}")
            else:
                server.answered()
            finally:
                server.outstanding -= num_tokens
            return

    async def _stream(self, server: Server, running: _Running, body: Mapping[str, Any]) -> None:
        """Read an answer to its end; after its finish_reason what follows frees the connection for the next."""
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
                        self._loop.stop()
            if not running.ended:
                raise Failed("ended the stream without a finish_reason")

    def _fail(self, running: _Running, reason: str, words: str = "") -> None:
        """End a request; one that has ended needs no more. `words` are for a client who has no token yet."""
        if not running.ended:
            running.ended = True
            part = self._parts.setdefault(running.key, Part())
            part.refused = bool(words) and not running.answer.begun
            part.error = words if part.refused else reason
            self._loop.stop()

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


async def _new_client(connect_timeout: float) -> Client:
    return Client(connect_timeout)  # aiohttp wants a running loop


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
        if not is_hub_name(model_id):
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
    kind = config.options.get("base_url_kind", "auto")
    return KINDS[find_kind(_urls(config)) if kind == "auto" else kind].capabilities


def _urls(config: EngineConfig) -> tuple[str, ...]:
    urls: tuple[str, ...] = config.options.get("base_url", ())
    if not urls:
        key = "option.base_url"
        raise ConfigError(Problem("", key, f"the engine openai needs {key}, as -o {key}=http://host:8000/v1"))
    return urls


def load(config: EngineConfig) -> UrlEngine:
    return UrlEngine(config)
