"""Records what vLLM's own parsers make of the answers in vLLM's own tests, without vLLM's dependencies.

A plugin of pytest, which ../fetch.py runs on the unpacked distribution. The tests run on stubs of what the parsers
import, with a tokenizer of words and marks. Only the texts that they give to parsers count, not whether they pass. Each
text is then given to a new parser of the same class, whole.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import pydantic
import pytest

OWN = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser", "tests")
"""Packages that are vLLM's own: of all others in it there are stubs."""

STUBS = (
    "vllm",
    "torch",
    "xgrammar",
    "mistral_common",
    "openai_harmony",
    "ijson",
    "transformers",
    "openai",
)


# -- stubs ------------------------------------------------------------------------------------------------------------


class AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnyName):
    """A value that takes every use."""

    def __init__(self, *args: Any, **values: Any) -> None:
        self.__dict__.update(values)

    def __init_subclass__(cls, **values: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **values: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


class Stub(types.ModuleType):
    """A package that has every name, as a class."""

    __path__: MutableSequence[str] = []  # noqa: RUF012  # as ModuleType declares it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in STUBS or name.startswith(OWN):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = Stub(spec.name)
        for name, value in KNOWN.get(spec.name, {}).items():
            setattr(module, name, value)
        if spec.name == "vllm":
            module.__path__ = [os.path.join(os.getcwd(), "vllm")]
        return module

    def exec_module(self, module: Any) -> None:
        pass


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", arbitrary_types_allowed=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattr__(name)  # type: ignore[misc]
        return (self.__pydantic_extra__ or {}).get(name)


class FunctionDefinition(Model):
    name: str
    parameters: dict[str, Any] | None = None


class ToolParam(Model):
    type: str = "function"
    function: FunctionDefinition


class FunctionTool(Model):
    name: str
    parameters: dict[str, Any] | None = None
    type: str = "function"


class FunctionCall(Model):
    name: str
    arguments: str


class ToolCall(Model):
    id: str = "call"
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(Model):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(Model):
    id: str | None = None
    type: str | None = None
    index: int = 0
    function: DeltaFunctionCall | None = None


class DeltaMessage(Model):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = []


class Extracted(Model):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class ChatRequest(Model):
    messages: list[Any] = []
    model: str = "model"
    tools: list[ToolParam] | None = None
    tool_choice: Any = None
    skip_special_tokens: bool = True
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    _grammar_from_parser: bool = False


class ResponsesRequest(Model):
    tools: list[Any] = []


class Vocabulary(dict[str, int]):
    """Each text that somebody asks for has an id."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self) + 256
        return self[text]

    def get(self, text: str, default: Any = None) -> Any:
        return self[text]

    def __init__(self, lacks: Sequence[str] = ()) -> None:
        super().__init__()
        self._lacks = lacks

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and text not in self._lacks


class Tokenizer:
    """Marks and words as tokens."""

    bos_token_id, eos_token_id, pad_token_id = 0, 1, 2
    all_special_tokens: Sequence[str] = ()
    all_special_ids: Sequence[int] = ()
    init_kwargs: Mapping[str, Any] = {}
    _parts = re.compile(r"<[^<>\s]{1,48}>|\[/?[A-Z_]{3,}\]|\s*\w+|.", re.S)

    def __init__(self, lacks: Sequence[str] = ()) -> None:
        self.vocab = Vocabulary(lacks)

    def get_vocab(self) -> Vocabulary:
        return self.vocab

    def get_added_vocab(self) -> dict[str, int]:
        return self.vocab

    def tokenize(self, text: str, **options: Any) -> list[str]:
        return self._parts.findall(text)

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        return [self.vocab[part] for part in self.tokenize(text)]

    def __call__(self, text: str, **options: Any) -> Any:
        return {"input_ids": self.encode(text)}

    def add_tokens(self, *args: Any, **options: Any) -> int:
        return 0

    def decode(self, ids: Any, **options: Any) -> str:
        texts = {id: text for text, id in self.vocab.items()}
        return "".join(texts.get(id, "") for id in ([ids] if isinstance(ids, int) else ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self.vocab[tokens] if isinstance(tokens, str) else [self.vocab[token] for token in tokens]

    def convert_ids_to_tokens(self, ids: Sequence[int], **options: Any) -> list[str]:
        return [self.decode([id]) for id in ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)


class AutoTokenizer:
    @staticmethod
    def from_pretrained(*args: Any, **options: Any) -> Tokenizer:
        return Tokenizer()


class MistralTokenizer(Tokenizer):
    """A tokenizer that is also the two within mistral_common's."""

    version = 13

    @property
    def tokenizer(self) -> MistralTokenizer:
        return self

    @property
    def instruct(self) -> MistralTokenizer:
        return self

    @property
    def BEGIN_THINK(self) -> int:
        return self.vocab["[THINK]"]

    @property
    def END_THINK(self) -> int:
        return self.vocab["[/THINK]"]

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> MistralTokenizer:
        return cls()


def is_list_of(value: Any, kind: Any, **options: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


class Log(logging.LoggerAdapter):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        return Anything()


_PROTOCOL = {
    "FunctionCall": FunctionCall, "ToolCall": ToolCall, "DeltaFunctionCall": DeltaFunctionCall,
    "DeltaToolCall": DeltaToolCall, "DeltaMessage": DeltaMessage, "ExtractedToolCallInformation": Extracted,
    "FunctionDefinition": FunctionDefinition,
}  # fmt: skip


def _detokenize(
    tokenizer: Any, all_input_ids: Any, prev_tokens: Any, prefix_offset: int, read_offset: int, **_: Any
) -> Any:
    tokens = tokenizer.convert_ids_to_tokens(all_input_ids[-1:] if prev_tokens else all_input_ids)
    return tokens, tokens[-1], read_offset, read_offset + 1


class Special:
    """The names of Mistral's marks."""

    def __init__(self, value: str) -> None:
        self.value = value


class SpecialTokens:
    tool_calls, args, call_id = Special("[TOOL_CALLS]"), Special("[ARGS]"), Special("[CALL_ID]")
    begin_think, end_think = Special("[THINK]"), Special("[/THINK]")


class ValidationError(ValueError):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args)


_TOKENIZER = {"get_tokenizer": AutoTokenizer.from_pretrained, "TokenizerLike": Tokenizer}

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "vllm.entrypoints.generate.base.protocol": _PROTOCOL,
    "vllm.entrypoints.openai.chat_completion.protocol": {
        **_PROTOCOL, "ChatCompletionRequest": ChatRequest, "ChatCompletionToolsParam": ToolParam,
    },
    "vllm.entrypoints.openai.responses.protocol": {"ResponsesRequest": ResponsesRequest},
    "openai.types.responses.function_tool": {"FunctionTool": FunctionTool},
    "openai.types.responses": {"FunctionTool": FunctionTool},
    "vllm.logger": {"init_logger": lambda name: Log(logging.getLogger(name), {})},
    "vllm.envs": {"VLLM_ENFORCE_STRICT_TOOL_CALLING": False, "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": 5},
    "vllm.tokenizers": _TOKENIZER,
    "vllm.tokenizers.detokenizer_utils": {"detokenize_incrementally": _detokenize},
    "vllm.tokenizers.mistral": {"MistralTokenizer": MistralTokenizer},
    "mistral_common.tokens.tokenizers.base": {"SpecialTokens": SpecialTokens},
    "vllm.tokenizers.registry": _TOKENIZER,
    "vllm.exceptions": {"VLLMValidationError": ValidationError},
    "vllm.renderers.chat_utils": {"make_tool_call_id": lambda *args, **options: "call"},
    "vllm.utils": {"random_uuid": lambda: "id"},
    "vllm.utils.collection_utils": {"is_list_of": is_list_of},
    "vllm.utils.mistral": {"is_mistral_tokenizer": lambda tokenizer: isinstance(tokenizer, MistralTokenizer)},
    "transformers": {"AutoTokenizer": AutoTokenizer, "PreTrainedTokenizerBase": Tokenizer},
}  # fmt: skip

