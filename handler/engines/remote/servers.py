"""Servers at `option.base_url`: options, errors, checks of responses, and the choice of a server."""

from __future__ import annotations

import asyncio
import importlib
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from handler.config.engines import ENGINES
from handler.config.environment import secrets
from handler.core.errors import ConfigError, Problem, Problems, log_words
from handler.core.values import Extras, Finish, Pooling, Sampling, StructuredOutput
from handler.engines.base import Alternatives, EngineConfig, Output
from handler.engines.huggingface.files import check_tokenizer, is_fetched

_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # in JSON
_IN_JSON = ("json_schema", "structural_tag", "choice")  # kinds of structured output


class Software(NamedTuple):
    """The software of servers, whatever their API.

    Attributes:
        name: value of option.base_url_kind, and the servers' name in messages to clients.
        not_enforced: the end of the error for structured output that a server does not enforce.
        enforces_later: whether structured output that is not enforced from the first token is so after reasoning.
    """

    name: str
    not_enforced: str = ""
    enforces_later: bool = False


VLLM = Software("vllm", "; with --reasoning-parser, it does so only after the reasoning has ended", True)


def kinds_of(engine: str) -> dict[str, Any]:
    """Return the kinds of servers that an engine supports, by their names in option.base_url_kind."""
    return {
        name: importlib.import_module(f"handler.engines.{module}").KINDS[name]
        for name, module in ENGINES[engine].kinds.items()
    }


class RemoteOptions(NamedTuple):
    """Options for an engine that uses remote servers. They are checked before the engine is loaded.

    Attributes:
        engine: name of the engine.
        example: example of a server address.
    """

    engine: str
    example: str

    def check(self, model_id: str | None, config: EngineConfig) -> None:
        problems = Problems()
        with problems:
            self.urls(config)
        with problems:
            self.check_model(model_id, config)
        problems.check()

    def check_model(self, model_id: str | None, config: EngineConfig) -> None:
        """Check the model's files unless they are fetched later; see `prepare`."""
        if not is_fetched(model_id):
            self.prepare(model_id, config)

    def prepare(self, model_id: str | None, config: EngineConfig) -> Path:
        """Return the directory of `option.model_id`, from which the tokenizer, chat template and config are read.

        Raises:
            ConfigError: the directory does not exist, or has no tokenizer.
        """
        if model_id is None or not Path(model_id).is_dir():
            remark = "" if model_id is None else f"; {model_id!r} is neither"
            raise ConfigError(
                f"the {self.engine} engine needs option.model_id, a directory or a name on the hub{remark}"
            )
        check_tokenizer(Path(model_id))
        return Path(model_id)

    def urls(self, config: EngineConfig) -> tuple[str, ...]:
        """Return the servers' addresses.

        Raises:
            ConfigError: option.base_url is not set.
        """
        urls: tuple[str, ...] = config.engine_options.get("base_url", ())
        if not urls:
            key = "option.base_url"
            raise ConfigError(
                Problem("", key, f"the {self.engine} engine needs {key}, for example -o {key}={self.example}")
            )
        return urls


@dataclass(eq=False, repr=False)
class Refused(Exception):
    """The server refuses the request because of its content, so other servers would refuse it too.

    Attributes:
        status: an HTTP status, or the name of a gRPC status.
        words: the server's message.
    """

    status: int | str
    words: str

    def __str__(self) -> str:
        return f"refused the request with {self.status}"


@dataclass(eq=False, repr=False)
class Failed(Exception):
    """The server failed or cannot serve. Another server may succeed, or the same server later.

    Attributes:
        plain: description of the failure for clients, as a verb phrase that follows "the server".
        detail: details for the log: the server's message, or what the operator should change.
        retry_after: number of seconds to wait before a retry, as requested by the server; 0 if it did not request this.
    """

    plain: str
    detail: str = ""
    _: KW_ONLY
    retry_after: float = 0.0

    def __str__(self) -> str:
        return f"{self.plain}: {self.detail}" if self.detail else self.plain


class Lasting(Failed):
    """A failure that lasts until the operator changes something."""


class BrokeOff(Failed):
    """The server closed the connection during the request, perhaps because of the request."""


class Busy(Failed):
    """The server is overloaded, and will recover by itself."""


class Silent(Failed):
    """The server did not respond in time."""


class NoConnection(Failed):
    """No connection could be made."""


class Ill(Failed):
    """The server reports that it is unhealthy, or cannot be trusted."""


class Lost(Lasting, Ill):
    """The server that the engine started has ended, or is another server."""


class NotLoaded(Failed):
    """A server has not loaded the adapter of a request. It can still serve other requests."""


class PooledCall(NamedTuple):
    """A text to embed, or two texts to score. The result arrives in one response."""

    ids: Sequence[int]
    pooling: Pooling
    begun: bool = False


