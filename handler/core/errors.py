"""Tree of all errors for clients and operators; any other exception is a bug.

    Exception
    ├── ConfigError                 the start is refused: a wrong option, a missing package, a model that cannot load
    └── ServingError                one request fails; carries its HTTP status
        ├── InvalidPayload   400    the body does not fit the dialect
        │   └── NotJson             it is not JSON at all
        ├── InvalidParameter 400    a parameter has a wrong type or range, or the engine does not support it
        │   └── RefusedByEngine     the server that is the engine does not take the request
        ├── TooLong          400    more tokens than the model takes
        │   ├── PromptTooLong       the prompt leaves no token to answer with
        │   └── AnswerTooLong       prompt and answer together
        ├── UnsupportedMedia 415    a content type that no dialect reads
        ├── TooSlow          408    the body did not arrive in time
        ├── TooLarge         413    the body exceeds max_request_size
        ├── GenerationFailed 424    the engine raised, hung or died while it worked on the request
        ├── FormatterFailed  424    a function of the user's model.py raised, or returned a wrong value
        ├── InternalError    500    a bug of ours, caught at the edge so that it ends one request only
        ├── BadRequest       400    a wrong call about adapters, or a server without them
        │   └── InvalidSession      a session that is not there, or a wrong call about one
        ├── NotFound         404    a call about an unknown adapter
        │   ├── ModelNotFound       a request for another model
        │   ├── NotKept             a response that is not stored here
        │   └── RouteNotFound       a path that the server does not have
        ├── Unauthorized     401    no key, or a wrong one
        ├── Forbidden        403    a host's name or a page's origin that is not let in
        ├── MethodNotAllowed 405    a method that the route does not have
        ├── Conflict         409    a name that is taken, or an adapter that is changing
        ├── NoRoom           507    the limit of adapters is reached
        ├── AdapterFailed    424    an adapter with broken files, or refused by the engine
        └── Unavailable      503    not accepted: the engine is down, the server is stopping
            └── Overloaded          the queue is full, the wait was too long, or the engine's servers are busy

A dialect answers with these statuses but for those that its `ErrorFormat` lists: LMI has 424 for whatever its handler
finds wrong (djl_python of DJL Serving). The statuses of calls about adapters are those of DJL Serving's adapter API.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote

from handler.core.secrets import TOKENS

log = logging.getLogger("handler")


class Problem(NamedTuple):
    """A reason to refuse a start.

    Attributes:
        where: file and line, variable or argument, as `serving.properties, line 3`; "" if the message says it.
        name: the option's; "" if the problem concerns no option.
        message: what is wrong, and what to change.
    """

    where: str
    name: str
    message: str

    def __str__(self) -> str:
        """Return the place, then the message; an argument that already shows the value is not repeated."""
        message = self.message.removeprefix(f"{self.where.removeprefix('-o ')}: ")
        return f"{self.where}: {message}" if self.where else message


class ConfigError(Exception):
    """The start is refused; the message says what to change. Several problems have a number and a line each."""

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Each problem once."""
        found = (one if isinstance(one, Problem) else Problem("", "", one) for one in self.args)
        return tuple(dict.fromkeys(found))

    def __str__(self) -> str:
        texts = [str(problem) for problem in self.problems]
        lines = [f"{number}. {text}" for number, text in enumerate(texts, 1)]
        return texts[0] if len(texts) == 1 else "\n".join([f"{len(texts)} problems:", *lines])


class Problems(list[Problem]):
    """Problems of several steps: `with problems:` collects those of a ConfigError and continues after the block.

    A problem that names an option whose value is wrong already follows from that value, so it is left out.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, ConfigError):
            return False
        wrong = "|".join(re.escape(problem.name) for problem in self if problem.name)
        named = re.compile(rf"(?<![\w.])({wrong})\b") if wrong else None
        self.extend(problem for problem in error.problems if not (named and named.search(problem.message)))
        return True

    def check(self) -> None:
        """Raise ConfigError with all problems if there are any."""
        if self:
            raise ConfigError(*self)


class ServingError(Exception):
    """One request fails. `status` is its HTTP status, `kind` TGI's `error_type`, `type` DJL's exception name.

    A subclass with a status of its own has it in every dialect, unless the dialect's table names that very class.

    Args:
        detail: what only the log may say: a foreign program's own words.
    """

    status = 424
    kind = "generation"
    type = "TranslateException"

    def __init__(self, *message: str, detail: str = "") -> None:
        super().__init__(*message)
        self.detail = detail

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.type

    @property
    def public(self) -> str:
        """The message for the log: without the client's own text, and with the detail."""
        return f"{self.message} ({self.detail})" if self.detail else self.message


class _OfTheClient(ServingError):
    """The client's own mistake."""

    status = 400
    kind = "validation"
    type = "BadRequestException"


class InvalidPayload(_OfTheClient):
    """The body cannot be read as a request."""


