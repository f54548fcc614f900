"""Every error that a client or an operator can meet; any other exception is a bug.

    Exception
    ├── ConfigError                 the start is refused: a wrong option, a missing package, a model that cannot load
    └── ServingError                one request fails; carries its HTTP status
        ├── InvalidPayload   424    the body is not what the schema asks for (seed 004, Error Responses)
        │   └── NotJson             it is not JSON at all
        ├── InvalidParameter 424    a generation parameter has a wrong type, range or is not supported by the engine
        ├── TooLong          424    more tokens than the model takes
        │   ├── PromptTooLong       the prompt leaves no token to answer with
        │   └── AnswerTooLong       prompt and answer together
        ├── UnsupportedMedia 415    a content type that no schema reads
        ├── TooSlow          408    the body did not arrive in time
        ├── TooLarge         413    the body exceeds max_request_size
        ├── GenerationFailed 424    the engine raised, hung or died while it worked on the request
        ├── FormatterFailed  424    a function of the user's model.py raised, or returned what cannot be used
        ├── InternalError    500    a bug of ours, caught at the edge so that it ends one request only
        ├── BadRequest       400    a call about adapters that makes no sense, or where there are none
        ├── NotFound         404    a call about an adapter that is not there
        │   └── ModelNotFound       a request for a model that is not served here
        ├── Unauthorized     401    no key, or a wrong one, where the server was started with keys
        ├── MethodNotAllowed 405    a route that is there, but not for this method
        ├── Conflict         409    a call about an adapter that is there already, or is changing
        ├── NoRoom           507    one adapter more than the server may have
        ├── AdapterFailed    424    an adapter that cannot be used, or that the engine could not load
        └── Unavailable      503    not accepted: the engine is down, the server is stopping
            └── Overloaded          there is more to do than the queue holds, or than is done in time

424 is what LMI answers for handler failures (seed 004; contract djl.md, section 2); the statuses of calls about
adapters are those of DJL Serving's adapter API. Other dialects have statuses of their own for the same errors.
"""

from __future__ import annotations

import logging
import re

log = logging.getLogger("handler")


class ConfigError(Exception):
    """The start is refused; the message says what to change."""


class ServingError(Exception):
    """One request fails. `status` is its HTTP status, `kind` TGI's `error_type`, `type` DJL's exception name."""

    status = 424
    kind = "generation"
    type = "TranslateException"

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else self.type

    @property
    def public(self) -> str:
        """What of the message may stand in a log, which must not hold the client's own text."""
        return self.message


class InvalidPayload(ServingError):
    kind = "validation"
    type = "BadRequestException"


class InvalidParameter(ServingError):
    """The message begins with `NAME=VALUE`, as the client names it: `parameters.top_p=2`."""

    kind = "validation"
    type = "BadRequestException"

    @property
    def public(self) -> str:
        return f"{re.split('[=:]', self.message, maxsplit=1)[0]} was refused"


class NotJson(InvalidPayload):
    """Empty, not UTF-8, or not one JSON document."""


class TooLong(ServingError):
    """More tokens than the model takes."""

    kind = "validation"
    type = "BadRequestException"


class PromptTooLong(TooLong):
    """Attributes: `name` is what the client calls it, with `num_prompt` tokens of at most `most`.

    Where it was not counted to its end, `num_prompt` are the least that it can have; `given` says it in words.
    """

    def __init__(self, name: str, num_prompt: int, most: int, *, exact: bool = True) -> None:
        given = f"{num_prompt}" if exact else f"at least {num_prompt}"
        super().__init__(f"'{name}' has {given} tokens; the model takes at most {most}")
        self.name, self.num_prompt, self.given, self.most, self._exact = name, num_prompt, given, most, exact

    def named(self, name: str) -> PromptTooLong:
        """The same of what another dialect calls it."""
        return PromptTooLong(name, self.num_prompt, self.most, exact=self._exact)


class AnswerTooLong(TooLong):
    """Attributes: `num_prompt` tokens and `wanted` new ones, of at most `most` together."""

    def __init__(self, name: str, num_prompt: int, wanted: int, most: int) -> None:
        super().__init__(
            f"{name}={wanted}: with {num_prompt} prompt tokens it must be at most {most - num_prompt}, as the model "
            f"takes {most} in all"
        )
        self.num_prompt, self.wanted, self.most = num_prompt, wanted, most


class UnsupportedMedia(ServingError):
    status = 415
    kind = "validation"
    type = "UnsupportedMediaTypeException"


class TooSlow(ServingError):
    status = 408
    kind = "validation"
    type = "RequestTimeoutException"


class TooLarge(ServingError):
    status = 413
    kind = "validation"
    type = "RequestEntityTooLargeException"


class GenerationFailed(ServingError):
    type = "EngineException"


class FormatterFailed(ServingError):
    """`detail` is what the user's exception said, which may hold the client's text."""

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
    """The client may come again soon."""


class BadRequest(ServingError):
    status = 400
    kind = "validation"
    type = "BadRequestException"


class Unauthorized(BadRequest):
    status = 401
    kind = "authentication"
    type = "UnauthorizedException"


class NotFound(BadRequest):
    status = 404


class ModelNotFound(NotFound):
    type = "ModelNotFoundException"

    def __init__(self, name: str, version: str = "") -> None:
        super().__init__(f"Model not found: {name}")
        self.name, self.version = name, version


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
        """What a client is told of a bug; the log has the rest."""
        return cls(f"internal error: {type(bug).__name__}")


def serving_error(error: BaseException) -> ServingError:
    """The error itself; of a bug, which the log gets whole, what a client is told."""
    if isinstance(error, ServingError):
        return error
    log.error("a bug", exc_info=error)
    return InternalError.of(error)
