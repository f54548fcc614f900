"""The parts of a decision that System One and OpenAI's API share: the template, the requests, and the reply."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from handler.core.values import Delta
from handler.protocols.assistant.template import READERS
from handler.protocols.decisions.formulas import Reading, read
from handler.protocols.decisions.prompts import PROMPT_VERSIONS
from handler.protocols.decisions.requests import State, engine_requests, template_without_thinking
from handler.protocols.decisions.values import Question
from handler.protocols.kernel.body import value_size
from handler.protocols.kernel.context import RequestContext, ServerContext
from handler.protocols.kernel.dialect import ParsedRequest
from handler.protocols.kernel.parameters import PARAMETERS, Parameter, Table, read_all, unsupported
from handler.protocols.kernel.readers import integer
from handler.protocols.kernel.reply import LONG_TEXT, VectorReply
from handler.protocols.openai.request import OpenAiDialect

TABLE = Table(
    {
        "cache_salt": PARAMETERS["cache_salt"],
        "priority": PARAMETERS["priority"],
        "chat_template_kwargs": Parameter("chat_template_kwargs", READERS["chat_template_kwargs"]),
        "stream": unsupported("a decision is one document", False),
        "prompt_format_version": Parameter("prompt_format_version", integer(PROMPT_VERSIONS[0], PROMPT_VERSIONS[-1])),
        "temperature": unsupported("probabilities are those of temperature 1", 1),
    }
)
"""The parameters that are read in both APIs, although only vLLM's System One has the first three. The name of
`prompt_format_version` is SGLang's."""

_PROMPT_MEMORY = 10  # bytes of a prompt for each of its characters: as text, and as ids of 36 bytes (measured)
_MANY = 1 << 12  # options, which take some milliseconds


class Counts(NamedTuple):
    """The number of tokens of all prompts, and of those in the engine's cache."""

    prompt: int
    cached: int


class DecisionReply(VectorReply):
    """Writes the decisions on all questions.

    Args:
        questions: the questions, one for each request.
        render: builds the document from the readings of all questions.
    """

    def __init__(self, questions: Sequence[Question], render: Callable[[Sequence[Reading], Counts], Any]) -> None:
        super().__init__(len(questions), self._rendered, read)
        self._write = render
        self._num_cached = 0
        self._num_options = sum(len(question.options) for question in questions)
        self.num_repeated = sum(len(option.name) for question in questions for option in question.options)

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.extras is not None:
            self._num_cached += delta.extras.num_cached_tokens or 0
        return super().feed(index, delta)

    def takes_long(self, delta: Delta) -> bool:
        ends = delta.finish is not None and self._unfinished == 1
        return ends and (self._num_options > _MANY or self.num_repeated > LONG_TEXT)

    def _rendered(self, readings: Sequence[Reading], num_tokens: int) -> Any:
        return self._write(readings, Counts(num_tokens, self._num_cached))


class DecisionDialect(OpenAiDialect):
    """Base class of the dialects for decisions."""

    table = TABLE

    def read(self, body: Mapping[str, Any], context: ServerContext, request_context: RequestContext) -> ParsedRequest:
        model, adapter = self.read_model(body, context, request_context)
        parameters = read_all(body, context, defaults={}, table=self.table)
        unknown: dict[str, None] = {}
        state = self.read_state(body, context, unknown)
        questions = self.read_questions(body, context, unknown)
        template, unread = template_without_thinking(parameters.others, context)
        fields = {
            "sampling": parameters.sampling,
            "adapter": adapter,
            "priority": parameters.others.get("priority", 0),
        }
        version = parameters.others.get("prompt_format_version", PROMPT_VERSIONS[0])
        requests = engine_requests(state, questions, template, context, version, **fields)
        ignored = self.ignored(body, context, *unknown, *unread)
        parsed = self.respond(requests, questions, model)
        sizes = [sum(value_size(message["content"]) for message in request.messages) for request in requests]
        repeated = sum(sizes) - sizes[0]  # the first prompt needs no more memory than a chat
        return parsed._replace(ignored=ignored, num_repeated=sizes[0] + _PROMPT_MEMORY * repeated)

    @abstractmethod
    def read_state(self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]) -> State:
        """Read what the questions are about.

        Args:
            unknown: receives the paths of names that have no effect.
        """

    @abstractmethod
    def read_questions(
        self, body: Mapping[str, Any], context: ServerContext, unknown: dict[str, None]
    ) -> list[Question]:
        """Read the questions in their order."""

    @abstractmethod
    def respond(self, requests: Sequence[Any], questions: Sequence[Question], model: str) -> ParsedRequest:
        """Return the parsed request with its reply.

        Args:
            model: the name of the model in the response.
        """