class InvalidParameter(_OfTheClient):
    """The message begins with the client's `NAME=VALUE`, as in `parameters.top_p=2: …`, or only with names."""

    @property
    def public(self) -> str:
        return f"{re.split('[=:]', self.message, maxsplit=1)[0]} was refused"


class NotJson(InvalidPayload):
    """Empty, not UTF-8, or not one JSON document."""


class RefusedByEngine(InvalidParameter):
    """The server that is the engine rejects the request. `words` are its own; they may quote the client."""

    _REFUSED = "the engine refused the request"

    def __init__(self, words: str, detail: str = "") -> None:
        super().__init__(f"{self._REFUSED}: {words}" if words else self._REFUSED, detail=detail)

    @property
    def public(self) -> str:
        return f"{self._REFUSED} ({self.detail})" if self.detail else self._REFUSED


class TooLong(_OfTheClient):
    """More tokens than the model takes."""


class PromptTooLong(TooLong):
    """The prompt is too long.

    Attributes:
        name: the client's name of it.
        num_prompt: its tokens, or a lower bound of them.
        given: `num_prompt` in words.
        most: tokens that it may have.
    """

    def __init__(self, name: str, num_prompt: int, most: int, *, exact: bool = True) -> None:
        given = f"{num_prompt}" if exact else f"at least {num_prompt}"
        super().__init__(f"'{name}' has {given} tokens; the model takes at most {most}")
        self.name, self.num_prompt, self.given, self.most, self._exact = name, num_prompt, given, most, exact

    def named(self, name: str) -> PromptTooLong:
        """Return the same error with another dialect's name."""
        return PromptTooLong(name, self.num_prompt, self.most, exact=self._exact)


class AnswerTooLong(TooLong):
    """`num_prompt` tokens and `wanted` new ones are more than `most` together."""

    def __init__(self, name: str, num_prompt: int, wanted: int, most: int) -> None:
        super().__init__(
            f"{name}={wanted}: with {num_prompt} prompt tokens it must be at most {most - num_prompt}, as the model "
            f"takes {most} in all"
        )
        self.num_prompt, self.wanted, self.most = num_prompt, wanted, most


class UnsupportedMedia(_OfTheClient):
    status = 415
    type = "UnsupportedMediaTypeException"


class TooSlow(_OfTheClient):
    status = 408
    type = "RequestTimeoutException"


class TooLarge(_OfTheClient):
    status = 413
    type = "RequestEntityTooLargeException"


class GenerationFailed(ServingError):
    type = "EngineException"


class FormatterFailed(ServingError):
    """`detail` is the user's exception, which may contain the client's text."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(f"{message}: {detail}" if detail else message)
        self._public = message

    @property
    def public(self) -> str:
        return self._public


class Unavailable(ServingError):
    status = 503
    kind = "overloaded"
    type = "WlmCapacityException"


class Overloaded(Unavailable):
    """The client may come again soon.

    Args:
        retry_after: seconds until then; 0 if unknown.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.retry_after = retry_after


class BadRequest(_OfTheClient):
    """The request is refused before its body is read, or for a reason outside its body."""


class InvalidSession(BadRequest):
    """A session that is not there or a wrong call about one, in AWS's words and with its status."""


class Unauthorized(BadRequest):
    status = 401
    kind = "authentication"
    type = "UnauthorizedException"


class NotFound(BadRequest):
    status = 404


class ModelNotFound(NotFound):
    """A request for another model.

    Args:
        name: what the client wrote; its beginning is kept.
        served: names of the models that are served; the message has the first ones, but no paths of this machine.

    Attributes:
        served: the end of the message, with these names; "" without any.
    """

    type = "ModelNotFoundException"

    _MOST = 16  # names in the message
    _MOST_CHARACTERS = 200  # of each

    def __init__(self, name: str, version: str = "", served: Iterable[str] = ()) -> None:
        names = [one for one in dict.fromkeys(served) if one != "*" and not one.startswith("/")]
        name = name[: self._MOST_CHARACTERS]
        some = [
            *(one[: self._MOST_CHARACTERS] for one in names[: self._MOST]),
            *(["..."] if len(names) > self._MOST else []),
        ]
        self.name, self.version, self.served = name, version, f"; served here: {', '.join(some)}" if some else ""
        super().__init__(f"Model not found: {name}{self.served}")


class RouteNotFound(NotFound):
    type = "ResourceNotFoundException"


class NotKept(NotFound):
    """An answer, or an item of one, that is not stored here, or no longer is.

    Args:
        param: the client's field that names it; "" for the path.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class Forbidden(BadRequest):
    status = 403
    type = "ForbiddenException"


class MethodNotAllowed(BadRequest):
    status = 405
    type = "MethodNotAllowedException"


class Conflict(BadRequest):
    status = 409


class NoRoom(BadRequest):
    status = 507


class AdapterFailed(BadRequest):
    status = 424


class InternalError(ServingError):
    status = 500
    type = "InternalServerException"

    @classmethod
    def of(cls, bug: BaseException) -> InternalError:
        """Make the client's error for a bug; the log has the rest."""
        return cls(f"internal error: {type(bug).__name__}")