@dataclass
class Part:
    """The part of a response that arrived since the last step. The first part may contain prompt log-probabilities."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[Alternatives] = field(default_factory=list)
    finish: Finish | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_tops: list[Alternatives] | None = None
    extras: Extras | None = None
    failure: Output | None = None  # the end of the request with an error


class ResponseCheck:
    """Checks a response against its request."""

    def __init__(self, sampling: Sampling) -> None:
        self._stops = frozenset(sampling.stop_token_ids)
        self._most = max(sampling.max_new_tokens, 1)
        self._num_tops = sampling.top_logprobs
        self._scored = sampling.logprobs or bool(sampling.top_logprobs)
        self._num_ids = 0

    @property
    def begun(self) -> bool:
        """Whether a token has arrived. If so, the request can no longer be sent to another server."""
        return self._num_ids > 0

    def take(
        self, part: Part, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Alternatives]
    ) -> None:
        """Add tokens to `part`, with their log-probabilities and alternatives if these were requested.

        Raises:
            Failed: there are more tokens than the request allows.
            ValueError: a log-probability or an alternative is missing, or is not a number.
        """
        if self._num_ids + len(ids) > self._most:
            raise Failed(f"sent more tokens than max_tokens={self._most}")
        if self._scored and len(logprobs) != len(ids):
            raise ValueError("a token's log-probability is missing")
        if self._num_tops and len(tops) != len(ids):
            raise ValueError("a token's alternatives are missing")
        values: Sequence[float | None] = logprobs if self._scored else [None] * len(ids)
        part.logprobs += [None if value is None else score(value) for value in values]
        part.ids += ids
        self._num_ids += len(ids)
        if self._num_tops:
            part.tops += tops

    def finish(self, reason: str, last: Any) -> Finish:
        """Return the finish reason that corresponds to the server's reason and the last token id.

        Raises:
            Failed: the server's reason is unknown.
        """
        match reason:
            case "length":
                return Finish.LENGTH
            case "stop":
                return Finish.STOP if last in self._stops else Finish.EOS
        raise Failed("ended the request for an unknown reason", f"finish_reason={str(reason)[:100]!r}")


def with_ends(sampling: Sampling, eos: Collection[int]) -> Sampling:
    """Add a model's end tokens to the stop tokens unless `ignore_eos` is set.

    If a server's flags make it ignore generation_config.json, it might not know these tokens.
    """
    ends = () if sampling.ignore_eos else sorted(eos)
    return sampling._replace(stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))))


def structured_output_of(sampling: Sampling) -> StructuredOutput | None:
    """Return the structured output of a request, or None.

    Raises:
        ValueError: it contains NUL characters, because of which xgrammar before 0.2.7 may end a server.
    """
    rule = sampling.structured_output
    if rule is not None and ("\0" in rule.value or (rule.kind in _IN_JSON and _NUL.search(rule.value))):
        raise ValueError(
            "structured output: NUL characters (\\u0000) are not supported, because they crash some servers"
        )
    return rule


def score(value: Any) -> float:
    """Return a log-probability as a float. In JSON from other servers, it may be a string or not finite.

    Raises:
        ValueError: the log-probability is not a finite number.
    """
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a log-probability is not a number")
    return float(value)


def other_size(sizes: Sequence[int], expected: int) -> Failed:
    """Return the failure of a server whose embedding has another number of dimensions than at the start.

    Args:
        sizes: the numbers of dimensions of all embeddings in the response.
        expected: number of dimensions at the start.
    """
    received = f"{len(sizes)} embeddings" if len(sizes) > 1 else f"{sum(sizes)} dimensions"
    detail = f"{received} instead of one embedding with {expected} dimensions"
    return Failed("sent an embedding of another size than at the start", f"{detail}; restart this handler to use it")


_PAUSE, _MOST_PAUSE = 1.0, 30.0  # seconds without requests after a failure; doubled by each further failure in a row


class RemoteServer:
    """A remote server.

    A failure starts a pause, during which the server gets requests only if no other server is preferred (see `choose`).
    After the pause, it is asked for its model and gets a single request. When the first token of the response arrives,
    the server gets requests as before.

    Attributes:
        outstanding: number of prompt tokens of the server's running requests, plus the maximum number of tokens that
            they may generate.
        known: whether the server has confirmed that it serves the model, and has not failed since.
        asked_at: time of the last confirmation.
        asking: task that asks the server for its model; its result is the reason why the server cannot serve the model,
            or None if it can.
        enforces_rules: whether the server enforces structured output on every prompt. After `enforces_until`, the
            server must be asked again.
        num_failures: number of pauses since the server's last complete response, counted up to 8.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.outstanding = 0
        self.known = False
        self.asked_at = 0.0
        self.asking: asyncio.Task[Failed | None] | None = None
        self.enforces_rules, self.enforces_until = False, 0.0
        self._on_trial = False
        self.num_failures = 0
        self._out_until = 0.0

    def failed(self, now: float, retry_after: float = 0.0) -> float:
        """Start a pause after a failure, and return its length in seconds. Return 0 if a pause is already in progress.

        Args:
            retry_after: number of seconds to wait before a retry, as requested by the server.
        """
        if self.is_out(now):
            return 0.0
        pause = min(max(_PAUSE * (1 << self.num_failures), retry_after), _MOST_PAUSE)
        self._out_until = now + pause
        self.num_failures = min(self.num_failures + 1, 8)
        self.known, self._on_trial = False, True
        return pause

    def begun(self) -> None:
        """Record that a first token has arrived."""
        self._on_trial = False

    def answered(self) -> None:
        """Record a complete response, which clears all earlier failures."""
        self.num_failures, self._out_until = 0, 0.0

    def is_out(self, now: float) -> bool:
        return now < self._out_until

    def serves(self, now: float) -> bool:
        """Return whether the server should be preferred over servers that have failed."""
        return self.known and not self.is_out(now) and not (self._on_trial and self.outstanding)


