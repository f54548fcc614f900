"""A served model, with its state, open requests and adapters."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from handler.config.config import Config
from handler.core.errors import AdapterFailed, BadRequest, ConfigError, RouteNotFound, ServingError, Unavailable
from handler.core.loop import run_in_daemon_thread
from handler.core.user_functions import Role
from handler.engines.base import EngineInfo
from handler.engines.process.replicas import ReplicaReport, ReplicaSet
from handler.engines.process.supervisor import EngineSupervisor, LoopHooks, State
from handler.plugins.functions import AdapterFormatters, Formatters, load_adapter_formatters, model_py
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.scheduler.batcher import Batcher
from handler.scheduler.engine import ReasoningEngine, SteppedEngine
from handler.scheduler.labels import MAX_TOPS, LabelEngine
from handler.scheduler.lora import AdapterHome, Change, Outcome, Registered, adapter_path, is_name
from handler.serving.admission import Admission
from handler.serving.availability import Availability
from handler.serving.background.runs import BackgroundRuns
from handler.serving.batches.store import BatchStore
from handler.serving.engine_driver import EngineDriver
from handler.serving.head import Head, Headers, request_id
from handler.serving.metrics.gauges import Gauges
from handler.serving.metrics.prometheus import Metrics
from handler.serving.metrics.request_stats import RequestStats
from handler.serving.metrics.tracing import Tracer
from handler.serving.preprocessor import Preprocessor
from handler.serving.quota import Count
from handler.serving.request.captured import CapturedTask
from handler.serving.request.gate import BatchGate
from handler.serving.request.task import RequestTask
from handler.serving.request_log import RequestLog
from handler.serving.secure_mode import adapter_problem


def with_labels(engine: SteppedEngine, context: ServerContext) -> SteppedEngine:
    """Return an engine that accepts requests for labels, if labels are available."""
    if context.native_labels or context.no_labels:
        return engine
    return LabelEngine(engine, context.unsupported, context.limits.get("top_logprobs", MAX_TOPS))


class ServedModel:
    """A model that is served on an event loop. It must be created on the loop, and does not own or stop the loop.

    Args:
        engine: started engine, which may still be loading.
        request_log: log that captures requests, or None if requests are not captured.
        batches: store of files and batches, or None if batches are off.
        stepped: whether the event loop runs only when its host steps it. The host then does dynamic batching itself.

    Attributes:
        availability: whether the model can serve requests.
        driver: driver of the batcher, for hosts that do their own waiting for the engine.
        handle: `handle` function of the user's model.py if the host calls it, or None.
        background: background responses that run on this server, or None if responses are not stored.
        receiving: number of open requests whose bodies are being received. A graceful stop does not wait for them.
    """

    def __init__(
        self,
        config: Config,
        engine: EngineSupervisor | ReplicaSet,
        preprocessor: Preprocessor,
        adapters: AdapterHome,
        *,
        stepped: bool = False,
        tracer: Tracer | None = None,
        request_log: RequestLog | None = None,
        batches: BatchStore | None = None,
    ) -> None:
        self.config = config
        self.batches = batches
        self._request_log = request_log
        self.preprocessor = preprocessor
        self.availability = Availability(config.name, engine)
        self.receiving = Count()
        store = preprocessor.store
        self.background = None if store is None else BackgroundRuns(store, config)
        gate = None
        if config.rolling_batch == "disable" and not stepped:
            gate = BatchGate(config, max_lines=self.max_batch_lines)
        self.admission = Admission(config, preprocessor, gate, stepped=stepped)
        self.handle = self.admission.handle
        batcher = Batcher(
            ReasoningEngine(with_labels(engine, self.context), self.context.vocabulary),
            adapters.registry,
            max_active=self.max_sequences,
            max_queued=config.job_queue_size,
            max_background=self.max_batch_lines,
            queue_timeout=config.predict_timeout,
            time_limit=config.request_time_limit or 0.0,
        )
        self.driver = EngineDriver(batcher, rests=not stepped)
        self.adapters = ServedAdapters(
            adapters, self.availability.check_open, preprocessor.adapter_formatters, self._adapters_of_server
        )
        gauges = Gauges(
            queued=lambda: self.num_queued,
            active=lambda: batcher.num_active,
            tokens=lambda: batcher.num_tokens,
            restarts=lambda: engine.restarts,
            statistics=lambda: engine.statistics,
            replicas=lambda: self.replicas,
            adapters=adapters.registry.names,
        )
        self.metrics = Metrics(config.label, gauges, tgi=config.tgi_metrics, tracer=tracer)
        if request_log is not None:
            self.metrics.show_captured(lambda: (request_log.num_written, request_log.num_dropped))

    # -- one request ---------------------------------------------------------------------------------------------

    def open(
        self,
        headers: Headers,
        dialect: Dialect | None = None,
        *,
        route: str | None = None,
        path: str = "/invocations",
        id: str = "",
        on_bytes: Callable[[RequestTask], object] = bool,
    ) -> RequestTask:
        """Open a request. Check its headers, and whether there is room for it.

        This never raises an error. If the request is refused, the error is sent as the response. Pass the body to the
        `parse` or `start` method of the task. A graceful stop waits until the host closes the task.

        Args:
            headers: headers by name in lower case.
            dialect: dialect of the route, or None for the configured dialect.
            route: path from a request header, which replaces the actual path of the request.
            path: path of the request with the query string.
            id: id of the request; by default the id in the headers, or a new id.
            on_bytes: callback of the task (see `RequestTask`).
        """
        error: ServingError | None = None
        head = Head(headers, dialect)
        try:
            if route is not None:
                head = Head(headers, self.admission.routes.dialect(route))
            head = self.admission.plan.read_head(head)
            self.check_room(head.owner)
            if self.handle is not None and self.handle.role is Role.ALONE:
                raise RouteNotFound(
                    "no engine is loaded, and handle of model.py does not serve this route: use POST /invocations"
                )
        except ServingError as refusal:
            error = refusal
        name = id or request_id(headers)
        stats = RequestStats(name, self.metrics, log_prompts=self.config.log_prompts, headers=headers)
        capture = None if self._request_log is None else self._request_log.capture(name, route or path)
        kind = RequestTask if capture is None else functools.partial(CapturedTask, capture)
        task = kind(self.admission, self.driver, stats, head, on_bytes)
        if error is not None:
            task.refuse(error)
        return task

    def refused(self, error: ServingError, dialect: Dialect | None = None, *, id: str = "-") -> RequestTask:
        """Count a request that is refused without a call of `open`, and return its finished task."""
        task = RequestTask(self.admission, self.driver, RequestStats(id, self.metrics), Head(dialect=dialect))
        task.refuse(error)
        return task

    def check_room(self, owner: str) -> None:
        """Raise `Unavailable` if a new request of this owner would be refused."""
        self.availability.check_engine()
        (self.admission.gate or self.driver.batcher).check_room(owner)

    # -- state ---------------------------------------------------------------------------------------------------

    def start(self, on_state: Callable[[State], None] = lambda state: None) -> None:
        """Connect to the engine, and call `on_state` with the current state and after every change.

        The state is ready only after the adapters next to the model have been loaded and `handle` of model.py has been
        called once. If an adapter or the call fails, the state is closed.
        """

        def changed(state: State) -> None:
            self.metrics.ready.set(state is State.READY)
            on_state(state)

        if (validator := self.preprocessor.encoder.validator) is not None:
            validator.start()  # while the engine is loading: later it would delay the first response
        finish = self._finish_start if self.adapters.has_any_at_start or self.handle is not None else None
        on_engine = self.availability.follow(changed, finish)
        self.availability.engine.attach(LoopHooks(self.driver.watch, on_engine, self.driver.soon))

    async def _finish_start(self) -> None:
        await self.adapters.load_at_start()
        if self.handle is not None:
            await self.handle.begin()

    def drain(self) -> None:
        """Refuse new requests from now on, and let running requests finish."""
        self.availability.draining = True

    def give_up(self) -> None:
        """End all running requests with an error."""
        for task in list(self.admission.tasks):
            task.fail(Unavailable("the server stopped before the response was complete"))

    def close(self) -> None:
        """Stop the engine and all threads. Further calls have no effect."""
        if self.availability.closing:
            return
        self.availability.closing = True
        self.availability.engine.close()
        self.driver.close()  # after the engine, whose end starts a timer of the driver
        if self.preprocessor.encoder.validator is not None:
            self.preprocessor.encoder.validator.close()
        self.admission.close()
        self.metrics.close()
        for part in (self.background, self.handle, self._request_log, self.batches):
            if part is not None:
                part.close()

    @property
    def context(self) -> ServerContext:
        return self.preprocessor.context

    @property
    def info(self) -> EngineInfo | None:
        return self.availability.engine.info

    def _adapters_of_server(self) -> Sequence[tuple[str, str]]:
        return () if self.info is None else self.info.adapters

    @property
    def engine_name(self) -> str:
        """Return the name of the engine, or the value of option.llm_engine while no engine is loaded."""
        return str(self.config.llm_engine) if self.info is None else self.info.name

    @property
    def replicas(self) -> Sequence[ReplicaReport]:
        return self.availability.engine.reports

    @property
    def max_sequences(self) -> int:
        """The maximum number of sequences that all replicas together run concurrently."""
        return self.config.max_rolling_batch_size * max(len(self.replicas), 1)

    @property
    def max_batch_lines(self) -> int:
        """The maximum number of sequences in the engine that belong to batches of `/v1/batches`."""
        return self.config.batches_concurrency or max(1, self.max_sequences // 2)

    @property
    def num_requests(self) -> int:
        """The number of requests that have been fully received, and whose responses are not complete yet."""
        return self.num_inferences + self.adapters.calls.value - self.receiving.value

    @property
    def num_inferences(self) -> int:
        """The number of open inference requests, not counting calls of `handle` and calls that change adapters."""
        return len(self.admission.tasks)

    @property
    def num_queued(self) -> int:
        gate = self.admission.gate
        return self.driver.batcher.num_queued + (gate.num_waiting if gate else 0)


# -- the adapters of a served model ------------------------------------------------------------------------------------


class ServedAdapters:
    """The adapters of a served model. A change is completed even if its caller is cancelled.

    Args:
        home: registry of adapters, and the adapters to register at startup.
        check_open: function that raises an error while the model is loading or stopping.
        formatters: formatters from the model.py files of the adapters.
        of_server: function that returns the names and paths of the adapters that the engine's servers have loaded.

    Attributes:
        registry: adapters that requests may name now.
        at_start: directories of the adapters to register at startup, by name.
        calls: number of running calls, for which a graceful stop waits.
    """

    def __init__(
        self,
        home: AdapterHome,
        check_open: Callable[[], None],
        formatters: AdapterFormatters,
        of_server: Callable[[], Sequence[tuple[str, str]]] = lambda: (),
    ) -> None:
        self.registry = home.registry
        self.calls = Count()
        self.at_start = home.at_start
        self._roots = home.roots
        self._of_server = of_server if home.of_server else None
        self._check_open = check_open
        self._formatters = formatters
        self._changing: list[str] = []  # directories

    @property
    def has_any_at_start(self) -> bool:
        """Whether adapters may have to be registered at startup."""
        return bool(self.at_start) or self._of_server is not None

    async def register(self, name: str, src: str, *, preload: bool = True, again: bool = False) -> Registered:
        """Register an adapter, and wait until requests may name it.

        Args:
            src: directory of the adapter.
            preload: whether the engine loads the adapter now instead of for its first request.
            again: whether an adapter that is already registered with the same name and directory is accepted.

        Raises:
            ServingError: the adapter could not be registered, and nothing has changed.
        """
        path = await self._path(src)
        same = (entry for entry in self.registry if (entry.adapter.name, entry.adapter.path) == (name, str(path)))
        if again and (there := next(same, None)) is not None:
            return there
        return await self._change(name, functools.partial(self.registry.register, name, path, preload=preload), path)

    async def update(self, name: str, src: str | None = None, *, preload: bool | None = None) -> Registered:
        """Update an adapter, and wait until new requests use the new version.

        Args:
            src: directory of the new version; by default the directory of the earlier version.
            preload: whether the engine loads the new version now; by default as for the earlier version.

        Raises:
            ServingError: the adapter could not be updated, and nothing has changed.
        """
        self._check_open()
        earlier = self.registry.get(name).adapter.path
        if self._of_server is not None and src in (None, earlier):
            raise BadRequest(f"the adapter {name} cannot be updated from {earlier} again: set src to another adapter")
        path = await self._path(earlier, known=True) if src is None else await self._path(src)
        return await self._change(name, functools.partial(self.registry.update, name, path=path, preload=preload), path)

    def unregister(self, name: str) -> None:
        """Unregister an adapter. Running requests continue to use it.

        Raises:
            ServingError: the adapter could not be unregistered, and nothing has changed.
        """
        self._check_open()
        self.leave(name)

    async def take_over(self, name: str, path: Path, *, number: int, preload: bool) -> Registered:
        """Register an adapter, or its new version, that another process serving this model has registered.

        Raises:
            ServingError: the model.py of the adapter could not be loaded, and nothing has changed.
        """
        begin = functools.partial(self.registry.take_over, name, path, number=number, preload=preload)
        return await self._change(name, begin, path)

    def leave(self, name: str) -> None:
        """Unregister an adapter, also while the engine restarts.

        Raises:
            ServingError: the adapter could not be unregistered, and nothing has changed.
        """
        self.registry.unregister(name)
        self._forget_formatters()

    async def load_at_start(self) -> None:
        """Register the adapters that are next to the model, and those that the engine's servers have loaded.

        Raises:
            ConfigError: an adapter cannot be used.
        """
        adapters = dict(self.at_start)
        for name, loaded in () if self._of_server is None else self._of_server():
            if is_name(name):
                adapters.setdefault(name, Path(loaded))
        for name, path in adapters.items():
            try:
                await self._change(name, functools.partial(self.registry.register, name, path), path)
            except ServingError as error:
                raise ConfigError(f"the adapter {name} cannot be used: {error.public}") from None

    async def _path(self, src: str, *, known: bool = False) -> Path:
        """Return the directory of an adapter after checking it.

        Args:
            known: whether the adapter is already registered from this directory.

        Raises:
            ServingError: the directory is not allowed, or contains no adapter.
        """
        self._check_open()  # before files are read, and again afterwards
        if self._of_server is not None:
            return Path(src)
        if not known:
            await run_in_daemon_thread(self._roots.check, src, self.registry.base)
        path = await run_in_daemon_thread(adapter_path, src, self.registry.base)
        self._check_open()
        return path

    async def _change(self, name: str, begin: Change, path: Path) -> Registered:
        """Load the adapter's model.py, then call `begin` to load its weights."""
        directory = str(path)
        self._changing.append(directory)
        try:
            formatters = await run_in_daemon_thread(self._load_formatters, path, name)
            earlier = self._formatters.set(directory, formatters)
            try:
                return await self._register(begin)
            except ServingError:
                self._formatters.set(directory, earlier)
                raise
        finally:
            self._changing.remove(directory)
            self._forget_formatters()

    def _load_formatters(self, path: Path, name: str) -> Formatters | None:
        if self._of_server is not None:
            return None
        if problem := adapter_problem(path):
            raise AdapterFailed(f"={path}: {problem}", field="src")
        if path not in self.at_start.values() and not self._roots.allow_code(path) and model_py(path) is not None:
            raise AdapterFailed(
                f"={path}: contains model.py, which the server does not run from outside the model's directory; "
                "remove the file, or set option.adapters_code=true",
                field="src",
            )
        return load_adapter_formatters(path, name)

    def _forget_formatters(self) -> None:
        self._formatters.keep({*(entry.adapter.path for entry in self.registry), *self._changing})

    async def _register(self, begin: Change) -> Registered:
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        begin(lambda outcome: None if done.done() else done.set_result(outcome))
        outcome = await done
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome
