"""Several replicas that the batcher uses like a single engine. If a replica fails, only its own requests are lost."""

from __future__ import annotations

import itertools
import logging
import re
import selectors
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from handler.core.errors import GenerationFailed
from handler.core.text import Prompt
from handler.core.values import Adapter, Finish, Pooling, Request
from handler.engines.base import EngineInfo, EngineRequest, EngineStatistics, Output, Step
from handler.engines.process.supervisor import EngineSupervisor, LoopHooks, State

log = logging.getLogger("handler.engine")

_MAX_PROMPTS = 1024
_MAX_CHARACTERS = 1 << 24  # of all remembered prompts
_MAX_SESSIONS = 10_000
_TOLERANCE = 4  # a conversation's replica may be busier than others by a quarter of the slots

_OPEN_REASONING = re.compile(r"(?:<think>|</think>|\s)+$")
"""Matches text that a chat template may write at the beginning of a response, but omits in later turns."""
_MAX_REASONING = 64  # characters of a match


class Workload(NamedTuple):
    """A replica's workload.

    Attributes:
        replica: index of the replica.
        num_sequences: number of sequences that the replica is computing.
        num_tokens: upper bound on the number of tokens still to be computed, including prompts that have not been
            started.
    """

    replica: int
    num_sequences: int
    num_tokens: int


class _Beginning(NamedTuple):
    """The beginning that later turns of a conversation share: the adapter, the digests of the media, and the text."""

    adapter: int
    media: tuple[str, ...]
    text: str

    def continues(self, earlier: _Beginning) -> bool:
        """Return whether this prompt begins with an earlier prompt."""
        return (
            self.adapter == earlier.adapter
            and self.text.startswith(earlier.text)
            and self.media[: len(earlier.media)] == earlier.media
        )


class Router:
    """Chooses a replica for each request, by these rules:

    1. A session stays on its replica while that replica can accept its requests.
    2. A prompt that begins with an earlier prompt is the next turn of a conversation. It goes to the replica of the
       longest such prompt, whose KV cache may still contain that prompt. This rule ignores replicas that have more
       sequences than the least busy replica, by more than a quarter of the slots. Embedding and scoring requests never
       count as turns.
    3. Any other request goes to the replica with the fewest tokens to compute. In case of a tie, it goes to the replica
       that was chosen least recently.

    Args:
        slots: number of sequences that a replica computes at the same time.
        follows_prompts: whether rule 2 applies.
    """

    def __init__(self, slots: int, *, follows_prompts: bool = True) -> None:
        self._tolerance = slots // _TOLERANCE
        self._follows_prompts = follows_prompts
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._prompts: OrderedDict[_Beginning, int] = OrderedDict()  # replica by beginning, oldest first
        self._num_characters = 0
        self._order: dict[int, int] = {}  # number of the last request, by replica
        self._num_chosen = 0

    def choose(self, request: Request, prompt: Prompt, loads: Sequence[Workload]) -> int:
        """Choose a replica for a request, and return the replica's index.

        Args:
            loads: workloads of the replicas that can accept the request; at least one.
        """
        start = _beginning(prompt) if self._follows_prompts and request.pooling is None else ""
        key = None  # every prompt begins with an empty text
        if start:
            digests = prompt.media.digests if prompt.media else ()
            key = _Beginning(request.adapter.id if request.adapter else 0, digests, start)
        replica = self._sessions.get(request.session)
        if not any(load.replica == replica for load in loads):
            replica = None if key is None else self._of_prompt(key, loads)
        if replica is None:
            replica = min(loads, key=lambda load: (load.num_tokens, self._order.get(load.replica, 0))).replica
        self._num_chosen += 1
        self._order[replica] = self._num_chosen
        if request.session:
            self._sessions[request.session] = replica
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        if key is not None:
            self._remember(key, replica)
        return replica

    def _of_prompt(self, prompt: _Beginning, loads: Sequence[Workload]) -> int | None:
        least = min(load.num_sequences for load in loads)
        near = {load.replica for load in loads if load.num_sequences <= least + self._tolerance}
        earlier = (
            (len(start.text), replica)
            for start, replica in self._prompts.items()
            if replica in near and prompt.continues(start)
        )
        return max(earlier, default=(0, None))[1]

    def _remember(self, key: _Beginning, replica: int) -> None:
        if key not in self._prompts:
            self._num_characters += len(key.text)
        self._prompts[key] = replica
        self._prompts.move_to_end(key)
        while len(self._prompts) > _MAX_PROMPTS or self._num_characters > _MAX_CHARACTERS:
            start, _ = self._prompts.popitem(last=False)
            self._num_characters -= len(start.text)


def _beginning(prompt: Prompt) -> str:
    """Return the text that later turns begin with. If the prompt has only ids, each id is mapped to a character."""
    text = prompt.text or "".join(map(chr, prompt.ids))
    return text[:-_MAX_REASONING] + _OPEN_REASONING.sub("", text[-_MAX_REASONING:])


# -- one replica: the supervisor of its engine, its sequences and its figures ------------------------------------------


_MAX_SILENCE = 1.0  # seconds without a step after which a replica with requests gets no more of them


class ReplicaReport(NamedTuple):
    """State of a replica, and its counts since the server started.

    Attributes:
        number: index of the replica.
        num_active: number of running engine requests: single sequences and beam searches.
        statistics: the engine's own statistics, or None if it has not reported any yet.
    """

    number: int
    ready: bool
    num_active: int
    num_requests: int
    num_tokens: int
    restarts: int
    statistics: EngineStatistics | None


class Work(NamedTuple):
    """A sequence sent to an engine.

    Attributes:
        origin: the client's request and prompt, or None for a later part of a request.
        began: number of steps that the engine had completed when the sequence was added.
        moved_from: replica that the sequence was moved from, or None.
    """

    request: EngineRequest
    origin: tuple[Request, Prompt] | None
    num_prompt_tokens: int
    num_tokens: int
    began: int
    moved_from: Replica | None = None

    def to_come(self, num_steps: int) -> int:
        """Return an upper bound on the tokens that remain to compute, including the prompt before the first step."""
        done = num_steps - self.began
        return max(self.num_tokens - done, 1) if done else self.num_prompt_tokens + self.num_tokens


@dataclass(eq=False)
class Replica:
    """One engine and its sequences.

    Attributes:
        work: sequences by key.
        fresh: keys of the sequences without output so far.
        ended: keys of the sequences that ended in the last step.
        left: keys of the sequences that were moved to other replicas while the engine was silent. Any further output of
            this replica for these sequences is ignored.
    """

    number: int
    engine: EngineSupervisor
    slots: int
    work: dict[int, Work] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    num_steps: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    fd: int | None = None

    def add(
        self, request: EngineRequest, origin: tuple[Request, Prompt] | None, moved_from: Replica | None = None
    ) -> None:
        """Send a sequence to the engine."""
        most = 0 if isinstance(request.parameters, Pooling) else request.parameters.max_new_tokens
        self.work[request.key] = Work(request, origin, len(request.ids), most, self.num_steps, moved_from)
        self.fresh.add(request.key)
        self.engine.add(request)

    def drop(self, key: int) -> Work:
        """Remove a sequence that has finished on this replica, or is about to be moved to another replica."""
        work = self.work.pop(key)
        self.fresh.discard(key)
        if work.moved_from is not None:
            work.moved_from.left.discard(key)
        return work

    def read(self, step: Step) -> Step:
        """Record which sequences have output, and return the step without sequences that moved to other replicas."""
        if self.left and not (
            self.left.isdisjoint(step.keys) and self.left.isdisjoint(output.key for output in step.others)
        ):
            step = _without(step, self.left)
        if self.fresh:
            self.fresh.difference_update(step.keys)
            self.fresh.difference_update(output.key for output in step.others)
        return step

    def load(self) -> Workload:
        return Workload(self.number, len(self.work), sum(work.to_come(self.num_steps) for work in self.work.values()))

    def takes(self, num_sequences: int) -> bool:
        """Return whether the replica is ready, not silent (in a long step or hang), and idle or has enough slots."""
        has_room = not self.work or len(self.work) + num_sequences <= self.slots
        return has_room and self.engine.ready and self.engine.silence < _MAX_SILENCE

    def report(self) -> ReplicaReport:
        return ReplicaReport(
            number=self.number,
            ready=self.engine.ready,
            num_active=len(self.work),
            num_requests=self.num_requests,
            num_tokens=self.num_tokens,
            restarts=self.engine.restarts,
            statistics=self.engine.statistics,
        )


def _without(step: Step, keys: set[int]) -> Step:
    indices = [index for index, key in enumerate(step.keys) if key not in keys]
    outputs = [output for output in step.others if output.key not in keys]
    ids, logprobs = [step.ids[index] for index in indices], [step.logprobs[index] for index in indices]
    return Step([step.keys[index] for index in indices], ids, logprobs, outputs)


@dataclass
class _Change:
    """A command to load or drop an adapter, to which not all replicas have replied yet."""

    adapter: Adapter
    drop: bool
    waiting: set[int]  # replicas
    error: str | None = None
    detail: str = ""

    def fail(self, error: str | None, detail: str) -> None:
        """Record an error of a replica. Later errors are ignored."""
        if self.error is None:
            self.error, self.detail = error, detail


class _Adapters:
    """Makes all replicas load and drop the same LoRA adapters."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._changes: dict[int, _Change] = {}  # by key
        # Loaded adapters by id. An adapter that is dropped while no replica is ready disappears by itself.
        self._loaded = weakref.WeakValueDictionary[int, Adapter]()
        self._own_keys = itertools.count(-1, -1)

    def change(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        """Make all ready replicas load or drop an adapter. Other replicas load the adapters when they become ready."""
        ready = [replica for replica in self._replicas if replica.engine.ready]
        self._changes[key] = _Change(adapter, drop, {replica.number for replica in ready})
        if drop:
            self._loaded.pop(adapter.id, None)
        else:
            self._loaded[adapter.id] = adapter
        for replica in ready:
            replica.engine.change_adapter(key, adapter, drop=drop)

    def load_all(self, replica: Replica) -> None:
        """Make the new engine of a replica load all adapters."""
        for adapter in list(self._loaded.values()):
            replica.engine.change_adapter(next(self._own_keys), adapter, drop=False)

    def read(self, replica: Replica, output: Output) -> Iterator[Output] | None:
        """Process a replica's reply to a command. Return the outputs for the batcher, or None for any other output."""
        if output.key < 0:
            if output.error is not None:
                reason = output.detail or output.error
                log.warning("replica %d could not load or drop an adapter: %s", replica.number, reason)
            return iter(())
        if (change := self._changes.get(output.key)) is None:
            return None
        change.waiting.discard(replica.number)
        change.fail(output.error, output.detail)
        return self._reply(output.key, change)

    def lose(self, replica: Replica, failure: GenerationFailed | None) -> Iterator[Output]:
        """Stop waiting for a failed replica's replies.

        Args:
            failure: error to end pending commands with, or None if another replica is ready.
        """
        for key, change in list(self._changes.items()):
            change.waiting.discard(replica.number)
            if failure is not None:
                change.fail(failure.message, failure.detail)
            yield from self._reply(key, change)

    def _reply(self, key: int, change: _Change) -> Iterator[Output]:
        """Reply to a command once all replicas have replied. If a replica cannot load the adapter, all drop it."""
        if change.waiting:
            return
        del self._changes[key]
        finish = Finish.STOP if change.error is None else Finish.ERROR
        if change.error is not None and not change.drop:
            self._loaded.pop(change.adapter.id, None)
            for replica in self._replicas:
                if replica.engine.ready:
                    replica.engine.change_adapter(next(self._own_keys), change.adapter, drop=True)
        yield Output(key, finish=finish, error=change.error, detail=change.detail)


class ReplicaSet:
    """Several engines with the same model, used by the batcher and the host like one `EngineSupervisor`.

    At startup, the set becomes ready when all engines are ready; later, it is ready as long as any engine is ready. If
    an engine cannot be loaded at startup, the set is closed. If an engine fails or becomes silent later, its sequences
    without output are moved to other engines, each sequence at most once. If the engine has failed, its other sequences
    end with an error.

    Args:
        engines: supervisors of the engines, which have been started.
        slots: number of sequences that each engine computes at the same time.
        follows_prompts: whether a conversation stays on its replica.
        patience: number of seconds without a step after which a replica is considered silent.
    """

    statistics = None  # each replica has its own, in `reports`

    def __init__(
        self, engines: Sequence[EngineSupervisor], slots: int, *, follows_prompts: bool = True, patience: float = 15.0
    ) -> None:
        self._replicas = [Replica(number, engine, slots) for number, engine in enumerate(engines)]
        self._patience = patience
        self._router = Router(slots, follows_prompts=follows_prompts)
        # The replica chosen for the next call of `add`, and the request for which it was chosen.
        self._choice: tuple[Replica, tuple[Request, Prompt] | None] = self._replicas[0], None
        # Sequences of failed replicas, with the replica and the error; oldest first.
        self._moving: dict[int, tuple[Work, Replica, Output]] = {}
        self._adapters = _Adapters(self._replicas)
        self._selector = selectors.DefaultSelector()
        self._host = LoopHooks()
        self._opened = False  # whether all engines have been ready
        self._last_state = State.LOADING
        self._to_restart: list[Replica] = []
        self._restarts = -1  # number of restarts when the last restart was requested
        for replica in self._replicas:
            watch, on_change = partial(self._watch_channel, replica), partial(self._changed, replica)
            replica.engine.attach(LoopHooks(watch, on_change, lambda callback: self._host.soon(callback)))

    # -- the batcher's side --------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    def admits(self, request: Request, prompt: Prompt) -> bool:
        """Choose the replica to which `add` will send a request's sequences. Return False if the request must wait."""
        loads = self._loads(request.sampling.num_sequences)
        if not loads or not self.ready or self._moving:
            return False
        replica = self._replicas[self._router.choose(request, prompt, loads)]
        replica.num_requests += 1
        self._choice = replica, (request, prompt)
        return True

    def continues(self, key: int) -> bool:
        """Choose the replica that has computed the request so far. Return False if that replica has failed."""
        replica = next((replica for replica in self._replicas if key in replica.work or key in replica.ended), None)
        if replica is None or not replica.engine.ready:
            return False
        self._choice = replica, None
        return True

    def add(self, request: EngineRequest) -> None:
        replica, origin = self._choice
        replica.add(request, origin)

    def cancel(self, key: int) -> None:
        self._moving.pop(key, None)
        replica = next((replica for replica in self._replicas if key in replica.work), None)
        if replica is not None:
            replica.drop(key)
            replica.engine.cancel(key)

    def change_adapter(self, key: int, adapter: Adapter, *, drop: bool) -> None:
        self._adapters.change(key, adapter, drop=drop)

    def step(self, timeout: float = 0.0) -> list[Step]:
        """Return the steps of all replicas, after waiting up to `timeout` seconds for the first step.

        This also checks timers and restarts engines.

        If a replica dies, hangs or raises an exception, its sequences are moved to other replicas or end with an error.
        """
        if timeout > 0:
            self._selector.select(timeout)
        steps: list[Step] = []
        for replica in self._replicas:
            replica.ended.clear()
            try:
                for step in replica.engine.step():
                    steps.append(self._read(replica, step))
            except GenerationFailed as error:
                steps.append(Step.of(list(self._end_requests(replica, error))))
            if replica.fresh and replica.engine.silence > self._patience:
                self._relieve(replica)
        if self._moving:
            steps.append(Step.of(list(self._move())))
        if self._to_restart and self.restarts > self._restarts and self._all_ready():
            self._restarts = self.restarts
            self._to_restart.pop(0).engine.restart_when_idle()
        return steps

    # -- the host's side -----------------------------------------------------------------------------------------

    def attach(self, host: LoopHooks) -> None:
        """Connect an event loop, as in `EngineSupervisor.attach`. `host.watch` is called only now and in `close`."""
        self._host = host
        host.watch(self._selector.fileno())
        host.on_change(self.state)

    def close(self, grace: float = 2.0) -> None:
        self._host.watch(None)
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            for replica in self._replicas:
                replica.engine.attach(LoopHooks())
                threads.submit(replica.engine.close, grace)
        self._selector.close()
        self._tell()

    def restart_when_idle(self, replica: int) -> None:
        """Restart a replica as soon as it has no running requests. Replicas restart one at a time. Thread-safe."""
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
        """The reason why replicas cannot serve, if known."""
        replicas = [replica for replica in self._replicas if replica.engine.reason]
        return "; ".join(f"replica {replica.number}: {replica.engine.reason}" for replica in replicas)

    @property
    def info(self) -> EngineInfo | None:
        return next((replica.engine.info for replica in self._replicas if replica.engine.info is not None), None)

    @property
    def restarts(self) -> int:
        """The total number of restarts of all engines."""
        return sum(self.replica_restarts)

    @property
    def replica_restarts(self) -> Sequence[int]:
        return [replica.engine.restarts for replica in self._replicas]

    @property
    def reports(self) -> list[ReplicaReport]:
        return [replica.report() for replica in self._replicas]

    # -- one replica ---------------------------------------------------------------------------------------------

    def _read(self, replica: Replica, step: Step) -> Step:
        """Process a replica's step, and return the part that the batcher needs."""
        step = replica.read(step)
        replica.num_steps += bool(step.keys)
        replica.num_tokens += len(step.keys)
        if not step.others:
            return step
        outputs: list[Output] = []
        for output in step.others:
            if (replies := self._adapters.read(replica, output)) is not None:
                outputs += replies
                continue
            replica.num_tokens += len(output.ids)
            outputs.append(output)
            if output.finish is not None and output.key in replica.work:
                replica.ended.add(output.key)
                replica.drop(output.key)
        return step._replace(others=outputs)

    def _end_requests(self, replica: Replica, failure: GenerationFailed) -> Iterator[Output]:
        """Move or end the sequences of a failed replica, and stop waiting for its replies about adapters."""
        reason = f"replica {replica.number}: {failure.message}"
        lost = list(replica.work)
        moving = {key for key in lost if key in replica.fresh and replica.work[key].moved_from is None}
        log.error("replica %d failed with %d sequences; %d of them can move", replica.number, len(lost), len(moving))
        for key in lost:
            work = replica.drop(key)
            error = Output(key, finish=Finish.ERROR, error=reason, detail=failure.detail)
            if key in moving:
                self._moving[key] = work, replica, error
            else:
                yield error
        replica.left.clear()  # its next engine has none of them
        yield from self._adapters.lose(replica, None if self.ready else failure)

    def _relieve(self, replica: Replica) -> None:
        """Move the sequences of a silent replica that have no output yet to other replicas with free slots."""
        for key in [key for key in sorted(replica.fresh) if replica.work[key].moved_from is None]:
            if (other := self._choose(replica.work[key], replica)) is None:
                return
            log.warning("replica %d is silent: a sequence moves to replica %d", replica.number, other.number)
            work = replica.drop(key)
            replica.engine.cancel(key)
            replica.left.add(key)
            self._give(work, replica, other)

    def _move(self) -> Iterator[Output]:
        """Give the sequences of failed replicas to replicas with free slots. End them if no replica is ready."""
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
        replica.num_requests += work.origin is not None
        replica.add(work.request, work.origin, earlier)

    def _choose(self, work: Work, silent: Replica | None = None) -> Replica | None:
        """Return the replica to move a sequence to, or None if no replica has a free slot.

        Args:
            silent: the replica that the sequence is on, if that replica is silent. It is never chosen.
        """
        loads = [load for load in self._loads(1) if silent is None or load.replica != silent.number]
        if not loads:
            return None
        if work.origin is None:
            return self._replicas[min(loads, key=lambda load: load.num_tokens).replica]
        return self._replicas[self._router.choose(*work.origin, loads)]

    def _loads(self, num_sequences: int) -> list[Workload]:
        return [replica.load() for replica in self._replicas if replica.takes(num_sequences)]

    def _all_ready(self) -> bool:
        return all(replica.engine.ready for replica in self._replicas)

    def _watch_channel(self, replica: Replica, fd: int | None) -> None:
        if replica.fd is not None:
            self._selector.unregister(replica.fd)
        replica.fd = fd
        if fd is not None:
            self._selector.register(fd, selectors.EVENT_READ)

    def _changed(self, replica: Replica, state: State) -> None:
        """Process a change in a replica's state. If it becomes ready, load all adapters into its new engine."""
        if state is State.READY:
            if replica.engine.restarts:
                log.info("replica %d is ready again", replica.number)
            self._adapters.load_all(replica)
        self._opened = self._opened or self._all_ready()
        self._tell()

    def _tell(self) -> None:
        if self.state is not self._last_state:
            self._last_state = self.state
            self._host.on_change(self._last_state)
