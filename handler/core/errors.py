"""All errors that clients and operators see. Any other exception is a bug.

    Exception
    ├── ConfigError                 the server cannot start: a wrong option, a missing package, a broken model
    └── ServingError                one request fails; the error has an HTTP status
        ├── InvalidPayload   400    the body does not fit the dialect
        │   └── NotJson             the body is not JSON at all
        ├── InvalidParameter 400    a parameter has a wrong type or range, or the engine does not support it
        │   └── RefusedByEngine     the server that is used as the engine rejects the request
        ├── TooLong          400    more tokens than the model accepts
        │   ├── PromptTooLong       the prompt leaves no room for a response
        │   └── AnswerTooLong       prompt and response together are too long
        ├── UnsupportedMedia 415    a content type that no dialect reads
        ├── TooSlow          408    the body did not arrive in time
        ├── TooLarge         413    the body or an uploaded file is too large
        ├── GenerationFailed 424    the engine raised an exception, hung or died during the request
        ├── FormatterFailed  424    a function of the user's model.py raised an exception or returned a wrong value
        ├── InternalError    500    a bug in this server, caught so that only one request fails
        ├── BadRequest       400    an invalid call of the adapter API, or a server without adapters
        │   └── InvalidSession      a session that does not exist, or an invalid call to open or close a session
        ├── NotFound         404    an adapter, file or batch that does not exist
        │   ├── ModelNotFound       a model that is not served here
        │   ├── NotKept             a response that is not stored here
        │   └── RouteNotFound       a path that does not exist
        ├── Unauthorized     401    a missing or wrong key
        ├── Forbidden        403    a host name or an origin that is not allowed
        ├── MethodNotAllowed 405    a method that the route does not support
        ├── Conflict         409    a name that is taken, or a call that the current state does not allow
        ├── NoRoom           507    the maximum number of adapters is reached
        ├── AdapterFailed    424    an adapter that has broken files, or that the engine refuses
        └── Unavailable      503    the engine is down, or the server is stopping
            └── Overloaded          the queue is full, the wait was too long, or the engine's servers are busy

A dialect uses these statuses unless its `ErrorFormat` replaces them: LMI uses 424 for every error that its handler
detects (djl_python of DJL Serving). The statuses of the adapter API are those of DJL Serving.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import NamedTuple
from urllib.parse import quote

from handler.core.secrets import TOKENS

log = logging.getLogger("handler")


_VARIABLE = "environment variable "


class Problem(NamedTuple):
    """A reason why the server cannot start.

    Attributes:
        where: file and line, variable or argument, such as `serving.properties, line 3`, or "" if the message contains
            it.
        name: name of the option, or "" if the problem does not concern an option.
        message: description of the problem, and what to change.
    """

    where: str
    name: str
    message: str

    def __str__(self) -> str:
        """Return the location and the message. If the message begins with the location, it is not repeated."""
        variable = self.where.removeprefix(_VARIABLE)
        if self.where.startswith(_VARIABLE) and self.message.startswith(f"{variable}="):
            return f"{_VARIABLE}{self.message}"
        message = self.message.removeprefix(f"{self.where.removeprefix('-o ')}: ")
        return f"{self.where}: {message}" if self.where else message


class ConfigError(Exception):
    """Raised if the server cannot start. The message explains what to change. Several problems form a numbered list."""

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__(*problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, without duplicates."""
        items = (item if isinstance(item, Problem) else Problem("", "", item) for item in self.args)
        return tuple(dict.fromkeys(items))

    def __str__(self) -> str:
        texts = [str(problem) for problem in self.problems]
        lines = [f"{number}. {text}" for number, text in enumerate(texts, 1)]
        return texts[0] if len(texts) == 1 else "\n".join([f"{len(texts)} problems:", *lines])


def refuse(problems: Iterable[Problem | str]) -> None:
    """Raise ConfigError with all problems if there are any."""
    if reasons := [*problems]:
        raise ConfigError(*reasons)


