"""Several engines as one for the batcher; one that fails loses only its own requests."""

from __future__ import annotations

import itertools
import logging
import selectors
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from handler.core.errors import GenerationFailed
from handler.core.text import Prompt
from handler.core.values import Adapter, Finish, Request
from handler.engines.base import EngineInfo, EngineRequest, Output, Step
from handler.engines.process.replica import Replica, ReplicaReport, Work
from handler.engines.process.routing import Load, Router
from handler.engines.process.supervisor import EngineSupervisor, Soon, State, now

log = logging.getLogger("handler.engine")


@dataclass
class _Change:
    """Loading or dropping an adapter, until all replicas have answered."""

    adapter: Adapter
    drop: bool
    waiting: set[int]  # replicas
    error: str | None = None
    detail: str = ""

    def fail(self, error: str | None, detail: str) -> None:
        """Note a replica's error; the first one counts."""
        if self.error is None:
            self.error, self.detail = error, detail


class ReplicaSet:
    """Engines of one model, with the interface of one `EngineSupervisor` for the batcher and the host.

    The set is ready for the first time when all its engines are; later as long as one is. An engine that cannot be
    loaded at first closes the set. Of one that fails later, or falls silent, the sequences of which nothing has come
    yet move to another one, once each. A failure ends all others of it with an error.

    Args:
        engines: started.
        slots: sequences that each computes at once.
        follows_prompts: a conversation stays on its replica.
        patience: seconds without a step after which a replica counts as silent.
    """

    statistics = None  # each has its own, in `reports`

    def __init__(
        self, engines: Sequence[EngineSupervisor], slots: int, *, follows_prompts: bool = True, patience: float = 15.0
    ) -> None:
        self._replicas = [Replica(number, engine) for number, engine in enumerate(engines)]
        self._slots, self._patience = slots, patience
        self._router = Router(slots, follows_prompts=follows_prompts)
        self._chosen = self._replicas[0]
        self._origin: tuple[Request, Prompt] | None = None  # for which it was chosen
        self._by_key: dict[int, Replica] = {}
        self._moving: dict[int, tuple[Work, Replica, Output]] = {}  # lost by a replica, with its error; oldest first
        self._ended: dict[int, Replica] = {}  # in the last step
        self._changes: dict[int, _Change] = {}  # by key
        # Loaded, by id. One that is given up while no replica is ready is in nobody's hands then.
        self._adapters = weakref.WeakValueDictionary[int, Adapter]()
        self._own_keys = itertools.count(-1, -1)
        self._selector = selectors.DefaultSelector()
        self._watch: Callable[[int | None], None] = lambda fd: None
        self._on_change: Callable[[State], None] = lambda state: None
        self._soon: Soon = now
        self._opened = False  # all have been ready
        self._last_state = State.LOADING
        self._to_restart: list[Replica] = []
        self._restarts = -1  # when the last one was to restart
        for replica in self._replicas:
            replica.engine.attach(
                watch=partial(self._watch_channel, replica),
                on_change=partial(self._changed, replica),
                soon=lambda callback: self._soon(callback),
            )

    # -- the batcher's side --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Choose the replica for a request, whose sequences `add` brings next. False: it has to wait."""
        loads = self._loads(request.sampling.num_sequences)
        if not loads or not self.ready or self._moving:
            return False
        self._chosen = self._replicas[self._router.choose(request, prompt, loads)]
        self._chosen.num_requests += 1
        self._origin = request, prompt
        return True

    def continues(self, key: int) -> bool:
        """Choose the replica that has the request, and so the part's beginning. False: it is lost."""
        replica = self._by_key.get(key) or self._ended.get(key)
        if replica is None or not replica.engine.ready:
            return False
        self._chosen, self._origin = replica, None
        return True

    def add(self, request: EngineRequest) -> None:
        self._by_key[request.key] = self._chosen
        self._chosen.add(request, self._origin)

    def cancel(self, key: int) -> None:
        self._moving.pop(key, None)
        replica = self._by_key.pop(key, None)
        if replica is not None:
            replica.drop(key)
            replica.engine.cancel(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        """Have all ready replicas load or drop an adapter; the others learn of it when they are ready."""
        ready = [replica for replica in self._replicas if replica.engine.ready]
        self._changes[key] = _Change(adapter, drop, {replica.number for replica in ready})
        if drop:
            self._adapters.pop(adapter.id, None)
        else:
            self._adapters[adapter.id] = adapter
        for replica in ready:
            replica.engine.change_adapter(key, adapter, drop=drop)

    def step(self, timeout: float = 0.0) -> list[Step]:
        """Return all replicas' steps, waiting up to `timeout` seconds for one; also check timers and restart.

        The sequences of a replica that died, hung or raised move to another one, or end with an error.
        """
        if timeout > 0:
            self._selector.select(timeout)
        steps: list[Step] = []
        self._ended.clear()
        for replica in self._replicas:
            try:
                for step in replica.engine.step():
                    steps.append(self._read(replica, step))
            except GenerationFailed as error:
                steps.append(Step([], [], [], list(self._end_requests(replica, error))))
            if replica.fresh and replica.engine.silence > self._patience:
                self._relieve(replica)
        if self._moving:
            steps.append(Step([], [], [], list(self._move())))
        if self._to_restart and self.restarts > self._restarts and all(one.engine.ready for one in self._replicas):
            self._restarts = self.restarts
            self._to_restart.pop(0).engine.restart_when_idle()
        return steps

    # -- the host's side -----------------------------------------------------------------------------------------

    def attach(
        self, *, watch: Callable[[int | None], None], on_change: Callable[[State], None], soon: Soon = now
    ) -> None:
        """Connect an event loop.

        Args:
            watch: called with the file descriptor that is readable when `step` should be called; with None before it
                is closed.
            on_change: called with the state, now and after every change.
            soon: as in `EngineSupervisor.attach`.
        """
        self._watch, self._on_change, self._soon = watch, on_change, soon
        watch(self._selector.fileno())
        on_change(self.state)

    def close(self, grace: float = 2.0) -> None:
        self._watch(None)
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            for replica in self._replicas:
                replica.engine.attach(watch=_ignore, on_change=_ignore)
                threads.submit(replica.engine.close, grace)
        self._selector.close()
        self._tell()

    def restart_when_idle(self, replica: int) -> None:
        """Restart a replica as soon as none of its requests is in flight, one after another. Thread-safe."""
        self._to_restart.append(self._replicas[replica])

    @property
    def state(self) -> State:
        states = {replica.engine.state for replica in self._replicas}
        if State.CLOSED in states:
            return State.CLOSED
        if not self._opened:
            return State.LOADING
        return State.READY if State.READY in states else State.RESTARTING

    @property
    def reason(self) -> str:
        """Why replicas cannot serve, where that is known."""
        replicas = [replica for replica in self._replicas if replica.engine.reason]
        return "; ".join(f"replica {replica.number}: {replica.engine.reason}" for replica in replicas)

    @property
    def info(self) -> EngineInfo | None:
        return next((replica.engine.info for replica in self._replicas if replica.engine.info is not None), None)

    @property
    def restarts(self) -> int:
        """Engines that were lost and started again."""
        return sum(self.replica_restarts)

    @property
    def replica_restarts(self) -> Sequence[int]:
        return [replica.engine.restarts for replica in self._replicas]

    @property
    def reports(self) -> list[ReplicaReport]:
        return [replica.report() for replica in self._replicas]

    # -- one replica ---------------------------------------------------------------------------------------------

    def _read(self, replica: Replica, step: Step) -> Step:
        """Take a replica's step; return what the batcher gets of it."""
        step = replica.read(step)
        replica.num_steps += bool(step.keys)
        replica.num_tokens += len(step.keys)
        if not step.others:
            return step
        others: list[Output] = []
        for output in step.others:
            if output.key < 0:
                if output.error is not None:
                    reason = output.detail or output.error
                    log.warning("replica %d: an adapter could not be changed: %s", replica.number, reason)
            elif (change := self._changes.get(output.key)) is not None:
                change.waiting.discard(replica.number)
                change.fail(output.error, output.detail)
                others += self._answer(output.key, change)
            else:
                replica.num_tokens += len(output.ids)
                others.append(output)
                if output.finish is not None and self._by_key.pop(output.key, None) is not None:
                    self._ended[output.key] = replica
                    replica.drop(output.key)
        return step._replace(others=others)

    def _end_requests(self, replica: Replica, failure: GenerationFailed) -> Iterator[Output]:
        """End or move a lost replica's sequences; end its part in changes of adapters."""
        reason = f"replica {replica.number}: {failure.message}"
        lost = list(replica.work)
        moving = {key for key in lost if key in replica.fresh and replica.work[key].moved_from is None}
        log.error("replica %d is lost with %d sequences; %d can move", replica.number, len(lost), len(moving))
        for key in lost:
            del self._by_key[key]
            work = replica.drop(key)
            error = Output(key, (), (), Finish.ERROR, error=reason, detail=failure.detail)
            if key in moving:
                self._moving[key] = work, replica, error
            else:
                yield error
        replica.left.clear()  # its next engine has none of them
        for key, change in list(self._changes.items()):
            change.waiting.discard(replica.number)
            if not self.ready:
                change.fail(failure.message, failure.detail)
            yield from self._answer(key, change)

    def _relieve(self, replica: Replica) -> None:
        """Move what a silent replica has not begun, as far as others have room."""
        for key in [key for key in sorted(replica.fresh) if replica.work[key].moved_from is None]:
            if (other := self._choose(replica.work[key], replica)) is None:
                return
            log.warning("replica %d is silent: a sequence moves to replica %d", replica.number, other.number)
            work = replica.drop(key)
            replica.engine.cancel(key)
            replica.left.add(key)
            self._give(work, replica, other)

    def _move(self) -> Iterator[Output]:
        """Give lost sequences to replicas that have room; end them where no replica is ready."""
        for key, (work, lost, error) in list(self._moving.items()):
            if not self.ready:
                del self._moving[key]
                yield error
            elif (other := self._choose(work)) is None:
                return
            else:
                del self._moving[key]
                self._give(work, lost, other)

    def _give(self, work: Work, earlier: Replica, replica: Replica) -> None:
        self._by_key[work.request.key] = replica
        replica.num_requests += work.origin is not None
        replica.add(work.request, work.origin, earlier)

    def _choose(self, work: Work, silent: Replica | None = None) -> Replica | None:
        """Return the replica for a sequence that moves, perhaps from a silent one; None while none has room."""
        loads = [load for load in self._loads(1) if silent is None or load.replica != silent.number]
        if not loads:
            return None
        if work.origin is None:
            return self._replicas[min(loads, key=lambda load: load.num_tokens).replica]
        return self._replicas[self._router.choose(*work.origin, loads)]

    def _loads(self, num_sequences: int) -> list[Load]:
        return [replica.load() for replica in self._replicas if replica.takes(num_sequences, self._slots)]

    def _answer(self, key: int, change: _Change) -> Iterator[Output]:
        """Answer a change that all replicas have answered. One of them refused a load: none keeps the adapter."""
        if change.waiting:
            return
        del self._changes[key]
        finish = Finish.STOP if change.error is None else Finish.ERROR
        if change.error is not None and not change.drop:
            self._adapters.pop(change.adapter.id, None)
            for replica in self._replicas:
                if replica.engine.ready:
                    replica.engine.change_adapter(next(self._own_keys), change.adapter, drop=True)
        yield Output(key, (), (), finish, error=change.error, detail=change.detail)

    def _watch_channel(self, replica: Replica, fd: int | None) -> None:
        if replica.fd is not None:
            self._selector.unregister(replica.fd)
        replica.fd = fd
        if fd is not None:
            self._selector.register(fd, selectors.EVENT_READ)

    def _changed(self, replica: Replica, state: State) -> None:
        """Give a replica that is ready the adapters, which a new engine does not have."""
        if state is State.READY:
            for adapter in list(self._adapters.values()):
                replica.engine.change_adapter(next(self._own_keys), adapter, drop=False)
        self._opened = self._opened or all(one.engine.ready for one in self._replicas)
        self._tell()

    def _tell(self) -> None:
        if self.state is not self._last_state:
            self._last_state = self.state
            self._on_change(self._last_state)


def _ignore(value: object) -> None:
    pass
