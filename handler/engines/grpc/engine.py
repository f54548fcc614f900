"""An engine that uses vLLM, SGLang or TensorRT-LLM servers through the gRPC contracts that they publish.

This handler still processes text, stop strings, chat templates and errors itself.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from handler.config import model_files
from handler.config.config import Config
from handler.config.options.names import KEY_VARIABLES
from handler.core.errors import ConfigError, Problem, Problems
from handler.core.values import Task
from handler.engines.base import Capabilities, EngineConfig, EngineRequest, EngineStatistics, Tokenizer
from handler.engines.grpc.client import CONTRACTS, GrpcClient, find_contract
from handler.engines.grpc.contract import Contract, GrpcCall, GrpcModel, statistics
from handler.engines.huggingface import files
from handler.engines.huggingface.files import TORCH_DTYPES, eos_ids
from handler.engines.huggingface.pooling import HfPoolingTokenizer, PoolingFiles, read_pooling
from handler.engines.process.own_server import OwnServer
from handler.engines.remote.engine import TLS_CLOSE, C, RemoteEngine, Running
from handler.engines.remote.servers import (
    Failed,
    Lasting,
    Part,
    PooledCall,
    Refused,
    RemoteOptions,
    RemoteServer,
    check_same,
)
from handler.engines.remote.sglang import SglangFlags

__all__ = ["GrpcEngine", "GrpcPooling", "capabilities", "check", "fetch", "load", "load_tokenizer", "prepare"]


_WITHHELD = ("PYTHONPATH", "PYTHONHOME", *KEY_VARIABLES)
"""Environment variables that are withheld from a server that the engine starts."""


class GrpcSetting(RemoteOptions):
    """The options of servers at option.base_url, or of a server that the engine starts with option.engine_python."""

    def check(self, model_id: str | None, config: EngineConfig) -> None:
        problems = Problems()
        with problems:
            super().check(model_id, config)
        with problems:
            check_task(config, config.engine_options.get("base_url_kind", "auto"))
        problems.check()

    def urls(self, config: EngineConfig) -> tuple[str, ...]:
        options = config.engine_options
        key, python = "option.engine_python", options.get("engine_python")
        if python is None:
            if "engine_flags" in options:
                raise _wrong("option.engine_flags", f"option.engine_flags needs {key}")
            return super().urls(config)
        if "base_url" in options:
            raise _wrong(key, f"{key} starts a server, and option.base_url names another server: set only one option")
        kind = options.get("base_url_kind", "auto")
        if kind == "auto":
            raise _wrong(key, f"{key} needs option.base_url_kind, the kind of server to start: {', '.join(CONTRACTS)}")
        dtype = config.options.dtype
        if dtype != "auto" and CONTRACTS[kind].dtype_flag is None:
            raise _wrong("option.dtype", f"option.dtype={dtype}: the {kind} server has no flag for it")
        if config.options.engine_isolation == "thread":
            raise _wrong(
                key,
                f"{key} cannot be combined with option.engine_isolation=thread: the engine needs a process of its own",
            )
        if shutil.which(python) is None:
            raise _wrong(key, f"{key}={python} is not a program")
        return ()


def _wrong(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))


def check_task(config: EngineConfig, kind: str) -> None:
    """Raise ConfigError if a kind of server does not support the model's task, or if option.pooling is set."""
    if config.task is Task.GENERATION:
        return
    key = f"option.task={config.options.task}"
    if config.task is not Task.EMBEDDING:
        message = f"{key}: the model is for {config.task.value}, but no gRPC contract supports scores or classification"
        raise _wrong("option.task", message)
    if kind in CONTRACTS and (reason := CONTRACTS[kind].no_embeddings):
        raise _wrong("option.task", f"{key}: {reason}")
    if config.options.pooling != "auto":
        key = f"option.pooling={config.options.pooling}"
        raise _wrong("option.pooling", f"{key}: the server always uses the pooling that the model's files specify")


_SETTING = GrpcSetting("grpc", "grpc://host:50051")
check, prepare = _SETTING.check, _SETTING.prepare


def fetch(model_id: str | None, config: EngineConfig) -> str | None:
    """See `engines.fetch`. Weights are downloaded only for a server that this engine starts."""
    return files.fetch(
        model_id,
        config,
        files.download_checkpoint if "engine_python" in config.engine_options else files.download_descriptions,
    )