class Problems(list[Problem]):
    """Problems from several steps. `with problems:` collects the problems of a ConfigError and suppresses the error.

    A problem is omitted if its message contains an option that already has a problem, because that option is then the
    cause.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, ConfigError):
            return False
        wrong = "|".join(re.escape(problem.name) for problem in self if problem.name)
        mentioned = re.compile(rf"(?<![\w.])({wrong})\b") if wrong else None
        self.extend(problem for problem in error.problems if not (mentioned and mentioned.search(problem.message)))
        return True

    def check(self) -> None:
        """Raise ConfigError with all problems if there are any."""
        refuse(self)


class ServingError(Exception):
    """An error that ends one request.

    If a subclass sets its own status, every dialect uses that status, unless its `ErrorFormat.statuses` contains
    the subclass.

    Args:
        detail: text only for the log, such as the message of another program.

    Attributes:
        status: the HTTP status.
        kind: TGI's `error_type`.
        type: DJL Serving's exception name.
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
        """The message for the log, with the detail and without text from the client."""
        return f"{self.message} ({self.detail})" if self.detail else self.message


class _OfTheClient(ServingError):
    """An error that the client has caused."""

    status = 400
    kind = "validation"
    type = "BadRequestException"


class InvalidPayload(_OfTheClient):
    """The body is not a valid request."""


class InvalidParameter(_OfTheClient):
    """A parameter is refused. The message begins with `NAME=VALUE`, such as `parameters.top_p=2: …`, or NAME.

    After ` with `, the name may contain text from the client, such as the id of a question.
    """

    @property
    def public(self) -> str:
        return f"{re.split('[=:]| with ', self.message, maxsplit=1)[0]} was refused"


class NotJson(InvalidPayload):
    """The body is empty, is not UTF-8, or is not a single JSON document."""


class RefusedByEngine(InvalidParameter):
    """The server that is used as the engine rejects the request.

    Args:
        words: the message of the server, which may quote text from the client.
        detail: text for the log only.
    """

    _REFUSED = "the engine refused the request"
    _OVERFLOW = re.compile(
        "context length|available context size|maximum allowed length|should not exceed max_(?:seq_len|num_tokens)",
        re.I,
    )

    def __init__(self, words: str, detail: str = "") -> None:
        super().__init__(f"{self._REFUSED}: {words}" if words else self._REFUSED, detail=detail)

    @property
    def tells_overflow(self) -> bool:
        """Whether the message is the vLLM, SGLang, TensorRT-LLM or llama.cpp error for a prompt that is too long."""
        return bool(self._OVERFLOW.search(self.message))

    @property
    def public(self) -> str:
        return f"{self._REFUSED} ({self.detail})" if self.detail else self._REFUSED


class TooLong(_OfTheClient):
    """The request needs more tokens than the model accepts.

    The messages contain the wording of both OpenAI and vLLM for this error, and also that of TGI if the fields are
    those of TGI. Clients that recognize the wording shorten the conversation or use another model
    (tests/joints/test_error_words.py).
    """

    @staticmethod
    def _context(limit: int, *, of_tgi: bool) -> str:
        tgi = f" (`inputs` tokens + `max_new_tokens` must be <= {limit})" if of_tgi else ""
        return f"this model's maximum context length is {limit} tokens{tgi}"


