"""The llama-servers of an engine: their models, and questions about them.

Sources: llama.cpp b11434, tools/server/server-context.cpp (`get_props`) and tools/server/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from handler.core.errors import ConfigError, log_words
from handler.engines.base import EngineConfig, Silence
from handler.engines.llamacpp import child
from handler.engines.llamacpp.adapters import LoadedAdapters
from handler.engines.llamacpp.media import Projector
from handler.engines.llamacpp.slots import Slots
from handler.engines.openai.client import ask_each, suitable
from handler.engines.openai.url_engine import HttpEngine
from handler.engines.remote.engine import C
from handler.engines.remote.servers import Failed, Lost, RemoteServer, Software

SOFTWARE = Software("llamacpp")
_WATCH_INTERVAL = 1.0  # maximum seconds between two looks at the slots of a server


class LlamaModel(NamedTuple):
    """A server's model.

    Attributes:
        max_tokens: limit for the prompt and the response together; None if not reported.
        projector: how the model reads images; None if it does not.
        dimensions: number of dimensions of an embedding; 0 if the server is not used for embeddings.
    """

    name: str
    max_tokens: int | None
    num_slots: int
    projector: Projector | None = None
    dimensions: int = 0


@dataclass
class LlamaServerState:
    """What a server has said about itself, and what runs on it.

    Attributes:
        num_connections: number of connections of the client when it last asked the server for its model.
        projector: how the model reads images; None if it does not.
        adapters: the adapters that the server has loaded, if the engine serves adapters.
        is_free: whether its flags constrain no response. This is checked once, because the check takes a slot.
        divides_differently: whether the server divides some texts into other tokens than the model's tokenizer.
    """

    slots: Slots = field(default_factory=lambda: Slots(1))
    num_connections: int | None = None
    projector: Projector | None = None
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters)
    is_free: bool = False
    divides_differently: bool = False


class LlamaServers(HttpEngine[C]):
    """Base class of engines that use llama.cpp's servers. Without option.base_url, they start a server themselves.

    Attributes:
        model: the servers' common model.
    """

    model: LlamaModel

    own_name = child.NAME

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._child = None if "base_url" in config.engine_options else child.start(config)
        if self._child is None:
            super().__init__(SOFTWARE, config)
        else:
            super().__init__(SOFTWARE, config, self._child, self._child.key)
        self._states = {server.url: LlamaServerState() for server in self._servers}
        with self.closed_on_failure():
            self.model = self.find("openai", config, self.model_at, self.fit, self.name)
            self.name = self.model.name
            if self._child is not None:
                props = self.complete(self._client.get(f"{self._child.url}/props"))
                self.info = child.described(self.info, props)
                self._child.log.end_start()
                self.watch_own(self._child)

    async def model_at(self, url: str) -> LlamaModel:
        """Return the model of a server, which also says how many slots it has.

        Raises:
            Failed: the server has no model yet, or does not describe it.
        """
        self.check_own()
        state = self._states[url]
        state.num_connections = self._client.num_connections
        name = suitable(await self._client.models(url), self.name or None, None).name
        model = _described(name, await self._client.get(f"{root(url)}/props"))
        if state.slots.count != model.num_slots:
            state.slots = Slots(model.num_slots)
        return model

    def fit(self, model: LlamaModel, first: LlamaModel | None) -> LlamaModel:
        """Return the model of a server. Raise Failed if the first server has another model."""
        if first is not None and model.name != first.name:
            raise Failed("serves another model", f"{model.name!r} instead of {first.name!r}")
        return model

    async def check_connection(self, server: RemoteServer) -> None:
        """Ask a server for its model after each new connection, because it may have been restarted with another model.

        llama-server ignores the name of the model in a request.

        Raises:
            Failed: the server serves another model.
        """
        if self._child is not None:
            # While it runs, no other process can listen on its port. That it listens there was checked at the start.
            if failure := self.own_failure():
                raise Lost(failure)
            return
        if self._client.num_connections != self._states[server.url].num_connections:
            server.known = False
            await self.ask(server)

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        self.check_max_tokens(self.fit(await self.model_at(server.url), self.model).max_tokens)

    async def _post(self, url: str, path: str, body: Mapping[str, Any]) -> bytes:
        """Send a request to llama-server's own API; see `HttpClient.post`."""
        return await self._client.post(f"{root(url)}{path}", body)

    async def _compute_whole(self, url: str, path: str, body: Mapping[str, Any], silence: Silence) -> bytes:
        """Send a request whose response is no stream; see `HttpClient.post`. A server that computes is not silent."""
        watch = self._loop.create_task(self._watch_slots(url, silence))
        try:
            data = await self._post(url, path, body)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        silence.begin()
        return data

    async def _watch_slots(self, url: str, silence: Silence) -> None:
        """End the silence each time that a server's slots have made progress, as long as the server tells."""
        before = None
        with contextlib.suppress(Failed):  # it may have been started with --no-slots
            while True:
                await asyncio.sleep(min(_WATCH_INTERVAL, self._max_silence / 4))
                state = await self._client.get(f"{root(url)}/slots", waits=True)
                if before not in (None, state):
                    silence.begin()
                before = state


@functools.lru_cache
def has_projector(urls: tuple[str, ...]) -> bool:
    """Return whether servers read images, as far as is known. This blocks for up to 5 s.

    If no server responds, they may, and the engine refuses images later.
    """
    reads_images = []
    for props in _ask_props(urls):
        with contextlib.suppress(Failed):
            if isinstance(props, bytes):
                reads_images.append(_described("", props).projector is not None)
    return any(reads_images) or not reads_images


def _ask_props(urls: Sequence[str]) -> list[bytes | BaseException]:
    """Return the description of each server, or the reason why there is none. This blocks for up to 5 s."""
    return ask_each(urls, lambda client, url: client.get(f"{root(url)}/props"))


def served_path(urls: Sequence[str]) -> Path:
    """Return the file that the first of the servers that responds has loaded. This blocks for up to 5 s.

    Raises:
        ConfigError: no server responds, or its file cannot be read here.
    """
    reasons = []
    for url, props in zip(urls, _ask_props(urls), strict=True):
        path = None
        with contextlib.suppress(ValueError, AttributeError, OSError):  # OSError: the name is too long
            path = orjson.loads(props).get("model_path") if isinstance(props, bytes) else None
            if isinstance(path, str) and path and Path(path).is_file():
                return Path(path)
        served = f"its file {path!r:.200} is not on this machine" if path else "it does not report its file"
        reasons.append(f"{url}: {props if isinstance(props, BaseException) else served}")
    raise ConfigError(
        f"there is no MODEL argument, and no server's file can be read: {log_words('; '.join(reasons))}. Set "
        "option.model_id to the .gguf file that the servers have loaded, or to the model's Hugging Face directory"
    )


def root(url: str) -> str:
    """Return the address of llama-server's own API: that of OpenAI's API without `/v1`."""
    return url.removesuffix("/v1")


def _described(name: str, data: bytes) -> LlamaModel:
    """Read /props.

    Raises:
        Failed: it is not an object.
    """
    try:
        props = orjson.loads(data)
        context = (props.get("default_generation_settings") or {}).get("n_ctx")
        count = props.get("total_slots")
    except (ValueError, AttributeError) as error:
        raise Failed("does not describe its model", f"its /props cannot be read: {error!r}") from None
    is_limit = type(context) is int and context > 0
    num_slots = count if type(count) is int and count > 0 else 1
    return LlamaModel(name, context if is_limit else None, num_slots, Projector.read(props))
