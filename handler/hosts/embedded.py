"""The embedded server: engine, tokenizer and HTTP brought up together, without Java or Docker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import sys
import time
from types import FrameType

from handler import event_loop, garbage
from handler.adapter_registry import AdapterHome
from handler.config import Config
from handler.engines.base import EngineInfo
from handler.engines.remote import State
from handler.engines.worker import Spec
from handler.errors import ConfigError
from handler.formatters.loading import Formatters
from handler.hosts.access import OPEN, Access
from handler.hosts.http import App
from handler.hosts.listen import Server, bind
from handler.hosts.loaded import loaded_model
from handler.hosts.service import Service
from handler.launch import (
    adapter_home,
    engine_spec,
    load_tokenizer,
    model_formatters,
    start_engine,
)

log = logging.getLogger("handler.server")


def serve(config: Config, host: str, port: int, access: Access = OPEN) -> int:
    """Serve until a signal; returns the exit status.

    Raises:
        ConfigError: it cannot start: the address is taken, the model or the engine cannot be had.
    """
    signal.signal(signal.SIGTERM, _leave)  # until the server has its own way
    for warning in config.warnings:
        log.info("%s", warning)
    listener = bind(host, port, config.client_timeout)  # first: a taken port is known before a model is loaded
    with contextlib.closing(listener):
        formatters = model_formatters(config)
        spec = engine_spec(config)
        adapters = adapter_home(config, spec)
        return event_loop.run(_serve(config, spec, listener, formatters, adapters, access))


def _leave(sig: int, frame: FrameType | None) -> None:
    """Asked to stop before there was anything to finish."""
    raise SystemExit(0)


async def _serve(
    config: Config, spec: Spec, listener: socket.socket, formatters: Formatters, adapters: AdapterHome, access: Access
) -> int:
    began = time.perf_counter()
    what = f"loading {config.model_id or 'the demo model'} with" if spec.config.model else "starting"
    progress = asyncio.ensure_future(_show_progress(f"{what} {spec.engine}"))
    engine = start_engine(config, spec)  # loads in its own process, the tokenizer meanwhile in this one
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, spec)
    except BaseException:
        progress.cancel()
        engine.close()
        raise

    def changed(state: State) -> None:
        if state is not State.LOADING:
            progress.cancel()
        if state is State.CLOSED:
            server.stop()
        elif state is State.READY and not engine.restarts:
            seconds = time.perf_counter() - began
            print(f"{_CLEAR}ready after {seconds:.1f} s: {_describe(engine.info)}", file=sys.stderr)
            print(_greeting(listener, access), file=sys.stderr, flush=True)

    garbage.keep_collecting()
    service = Service(loaded_model(config, spec, engine, tokenizer, formatters, adapters))
    server = Server(
        App(service, access),
        access,
        drain=service.drain,
        busy=lambda: service.num_requests,
        give_up=service.give_up,
    )
    service.start(changed)
    try:
        await server.serve(sockets=[listener])
    finally:
        progress.cancel()
        service.close()
    if engine.info is None and not service.draining:
        raise ConfigError(f"the engine could not start: {engine.reason}")
    if service.opened.done():
        service.opened.result()  # raises what is wrong with an adapter
    return 0


_CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
"""Takes the progress line away."""


async def _show_progress(what: str) -> None:
    """Seconds count up on a terminal; a log gets a line now and then."""
    live = sys.stderr.isatty()
    for second in itertools.count():
        if live or second % 10 == 0:
            start, end = ("\r", "") if live else ("", "\n")
            print(f"{start}{what} ... {second} s", end=end, file=sys.stderr, flush=True)
        await asyncio.sleep(1)


def _describe(info: EngineInfo | None) -> str:
    assert info is not None, "a ready engine has said what it is"
    return f"{info.name} {info.version} on {info.device}, dtype {info.dtype}, {info.max_total_tokens} tokens"


def _greeting(listener: socket.socket, access: Access) -> str:
    host, port = listener.getsockname()[:2]
    at = f"{access.scheme}://{'[' + host + ']' if ':' in host else host}:{port}"
    key = ' -H "Authorization: Bearer ${LMI_API_KEY%%,*}"' if access.keys else ""  # its name, never the key itself
    body = '{"inputs":"The capital of France is","parameters":{"max_new_tokens":8}}'
    ask = f"curl -s {at}/invocations -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"listening on {at}; open it in a browser, or try:\n  {ask}"