class OwnFiles(NamedTuple):
    """Information from the local model files, for comparison with a server's model.

    Attributes:
        vocabulary: number of token ids in the model's vocabulary; None if config.json does not specify it.
        num_pieces: number of ids in the tokenizer's vocabulary, excluding added tokens; None if tokenizer.json does not
            specify it.
        eos: ids that end a response.
        config_eos: the end ids in config.json. Servers may report these ids even though generation_config.json
            overrides them.
    """

    vocabulary: int | None
    num_pieces: int | None
    eos: frozenset[int]
    config_eos: frozenset[int]

    @classmethod
    def read(cls, config: EngineConfig) -> OwnFiles:
        values = model_files.read_json(config.model_path / "config.json")
        text = {**values, **(values.get("text_config") or {})}
        pieces = (model_files.read_json(config.model_path / "tokenizer.json").get("model") or {}).get("vocab")
        ends = text.get("eos_token_id")
        of_config = frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))
        return cls(text.get("vocab_size"), len(pieces) if pieces else None, eos_ids(config), of_config)

    def compare(self, model: GrpcModel) -> None:
        """Compare the files with a server's model.

        Raises:
            Failed: the server uses another tokenizer.
        """
        for reported, expected in ((model.vocabulary, self.vocabulary), (model.num_pieces, self.num_pieces)):
            if reported and expected and reported != expected:
                raise Lasting("uses another tokenizer", f"it has {reported} ids, option.model_id has {expected}")
        if self.eos and not model.eos <= self.eos | self.config_eos:
            detail = f"its responses end with {sorted(model.eos)}, but those of option.model_id with {sorted(self.eos)}"
            raise Lasting("uses another tokenizer", detail)


def _environment() -> dict[str, str]:
    """Return the environment of a server that the engine starts."""
    environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
    environment["PYTHONSAFEPATH"] = "1"  # needs Python 3.11; older versions prefer modules of the working directory
    return environment


def command(contract: Contract, model: Path, config: Config, flags: Sequence[str] = ()) -> list[str]:
    """Return the command that starts a server with option.engine_python.

    Args:
        flags: flags for the model's task. The flags in `option.engine_flags` come later and override them.
    """
    options = config.engine_options
    python = options["engine_python"]
    words = [os.path.abspath(shutil.which(python) or python), "-m", *contract.command, str(model.absolute())]
    if config.dtype != "auto" and contract.dtype_flag is not None:
        words += [contract.dtype_flag, TORCH_DTYPES[config.dtype]]
    if config.max_model_len:
        words += [contract.context_flag, str(config.max_model_len)]
    if options.get("trust_remote_code"):
        words.append(contract.trust_flag)
    return [*words, *flags, *options.get("engine_flags", ())]


def _own_server(contract: Contract, config: EngineConfig, flags: Sequence[str]) -> OwnServer:
    words = command(contract, config.model_path, config.options, flags)
    return OwnServer("grpc", contract.command[0], words, _environment())