def serving_error(error: BaseException) -> ServingError:
    """Return a ServingError as it is; log any other exception and return an InternalError."""
    if isinstance(error, ServingError):
        return error
    log.error("a bug", exc_info=error)
    return InternalError.of(error)


# -- words of foreign programs, made fit for clients and for the log: exceptions, and answers of other servers ---------


_MOST_READ = 4_096  # characters that are looked at
_MOST_FOR_CLIENTS = 300
_MOST_FOR_LOG = 1_000
_SHORTEST_KEY = 4  # characters; masking a shorter one would spoil other words

_KEY = "[key]"
_KEYS = re.compile(
    r"(?i:\b(?:bearer|basic)\s+)[\w.~+/=-]{4,}"
    r"|\b(?:sk|pk|hf|rk|gsk|ghp|xox[abp])[-_][\w-]{8,}"
    r"|\beyJ[\w-]{8,}(?:\.[\w-]*){0,2}"
    r"|(?i:\b(?:x-)?(?:api[-_ ]?key|access[-_ ]?token|authorization|password|secret|signature)\b['\"]?\s*[:=]\s*['\"]?"
    r"(?:(?:bearer|basic)\s+)?)"
    r"(?!\[key\])[^\s'\",;&}]{4,}"
    rf"|{TOKENS}"  # last: the wider forms above hide a longer word whole
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]{1,500}@")

_PAGE = re.compile(r"<(?:!doctype\b|html\b|head\b|body\b|title\b)", re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:a|b|i|p|hr|br|h[1-6]|div|span|pre|code|center|font|table|t[rdh]|ul|ol|li|img|svg|script|style|link|meta"
    r"|form|input|iframe)\b[^<>]{0,500}>",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last)"
_REPR = re.compile(
    r"\b(?:\w{1,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Warning)"
    r"\((?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")(?:,[^()]{0,200})?\)",
    re.DOTALL,
)
_EXCEPTION = re.compile(r"\b(?:[a-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception|Timeout)\b:?\s*")
_MASKS = (
    (re.compile(r"<[^<>]{1,200} at 0x[0-9a-fA-F]+>|\b0x[0-9a-fA-F]{6,}\b"), "[object]"),
    (re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{1,15}://[^\s'\"<>)\]]+"), "[address]"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?::\d{1,5})?"), "[address]"),
    (re.compile(r"\[[0-9a-fA-F]{0,4}(?::[0-9a-fA-F.]{0,15}){2,7}(?:%\w{1,15})?\](?::\d{1,5})?"), "[address]"),
    (re.compile(r"\b(?:localhost|[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63}){1,8}):\d{2,5}\b"), "[address]"),
    (re.compile(r"\b(?:[a-zA-Z0-9-]{1,63}\.){1,8}(?:internal|local|svc|lan|amazonaws\.com)\b"), "[address]"),
    (re.compile(r"(?<![\w#.:/])[~.]{0,2}/[\w.+@%=-]+(?:/[\w.+@%=-]+)+/?"), "[path]"),
    (re.compile(r"(?<![\w#.:/])/[\w.+@%=-]+\.[a-zA-Z]\w{0,9}\b"), "[path]"),
    (re.compile(r"\b[A-Z]:\\[^\s'\"]+"), "[path]"),
    (re.compile(r"(?:, )?\bline \d+, in \w+"), ""),
)


def client_words(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the part of a foreign message that a client may see: one bounded line without keys, addresses, paths,
    HTML or Python's names; "" if nothing is left.

    Args:
        secrets: keys and names that must not be in it, besides those that look like keys.
    """
    text = mask_keys(text, secrets)[:_MOST_READ]
    if _PAGE.search(text):
        return ""
    if _TRACEBACK in text:
        text = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    text = _TAG.sub(" ", text)
    text = _EXCEPTION.sub("", _REPR.sub(r"\1\2", text))
    for pattern, mask in _MASKS:
        text = pattern.sub(mask, text)
    return _cut(text, _MOST_FOR_CLIENTS)


def log_words(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a foreign message for the log: one line of at most 1,000 characters, its keys masked."""
    return _cut(mask_keys(text, secrets)[:_MOST_READ], _MOST_FOR_LOG)


def mask_keys(text: str, secrets: Iterable[str] = ()) -> str:
    """Replace `secrets`, and all that looks like a key."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_KEY:
            for form in {secret, quote(secret, safe="")}:
                text = text.replace(form, _KEY)
    return _CREDENTIALS.sub("***@", _KEYS.sub(_KEY, text[: 4 * _MOST_READ]))


def error_text(error: BaseException) -> str:
    """Format an exception of users' code with `traceback`, in case its `__str__` raises."""
    return str(traceback.TracebackException(type(error), error, None))[:500].encode(errors="replace").decode()


def _cut(text: str, most: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