class PromptTooLong(TooLong):
    """The prompt is too long.

    Args:
        limit: maximum number of tokens in the prompt and response together, or None for a request without generated
            text.

    Attributes:
        name: name of the prompt in the client's dialect. After ` with `, it may contain text from the client.
        num_prompt: number of tokens in the prompt, or a lower bound.
        length: `num_prompt` as words, such as "at least 100".
        most: maximum number of tokens in the prompt.
    """

    def __init__(self, name: str, num_prompt: int, most: int, *, limit: int | None = None, exact: bool = True) -> None:
        length = f"{num_prompt}" if exact else f"at least {num_prompt}"
        context = self._context(limit or most, of_tgi=limit is not None and name == "inputs")
        super().__init__(
            f"'{name}' has {length} tokens; the model accepts at most {most}. Input tokens exceed the configured "
            f"limit: {context}. Please reduce the length of the {name}"
        )
        self.name = name
        self.num_prompt = num_prompt
        self.length = length
        self.most = most
        self._exact = exact

    @property
    def public(self) -> str:
        return self.message.replace(self.name, self.name.partition(" with ")[0])

    def named(self, name: str, limit: int | None = None) -> PromptTooLong:
        """Return the same error with the name of the prompt in another dialect, and with `limit`."""
        most = min(self.most, limit - 1) if limit else self.most
        return PromptTooLong(name, self.num_prompt, most, limit=limit, exact=self._exact)


class AnswerTooLong(TooLong):
    """The sum of `num_prompt` prompt tokens and `num_new` new tokens exceeds the limit `most`."""

    def __init__(self, name: str, num_prompt: int, num_new: int, most: int) -> None:
        tokens = "token" if num_prompt == 1 else "tokens"
        context = self._context(most, of_tgi=name.endswith("max_new_tokens"))
        super().__init__(
            f"{name}={num_new}: with {num_prompt} prompt {tokens} it must be at most {most - num_prompt}: {context}"
        )
        self.num_prompt, self.num_new, self.most = num_prompt, num_new, most


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


class ServerLost(GenerationFailed):
    """The server that an engine had started was lost. Requests without any token can continue on the next engine."""


class FormatterFailed(ServingError):
    """A function of the user's model.py failed. `detail` is its exception, which may contain text from the client."""

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
    """The server is overloaded, and the client may retry soon.

    Args:
        retry_after: number of seconds until the client may retry, or 0 if unknown.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.retry_after = retry_after


class BadRequest(_OfTheClient):
    """The request is refused before its body is read, or for a reason that is not in its body.

    Args:
        field: the field of a call about adapters that the message is about, or "". The message follows its name.
    """

    def __init__(self, message: str, *, field: str = "", detail: str = "") -> None:
        super().__init__(field + message, detail=detail)
        self._field, self._rest = field, message

    def renamed(self, names: Mapping[str, str]) -> BadRequest:
        """Return the error with the name that another dialect has for its field."""
        if self._field not in names:
            return self
        return type(self)(self._rest, field=names[self._field], detail=self.detail)


class InvalidSession(BadRequest):
    """A session does not exist, or a call to open or close it is invalid. AWS's handlers use the same status."""


class Unauthorized(BadRequest):
    status = 401
    kind = "authentication"
    type = "UnauthorizedException"


class NotFound(BadRequest):
    status = 404


class ModelNotFound(NotFound):
    """The request names a model that is not served here.

    Args:
        name: the model name in the request. A long name is shortened.
        version: the model version in the request.
        served: names of the models that are served. The message lists the first 16 of them, without paths on this
            machine.

    Attributes:
        served: end of the message with the list of these names, or "" if there are none.
    """

    type = "ModelNotFoundException"

    _MOST = 16  # names listed in the message
    _MOST_CHARACTERS = 200  # of each name

    def __init__(self, name: str, version: str = "", served: Iterable[str] = ()) -> None:
        names = [model for model in dict.fromkeys(served) if model != "*" and not model.startswith("/")]
        name = name[: self._MOST_CHARACTERS]
        some = [
            *(model[: self._MOST_CHARACTERS] for model in names[: self._MOST]),
            *(["..."] if len(names) > self._MOST else []),
        ]
        self.name, self.version, self.served = name, version, f"; served here: {', '.join(some)}" if some else ""
        super().__init__(f"Model not found: {name}{self.served}")


class RouteNotFound(NotFound):
    type = "ResourceNotFoundException"