class ContractEngine(RemoteEngine[C]):
    """Base class of engines that use servers with a gRPC contract.

    Args:
        flags: function that returns the flags for the model's task, used for a server that the engine starts.
    """

    generates = True
    own_name = "the server of option.engine_python"

    def __init__(self, config: EngineConfig, flags: Callable[[Contract], Sequence[str]] = lambda contract: ()) -> None:
        self._files = OwnFiles.read(config)
        options = config.engine_options
        urls: Sequence[str] = _SETTING.urls(config)
        kind = options["base_url_kind"]
        kind = find_contract(tuple(urls)) if kind == "auto" else kind
        check_task(config, kind)
        contract = CONTRACTS[kind]
        task_flags = flags(contract)
        own = None
        if not urls:
            own = _own_server(contract, config, task_flags)
            urls = (own.url,)
        close_seconds = TLS_CLOSE if any(url.startswith("grpcs:") for url in urls) else 0.0
        super().__init__(contract.software, urls, float(options["base_url_timeout"]), close_seconds, own)
        self._contract = contract
        self._clients: dict[str, GrpcClient] = {}
        self._server_flags: dict[str, SglangFlags] = {}  # by address
        self._statistics = EngineStatistics()
        self._asking: asyncio.Task[None] | None = None
        with self.closed_on_failure():
            if own is not None:
                own.start()
                self.watch_own(own)
            self.complete(self._connect(urls, float(options["base_url_connect_timeout"])))
            self._model: GrpcModel = self.find("grpc", config, self._model_at, self._fit)

    async def _connect(self, urls: Sequence[str], timeout: float) -> None:
        self._clients = {url: GrpcClient(url, self._contract, timeout) for url in urls}

    def _fit(self, model: GrpcModel, first: GrpcModel | None) -> GrpcModel:
        """Return a server's model. Raise Failed unless it matches the local files and the first server's model."""
        self._files.compare(model)
        if first is not None:
            check_same(model, first)
        return model

    async def _model_at(self, url: str) -> GrpcModel:
        self.check_own()
        model = await self._clients[url].model(generates=self.generates)
        server = next(server for server in self._servers if server.url == url)
        start = model.constrained_decoding_start
        server.enforces_rules, server.enforces_until = start == "first_token", math.inf if start else 0.0
        self._server_flags[url] = model.flags
        return model._replace(constrained_decoding_start="", flags=SglangFlags())

    def cancel(self, key: int) -> None:
        super().cancel(key)
        self._run_once()  # this tells the server
        self._run_once()

    async def ask(self, server: RemoteServer, *, again: bool = False) -> None:
        """Ask a server for its model after each new connection, because its model may have changed."""
        if not self._clients[server.url].connected:
            server.known = False
        await super().ask(server, again=again)

    async def check(self, server: RemoteServer) -> None:
        """Check that a server serves the model and accepts as many tokens as this engine."""
        self.check_max_tokens(self._fit(await self._model_at(server.url), self._model).max_tokens)

    def statistics(self) -> EngineStatistics:
        """Request the servers' statistics, and return the latest. An idle engine waits for a response."""
        if not self._contract.reports_load:
            return self._statistics
        rests = self.rests
        if self._asking is not None and rests:
            self._asking.cancel()  # this request began before the work ended
        if self._asking is None or self._asking.done() or rests:
            self._asking = self._loop.create_task(self._ask_loads())
        if rests:  # nothing else runs the event loop
            self._asking.add_done_callback(lambda _: self._loop.stop())
            self._interrupted = False
            while not self._asking.done() and not self._interrupted:
                self._loop.run_forever()
        return self._statistics

    async def _ask_loads(self) -> None:
        clients = [
            client for server in self._servers if server.known and (client := self._clients[server.url]).connected
        ]
        responses = await asyncio.gather(*(client.loads() for client in clients))  # only over connections that are open
        self._statistics = statistics([load for loads in responses for load in loads])

    async def disconnect(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await asyncio.gather(*(client.close() for client in self._clients.values()))


class GrpcEngine(ContractEngine[GrpcCall]):
    """Engine for text generation; see `engines.base.Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._most_id = max(self._files.vocabulary or 0, self._model.vocabulary or 0) or (1 << 31)

    def new_call(self, request: EngineRequest) -> GrpcCall:
        return GrpcCall(self._contract, request, self._most_id, self._files.eos)

    async def stream(self, server: RemoteServer, running: Running[GrpcCall]) -> None:
        call, part = running.call, Part()
        if reason := self._contract.refusal(self._server_flags[server.url], call.message):
            raise Refused("INVALID_ARGUMENT", reason)
        call.message.request_id = uuid4().hex  # SGLang aborts all requests whose ids begin with the id in Abort
        held: Part | None = None  # the last token waits for the finish reason
        async with aclosing(self._clients[server.url].generate(call.message)) as responses:
            async for response in responses:
                if running.ended:
                    continue
                part = held or self._steps.parts.get(running.key) or Part()
                came = call.read(response, part)
                if call.stopped:
                    self._steps.parts.pop(running.key, None)
                    break
                held = part if call.awaits_finish_reason and part.finish is None else None
                if held is not None:
                    self._steps.parts.pop(running.key, None)
                elif came:
                    self.take(server, running, part)
        if call.stopped:
            await asyncio.sleep(0)  # the server is told first, as the loop may not run again soon
            self.take(server, running, part)
        if not running.ended:
            raise Failed("ended its response without a last message")


class GrpcPooling(ContractEngine[PooledCall]):
    """Engine for embeddings; see `engines.base.Engine`. Requests have Pooling instead of Sampling.

    The server pools the token embeddings. The engine truncates the result to the requested dimensions, and normalizes
    it if the model's files or the request specify this.
    """

    generates = False

    def __init__(self, config: EngineConfig) -> None:
        self._pooling: PoolingFiles = read_pooling(config.model_path)
        super().__init__(config, self._flags)
        self.info = self._pooling.described(self.info, self._model.dimensions)

    def _flags(self, contract: Contract) -> Sequence[str]:
        mode = self._pooling.mode
        if mode not in contract.pools:
            raise ConfigError(
                f"the model's files specify {mode} pooling, which {contract.software.name} servers do not support"
            )
        return contract.embedding_flags(mode)

    def new_call(self, request: EngineRequest) -> PooledCall:
        if self._model.normalizes and request.pooling.normalize is False:
            raise ValueError("normalize=false is not supported: the server normalizes its embeddings")
        return PooledCall(request.ids, request.pooling)

    async def stream(self, server: RemoteServer, running: Running[PooledCall]) -> None:
        call = running.call
        embedding = await self._clients[server.url].embed(call.ids)
        if len(embedding) != self.info.dimensions:
            raise Failed(f"sent an embedding of {len(embedding)} numbers", f"it had {self.info.dimensions} at startup")
        self.take_result(server, running, self._pooling.finish(embedding, call.pooling))


def capabilities(config: EngineConfig) -> Capabilities:
    """Return the contract's capabilities. If option.base_url_kind is auto, find out the contract first.

    Raises:
        ConfigError: the contract of no server can be determined, or the servers use different contracts.
    """
    kind = config.engine_options.get("base_url_kind", "auto")
    return CONTRACTS[find_contract(_SETTING.urls(config)) if kind == "auto" else kind].capabilities


def load(config: EngineConfig) -> GrpcEngine | GrpcPooling:
    return GrpcEngine(config) if config.task is Task.GENERATION else GrpcPooling(config)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    if config.task is Task.GENERATION:
        return files.load_tokenizer(config)
    return HfPoolingTokenizer(config.model_path, config.chat_template)