sys.meta_path.insert(0, Stubs())


# -- recording --------------------------------------------------------------------------------------------------------

METHODS = {
    "extract_tool_calls": 0, "extract_tool_calls_streaming": 1, "extract_reasoning": 0,
    "extract_reasoning_streaming": 1, "parse": 0,
}  # fmt: skip
"""Methods of parsers that get texts -> the place of the text so far."""


class Recorder:
    """Collects texts by parser class and tools; the last of growing ones."""

    def __init__(self) -> None:
        self.texts: dict[tuple[type, str], dict[str, None]] = {}
        self.last: dict[int, tuple[Any, str, Any]] = {}
        self.depth = 0

    def note(self, parser: Any, text: Any, request: Any) -> None:
        if not isinstance(text, str):
            return
        tools = getattr(parser, "tools", None) or getattr(request, "tools", None) or []
        self.texts.setdefault((type(parser), _tools(tools)), {})[text] = None

    def wrap(self, cls: Any) -> None:
        for name, place in METHODS.items():
            if name in cls.__dict__ and not hasattr(cls.__dict__[name], "recorded"):
                setattr(cls, name, self._recorded(cls.__dict__[name], place))
        if "parse_delta" in cls.__dict__ and not hasattr(cls.__dict__["parse_delta"], "recorded"):
            cls.parse_delta = self._growing(cls.__dict__["parse_delta"])

    def _recorded(self, method: Any, place: int) -> Any:
        def take(parser: Any, args: Any, options: Any) -> None:
            text = args[place] if len(args) > place else options.get("model_output") or options.get("current_text")
            request = options.get("request") or (args[-1] if args else None)
            if place:
                self.last[id(parser)] = (parser, text, request)
            else:
                self.note(parser, text, request)

        return self._outermost(method, take)

    def _growing(self, method: Any) -> Any:
        def take(parser: Any, args: Any, options: Any) -> None:
            text = args[0] if args else options.get("delta_text")
            before = self.last[id(parser)][1] if id(parser) in self.last else ""
            request = options.get("request") or next((arg for arg in args if hasattr(arg, "tools")), None)
            if isinstance(text, str):
                self.last[id(parser)] = (parser, before + text, request)

        return self._outermost(method, take)

    def _outermost(self, method: Any, take: Callable[[Any, Any, Any], None]) -> Any:
        """Return a method that gives `take` its arguments, where no other recorded method called it."""

        def recorded(parser: Any, *args: Any, **options: Any) -> Any:
            if not self.depth:
                take(parser, args, options)
            self.depth += 1
            try:
                return method(parser, *args, **options)
            finally:
                self.depth -= 1

        recorded.recorded = True  # type: ignore[attr-defined]
        return recorded

    def settle(self) -> None:
        for parser, text, request in self.last.values():
            self.note(parser, text, request)
        self.last.clear()