def choose(servers: Iterable[RemoteServer], tries: Counter[RemoteServer], now: float) -> RemoteServer:
    """Choose a server for a request: preferably a server that `serves`, then by fewest attempts, then by fewest tokens.

    Args:
        tries: number of attempts at this request, by server.
    """
    return min(servers, key=lambda server: (not server.serves(now), tries[server], server.outstanding))


class Model(Protocol):
    """A server's description of its model. `max_tokens` is None if the server does not report it."""

    @property
    def max_tokens(self) -> int | None: ...

    def _replace(self, *, max_tokens: int | None) -> Any: ...

    def _asdict(self) -> dict[str, Any]: ...


def check_same(model: Model, first: Model) -> None:
    """Raise Failed if a server's model differs from that of the first server, except in `max_tokens`."""
    expected = first._asdict()
    differences = [
        f"{name} {value!r} instead of {expected[name]!r}"
        for name, value in model._asdict().items()
        if name != "max_tokens" and value != expected[name]
    ]
    if differences:
        raise Failed("serves another model", ", ".join(differences))


def common_kind(by_url: Mapping[str, str], reasons: Iterable[str], kinds: Iterable[str]) -> str:
    """Return the kind that all servers have in common, for option.base_url_kind=auto.

    Args:
        by_url: the known kinds, by address.
        reasons: the reasons why the kinds of the other servers are unknown.
        kinds: all kinds that exist.

    Raises:
        ConfigError: no kind is known, or the kinds differ.
    """
    if len(set(by_url.values())) == 1:
        return next(iter(by_url.values()))
    details = log_words("; ".join([*(f"{url}: {kind}" for url, kind in by_url.items()), *reasons]), secrets())
    problem = "the servers are of different kinds" if by_url else "no server has reported its kind"
    remedy = (
        "Keep only servers of one kind" if by_url else f"Start one, or set option.base_url_kind ({', '.join(kinds)})"
    )
    raise ConfigError(f"option.base_url_kind=auto: {problem}: {details}. {remedy}")


A = TypeVar("A")
M = TypeVar("M", bound=Model)
_POLL_INTERVAL = 0.5  # seconds between two checks of a server that is not ready
_LOG_INTERVAL = 10.0  # seconds between log messages about servers that are not ready


async def find_model(
    urls: Sequence[str],
    ask: Callable[[str], Awaitable[A]],
    fit: Callable[[A, M | None], M],
    description: str,
    address: str = "option.base_url={}:",
) -> tuple[M, Mapping[str, Failed]]:
    """Ask all servers for their models until one of them has a suitable model.

    Args:
        ask: function that returns a server's response.
        fit: function that returns the model from a response. Its second argument is the model of the previous servers,
            or None for the first server; the function raises Failed if the two models differ.
        description: name of the expected model in the log.
        address: text for a server's address in messages, with `{}` in place of the address itself.

    Returns:
        The model, with the smallest `max_tokens` of any server, and the errors of the other servers, by address.

    Raises:
        ConfigError: no server will ever have a suitable model.
    """
    logged_at = time.monotonic()
    while True:
        model, failed = _fitting(urls, await asyncio.gather(*map(ask, urls), return_exceptions=True), fit)
        if model is not None:
            return model, failed
        reasons = log_words("; ".join(f"{address.format(url)} {error}" for url, error in failed.items()), secrets())
        if all(isinstance(error, Lasting) for error in failed.values()):
            raise ConfigError(reasons)
        if time.monotonic() - logged_at >= _LOG_INTERVAL:
            logged_at = time.monotonic()
            print(f"waiting for {description}: {reasons}", file=sys.stderr, flush=True)
        await asyncio.sleep(_POLL_INTERVAL)


def _fitting(
    urls: Sequence[str], responses: Sequence[A | BaseException], fit: Callable[[A, M | None], M]
) -> tuple[M | None, dict[str, Failed]]:
    common: M | None = None
    failed: dict[str, Failed] = {}
    for url, response in zip(urls, responses, strict=True):
        try:
            if isinstance(response, BaseException):
                raise response
            model = fit(response, common)
        except Failed as error:
            failed[url] = error
            continue
        limits = [
            candidate.max_tokens for candidate in (common, model) if candidate is not None and candidate.max_tokens
        ]
        common = model._replace(max_tokens=min(limits, default=None))
    return common, failed