class NotKept(NotFound):
    """A stored response, or an item of a stored response, does not exist here or has expired.

    Args:
        param: request field with the id of the response or item, or "" if the id is in the path.
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


class UpgradeRequired(BadRequest):
    """The route is only for WebSockets, or does not accept them."""

    status = 426


class Conflict(BadRequest):
    status = 409


class ConversationLocked(Conflict):
    """Another response in the same conversation is in progress. OpenAI's API has the same message."""

    def __init__(self) -> None:
        super().__init__("Another process is currently operating on this conversation. Please retry in a few seconds.")


class NoRoom(BadRequest):
    status = 507


class AdapterFailed(BadRequest):
    status = 424


class InternalError(ServingError):
    status = 500
    type = "InternalServerException"

    @classmethod
    def of(cls, bug: BaseException) -> InternalError:
        """Return the error that a client gets for a bug. It contains only the exception class. The log has the rest."""
        return cls(f"internal error: {type(bug).__name__}")


def serving_error(error: BaseException) -> ServingError:
    """Return a ServingError unchanged. Log any other exception, and return an InternalError for it."""
    if isinstance(error, ServingError):
        return error
    log.error("internal error (this is a bug)", exc_info=error)
    return InternalError.of(error)


# -- messages of other programs, cleaned for clients and for the log: exceptions, and responses of other servers -------


_MOST_READ = 4_096  # characters that are examined
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
    rf"|{TOKENS}"  # last, because the patterns above mask longer words
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
    (re.compile(r"\b(?:[0-9]{1,3}\.){3}[0-9]{1,3}\b(?::[0-9]{1,5})?"), "[address]"),
    (re.compile(r"\[[0-9a-fA-F]{0,4}(?::[0-9a-fA-F.]{0,15}){2,7}(?:%\w{1,15})?\](?::[0-9]{1,5})?"), "[address]"),
    (re.compile(r"\b(?:localhost|[a-zA-Z0-9-]{1,63}(?:\.[a-zA-Z0-9-]{1,63}){1,8}):[0-9]{2,5}\b"), "[address]"),
    (re.compile(r"\b(?:[a-zA-Z0-9-]{1,63}\.){1,8}(?:internal|local|svc|lan|amazonaws\.com)\b"), "[address]"),
    (re.compile(r"(?<![\w#.:/])[~.]{0,2}/[\w.+@%=-]+(?:/[\w.+@%=-]+)+/?"), "[path]"),
    (re.compile(r"(?<![\w#.:/])/[\w.+@%=-]+\.[a-zA-Z]\w{0,9}\b"), "[path]"),
    (re.compile(r"\b[A-Z]:\\[^\s'\"]+"), "[path]"),
    (re.compile(r"(?:, )?\bline [0-9]+, in \w+"), ""),
)


def client_words(text: str, secrets: Iterable[str] = ()) -> str:
    """Return the part of a message from another program that a client may see, or "" if nothing is left.

    The result is one line of limited length without keys, addresses, paths, HTML and names of Python objects.

    Args:
        secrets: keys and names to mask, in addition to everything that looks like a key.
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
    """Return a message from another program for the log, as one line of at most 1,000 characters with masked keys."""
    return _cut(mask_keys(text, secrets)[:_MOST_READ], _MOST_FOR_LOG)


def mask_keys(text: str, secrets: Iterable[str] = ()) -> str:
    """Mask `secrets` and everything that looks like a key, and cut the text after 16,384 characters."""
    for secret in secrets:
        if len(secret) >= _SHORTEST_KEY:
            for form in {secret, quote(secret, safe="")}:
                text = text.replace(form, _KEY)
    return _CREDENTIALS.sub("***@", _KEYS.sub(_KEY, text[: 4 * _MOST_READ]))


def error_text(error: BaseException) -> str:
    """Return the first 500 characters of an exception from user code. Its `__str__` method may itself raise."""
    return str(traceback.TracebackException(type(error), error, None))[:500].encode(errors="replace").decode()


def _cut(text: str, most: int) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