def _tools(tools: Any) -> str:
    """Return tools as the JSON of OpenAI's form."""
    found = []
    for tool in tools if isinstance(tools, list | tuple) else ():
        value = tool.model_dump() if hasattr(tool, "model_dump") else tool
        function = value.get("function", value) if isinstance(value, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters") or {"type": "object", "properties": {}}
            found.append({"type": "function", "function": {"name": function["name"], "parameters": parameters}})
    return json.dumps(found, sort_keys=True)


def _all(cls: type) -> Iterator[type]:
    sub: type
    for sub in cls.__subclasses__():
        yield sub
        yield from _all(sub)


RECORDER = Recorder()


def _bases() -> tuple[Any, Any, Any]:
    from vllm.parser.abstract_parser import Parser
    from vllm.reasoning import ReasoningParser
    from vllm.tool_parsers import ToolParser

    return ToolParser, ReasoningParser, Parser


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    for base in _bases():
        for cls in (base, *_all(base)):
            RECORDER.wrap(cls)


def pytest_runtest_teardown(item: Any) -> None:
    RECORDER.settle()


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    RECORDER.depth = 1
    with open(os.environ["RECORDED"], "w") as file:
        for case in _cases():
            file.write(json.dumps(case) + "\n")


# -- what vLLM makes of them ------------------------------------------------------------------------------------------


def _cases() -> Iterator[dict[str, Any]]:
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER as families
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER as formats
    from vllm.tool_parsers import ToolParserManager

    registered = {
        "tools": _classes(formats, ToolParserManager.get_tool_parser),
        "reasoning": _classes(families, ReasoningParserManager.get_reasoning_parser),
    }
    yield {kind: _same(found) for kind, found in registered.items()}
    engines: dict[Any, list[str]] = {}
    for kind in ("reasoning", "tools"):
        for cls, names in _by_class(registered[kind]).items():
            if (engine := getattr(cls, "_parser_engine_cls", None)) is not None:
                engines.setdefault(engine, []).append(f"{kind}:{names[0]}")
    seen = set()
    for (used, tools), texts in RECORDER.texts.items():
        users = [(kind, name, cls) for kind in registered for name, cls in _serving(registered[kind], used)]
        users += _composed(registered, used)
        if used in engines and len(engines[used]) > 1:  # it reads both at once
            users = [("both", " ".join(name.split(":")[1] for name in engines[used][:2]), used)]
        for text in texts:
            for kind, name, cls in users:
                if (kind, name, tools, text) not in seen:
                    seen.add((kind, name, tools, text))
                    case = {"kind": kind, "name": name, "tools": json.loads(tools), "text": text}
                    yield {**case, **_expected(cls, case)}


def _by_class(names: Mapping[str, type]) -> dict[type, list[str]]:
    found: dict[type, list[str]] = {}
    for name, cls in names.items():
        found.setdefault(cls, []).append(name)
    return found


def _same(names: Mapping[str, type]) -> list[list[str]]:
    """Group names of one class: those that our table may call aliases."""
    return list(_by_class(names).values())


def _classes(names: Any, find: Any) -> dict[str, type]:
    found = {}
    for name in names:
        try:
            found[name] = find(name)
        except Exception as error:
            print("no parser", name, repr(error), file=sys.stderr)
    return found


def _serving(names: Mapping[str, type], used: Any) -> list[tuple[str, type]]:
    return [(names[0], cls) for cls, names in _by_class(names).items() if _serves(cls, used)]


def _composed(registered: Mapping[str, Mapping[str, type]], used: Any) -> list[tuple[str, str, Any]]:
    """Return the registered parsers that a class puts together; none where one of them is a test's own."""
    parts = {"reasoning": getattr(used, "reasoning_parser_cls", None), "tools": getattr(used, "tool_parser_cls", None)}
    found = {kind: _serving(registered[kind], part)[:1] for kind, part in parts.items() if part is not None}
    if not all(found.values()):
        return []
    if len(found) == 2:
        return [("both", " ".join(name for one in found.values() for name, _ in one), used)]
    return [(kind, name, cls) for kind, one in found.items() for name, cls in one]


def _serves(registered: type, used: type) -> bool:
    """Whether a registered class is the used one, or an adapter of that parser."""
    engine = getattr(registered, "_parser_engine_cls", None)
    return registered is used or engine is used or (
        engine is not None and engine is getattr(used, "_parser_engine_cls", None)
        and issubclass(used, tuple(registered.__mro__[-3:-2]))
    )  # fmt: skip


def _expected(cls: Any, case: Mapping[str, Any]) -> dict[str, Any]:
    params = [ToolParam(**tool) for tool in case["tools"]]
    request = ChatRequest(tools=params or None, tool_choice="auto")
    # By this mark vLLM knows Mistral's tokenizers from 11 on, whose calls are no list.
    tokenizer = Tokenizer(["[ARGS]"] if re.search(r"\[TOOL_CALLS\]\s*\[*[\[{]", case["text"]) else [])
    thought: Any = ""
    calls: Any = ()
    try:
        if case["kind"] == "tools":
            found = cls(tokenizer, params).extract_tool_calls(case["text"], request)
            content, calls = found.content, [call.function for call in found.tool_calls]
        elif case["kind"] == "reasoning":
            thought, content = cls(tokenizer).extract_reasoning(case["text"], request)
        else:
            thought, content, calls = cls(tokenizer, params).parse(case["text"], request, enable_auto_tools=True)
            calls = calls or ()
    except Exception as error:
        return {"error": repr(error)[:200]}
    return {"reasoning": thought or "", "content": content or "", "calls": [[one.name, one.arguments] for one in calls]}
