"""Parameters: the tables of docs/wire/, values that ask for nothing, and what is kept of them."""

from __future__ import annotations

import contextlib
import re
from collections import namedtuple
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from handler import engines
from handler.config.engines import ENGINES
from handler.config.loader import read_config
from handler.core.errors import InvalidParameter, ServingError
from handler.core.text import Vocabulary
from handler.core.values import BY_HANDLER, Adapter, Sampling
from handler.engines.base import Capabilities, EngineConfig
from handler.engines.openai.kinds import KINDS
from handler.protocols.kernel import parameters, tensors
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.dialect import Dialect
from handler.protocols.kernel.parameters import (
    LMI,
    PARAMETERS,
    REQUEST_FIELDS,
    ROWS,
    Parameter,
    ParsedParameters,
    read_all,
)
from handler.protocols.kernel.readers import number
from handler.protocols.lmi.chat import TABLE as CHAT_TABLE
from handler.protocols.lmi.request import TABLE as LMI_TABLE
from handler.protocols.openai import request as openai_parameters
from handler.protocols.openai.completions import OpenAiEmbeddings
from handler.protocols.openai.request import HARMLESS
from handler.protocols.registry import INVOCATIONS, ROOTS, ROUTES
from handler.protocols.rerank import request as rerank
from handler.protocols.tei import request as tei
from handler.protocols.tgi import mindie
from handler.protocols.tgi import native as tgi_request
from handler.protocols.triton.request import INPUTS, Route, Triton
from tests import parameter_matrix as matrix
from tests.doubles import using
from tests.one_test import in_one_test
from tests.parameter_matrix import (
    CHAT_VALUES,
    MINDIE_VALUES,
    TENSOR_VALUES,
    TGI_VALUES,
    VALUES,
    section,
    table,
)
from tests.unit.protocols.answers import CAPABLE, DIALECTS, with_options

# -- the parameter tables of docs/wire/: every cell of every engine is what its capabilities make of a request ---------


LORA = {"option.enable_lora": "true"}
TRTLLM = {**LORA, "option.gather_generation_logits": "true"}
SETTINGS: dict[str, tuple[str, str, dict[str, str]]] = {
    "echo": ("echo", "", {}),
    "echo with adapters": ("echo", "", LORA),
    "openvino": ("openvino", "", {}),
    "vllm": ("vllm", "", {}),
    "vllm with adapters": ("vllm", "", LORA),
    "trtllm 1.0": ("trtllm", "1.0.0", {}),
    "trtllm 1.1": ("trtllm", "1.1.0", {}),
    "trtllm 1.2 with beams": (
        "trtllm",
        "1.2.1",
        {**TRTLLM, "option.max_beam_width": "3", "option.sampler_type": "TRTLLMSampler"},
    ),
    "trtllm 1.3": ("trtllm", "1.3.0", {**TRTLLM, "option.guided_decoding_backend": "xgrammar"}),
}
"""Engine, the version of its double, and options."""

VOCABULARY = Vocabulary([b"%d" % number for number in range(10)])
PARAMETERS_DIALECTS: dict[str, tuple[Dialect, matrix.Values]] = {
    matrix.PARAMETERS: (INVOCATIONS["lmi"], matrix.VALUES),
    matrix.TENSORS: (INVOCATIONS["lmi"], matrix.TENSOR_VALUES),
    matrix.CHAT: (INVOCATIONS["lmi"], matrix.CHAT_VALUES),
    matrix.TGI: (ROOTS["tgi"], matrix.TGI_VALUES),
    matrix.MINDIE: (ROOTS["mindie"], matrix.MINDIE_VALUES),
}


class Registered:
    """Every name and number is an adapter's."""

    def find(self, name: str) -> Adapter:
        return Adapter(name, 1, "/nowhere")

    def by_number(self, number: int) -> Adapter:
        return Adapter("mine", number, "/nowhere")

    def names(self) -> list[str]:
        return []


def capabilities(engine: str, options: Mapping[str, str]) -> Capabilities:
    given = [f"option.llm_engine={engine}", *(f"{key}={value}" for key, value in options.items())]
    config = read_config(overrides=given, environ={}).checked()
    able: Capabilities = engines.module(engine).capabilities(EngineConfig(config))
    return able


def context(engine: str, options: Mapping[str, str]) -> ServerContext:
    """Without the engine itself, which need not be installed."""
    able = capabilities(engine, options)
    return ServerContext(
        engine=engine,
        unsupported=able.unsupported,
        limits=able.limits,
        no_adapters=able.no_adapters,
        sampling_defaults=able.sampling_defaults,
        adapters=Registered(),
        vocabulary=None if engine == "echo" else VOCABULARY,  # each of echo's prompts brings its own
    )


def body(heading: str, name: str) -> dict[str, Any]:
    value, beside = PARAMETERS_DIALECTS[heading][1][name]
    if heading == matrix.CHAT:
        return {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4, **beside, name: value}
    if name == "embedding_bias":
        value = [[*value[0], *[0.0] * (len(VOCABULARY.pieces) - 1)]]
    asked: dict[str, Any] = {"inputs": "a b c", "parameters": {"max_new_tokens": 2, **beside, name: value}}
    if name == "request_output_len":
        del asked["parameters"]["max_new_tokens"]
    if name == "input_ids":
        del asked["inputs"]
    return asked


def outcome(heading: str, name: str, server: ServerContext) -> str:
    """What becomes of it: refused by name, reported as ignored, or accepted; else a message that names another."""
    try:
        parsed = PARAMETERS_DIALECTS[heading][0].parse(body(heading, name), server)
    except ServingError as error:
        message = str(error)
        named = (name, *PARAMETERS_DIALECTS[heading][1][name][1])  # beams themselves, where there are none
        return "refused" if any(f"{one}=" in message for one in named) else message
    return "ignored" if any(one.rpartition(".")[2] == name for one in parsed.ignored) else "accepted"


@in_one_test("heading", PARAMETERS_DIALECTS)
@in_one_test("setting", SETTINGS)
def test_every_cell_is_true(setting: str, heading: str) -> None:
    engine, version, options = SETTINGS[setting]
    double = using.tensorrt_llm(f"version={version}") if version else contextlib.nullcontext()
    with double:
        server = context(engine, options)
        missing = matrix.unmet(heading, engine, version, options)
        wrong = {}
        for name in PARAMETERS_DIALECTS[heading][1]:
            wanted = matrix.expected(heading, engine, name, missing)
            found = outcome(heading, name, server)
            if found != wanted:
                wrong[name] = (wanted, found)
    assert wrong == {}


_FIELDS = [*Sampling._field_defaults.items(), ("pretended", 0.5)]


class Later(namedtuple("Later", [name for name, _ in _FIELDS], defaults=[value for _, value in _FIELDS])):  # type: ignore[misc]
    """Sampling with one field more, of which no engine knows."""

    num_sequences = Sampling.num_sequences


@pytest.mark.parametrize("setting", [*SETTINGS, *KINDS])
def test_a_field_that_no_engine_maps_is_refused_by_name(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("handler.engines.base", "handler.protocols.kernel.parameters"):
        monkeypatch.setattr(f"{place}.Sampling", Later)
    monkeypatch.setattr("handler.protocols.kernel.parameters.SAMPLING_DEFAULTS", Later._field_defaults)
    parameter = Parameter("pretended", number(0, 0.5))
    monkeypatch.setitem(LMI_TABLE.parameters, "pretended", parameter)
    servers = {"option.base_url": "http://x/v1", "option.base_url_kind": setting}
    engine, version, options = SETTINGS.get(setting, ("openai", "", servers))
    with using.tensorrt_llm(f"version={version}") if version else contextlib.nullcontext():
        server = context(engine, options)

    def parse(value: float, server: ServerContext = server, **beside: object) -> None:
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"pretended": value, **beside}}, server)

    with pytest.raises(InvalidParameter, match=r"pretended=0\.1: is not available with parameters\.num_beams > 1"):
        parse(0.1, ServerContext("any", unsupported={}), num_beams=2)
    parse(0.5)  # the neutral value
    with pytest.raises(InvalidParameter) as refused:
        parse(0.1)
    assert refused.value.message == (
        f"parameters.pretended=0.1: the engine {engine} does not support it: it has no such parameter"
    )


@in_one_test("engine", ENGINES)
def test_an_engine_names_fields_of_sampling_alone(engine: str) -> None:
    url = {"openai": "http://x/v1", "grpc": "grpc://x:1"}.get(engine)
    with using.tensorrt_llm("version=1.3.0"):
        able = capabilities(engine, {"option.base_url": url, "option.base_url_kind": "vllm"} if url else {})
    assert {*able.supports, *able.reasons, *able.limits, *BY_HANDLER} <= set(Sampling._fields)
    assert BY_HANDLER.isdisjoint({*able.supports} - {"logprobs"}), "the handler does so"


def test_too_many_beams_are_refused_by_the_clients_own_name() -> None:
    engine, version, options = SETTINGS["trtllm 1.2 with beams"]
    with using.tensorrt_llm(f"version={version}"):
        server = context(engine, options)
    asked = {"text_input": "a", "max_tokens": 2, "beam_width": 4}
    with pytest.raises(InvalidParameter, match=r"^beam_width=4: the engine trtllm accepts at most 3$"):
        Triton(Route.GENERATE).parse(asked, server)
    with pytest.raises(InvalidParameter, match=r"^parameters.num_beams=4: the engine trtllm accepts at most 3$"):
        INVOCATIONS["lmi"].parse({"inputs": "a", "parameters": {"num_beams": 4}}, server)


# -- the parameter tables of docs/wire/: no row is missing, and engines and notes are those that exist -----------------


TRITON, OPENAI = "triton.md#inputs", "openai.md#request"
EMBEDDINGS = ("../embeddings.md#openais-embeddings", "../embeddings.md#teis-routes", "../embeddings.md#rerank")


def check(rows: Collection[str], read: Collection[str], heading: str, values: Collection[str] | None = None) -> None:
    """Check that a table has a row for each name that is read, once, and that `parameter_matrix.py` has its value."""
    assert len(rows) == len(set(rows)), f"docs/wire/{heading} has a name twice: {sorted(rows)}"
    missing, left = sorted(set(read) - set(rows)), sorted(set(rows) - set(read))
    assert not missing, f"docs/wire/{heading} needs rows for {', '.join(missing)}"
    assert not left, f"docs/wire/{heading} has rows for what is not read: {', '.join(left)}"
    if values is not None:
        unlike = sorted(set(read) ^ set(values))
        assert not unlike, f"tests/parameter_matrix.py must have values of what is read, and of no other: {unlike}"


def test_every_parameter_has_its_row() -> None:
    rows, more = table(), table(matrix.TENSORS)
    check(rows, (set(PARAMETERS) | set(REQUEST_FIELDS) | {"outputs"}) - {"stream"}, matrix.PARAMETERS, VALUES)
    check(more, set(tensors.TENSORS) - set(PARAMETERS), matrix.TENSORS, TENSOR_VALUES)
    assert set(rows) | set(more) | {"stream"} == set(LMI_TABLE.parameters) | set(REQUEST_FIELDS)


def test_every_chat_parameter_has_its_row() -> None:
    """In OpenAI's table; LMI's chats have no others."""
    rows = set(table(matrix.CHAT))
    assert {*CHAT_VALUES, *effective(CHAT_TABLE.parameters)} <= rows
    assert set(CHAT_TABLE.parameters) < set(openai_parameters.CHAT.parameters) | {*HARMLESS, "model"}


def test_every_parameter_of_tgis_and_mindies_has_its_row() -> None:
    check(table(matrix.TGI), tgi_request.PARAMETERS, matrix.TGI, TGI_VALUES)
    check(table(matrix.MINDIE), mindie.KINDS, matrix.MINDIE, MINDIE_VALUES)


def test_every_input_of_triton_has_its_row_and_is_what_that_names() -> None:
    rows = table(TRITON)
    plain = {name: short for name in INPUTS if (short := name.removeprefix("sampling_param_")) in INPUTS}
    check(rows, {plain.get(name, name) for name in INPUTS if not _refuses(name)}, TRITON)
    assert all(INPUTS[name].parameter.field == INPUTS[short].parameter.field for name, short in plain.items())
    for name, row in rows.items():
        if known := row["as"].strip("`"):
            known = name if known == "the same name" else known
            assert INPUTS[name].parameter.field == LMI_TABLE.parameters[known].field, name


def effective(parameters: Mapping[str, Parameter]) -> set[str]:
    """Return the parameters that are not there only to be refused; the API's document has those too."""
    return {name for name, parameter in parameters.items() if parameter.field or not refuses(parameter)}


def test_every_field_of_openais_that_has_an_effect_has_its_row() -> None:
    found: dict[str, list[str]] = {"chat": [], "completions": []}
    for cell in re.findall(r"^\| ([^|]*`[^|]*)\|", section(OPENAI), re.MULTILINE):
        both, *others = re.split(r"\b(chat|completions): ", cell)
        for route, names in [*((route, both) for route in found), *zip(others[::2], others[1::2], strict=True)]:
            found[route] += re.findall(r"`(\w+)`", names)
    harmless = {name for names in found.values() for name in names} & HARMLESS
    assert {"user", "metadata", "store", "reasoning_effort"} <= harmless
    every = {*harmless, "model", "stream", "stream_options"}
    tools = {"tools", "tool_choice", "parallel_tool_calls"}
    own = {"chat": {*every, *tools, "messages"}, "completions": {*every, "prompt"}}
    parameters = {"chat": openai_parameters.CHAT.parameters, "completions": openai_parameters.COMPLETIONS.parameters}
    paths = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
    for route, names in found.items():
        check(names, effective(parameters[route]) | own[route], f"{OPENAI}, {route}")
        shape = ROUTES[paths[route]].description.request_shape(ServerContext(engine="echo"))
        assert shape["properties"].keys() >= parameters[route].keys()


def test_every_field_of_embeddings_and_rerank_has_its_row() -> None:
    openai, tei_routes, ranking = (
        re.findall(r"^\| (`.*?)\|(.*?)\|", section(heading), re.MULTILINE) for heading in EMBEDDINGS
    )
    fields = [name for names, _ in openai for name in re.findall(r"`(\w+)`", names)]
    of_chats = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    of_texts = effective(OpenAiEmbeddings.table.parameters) | {"input", "model", "user"}
    check(fields, of_texts | of_chats, EMBEDDINGS[0])
    fields = [name for names, _ in ranking for name in re.findall(r"`(\w+)`", names)]
    check(fields, effective(rerank.TABLE.parameters) | {"query", "documents", "model"}, EMBEDDINGS[2])
    of_route: dict[str, set[str]] = {"/embed": set(), "/similarity": set(), "/rerank": set(), "/predict": set()}
    for names, routes in tei_routes:
        for route in of_route if routes.strip() == "all" else re.findall(r"`(/\w+)`", routes):
            of_route[route] |= set(re.findall(r"`(\w+)`", names))
    assert of_route == {
        "/embed": {*tei.EMBED.parameters, "inputs"},
        "/similarity": {*tei.SIMILARITY.parameters, "inputs", "parameters"},
        "/rerank": {*tei.RERANK.parameters, "query", "texts"},
        "/predict": {*tei.PREDICT.parameters, "inputs"},
    }


def _refuses(name: str) -> bool:
    """Whether an input is there only to be refused."""
    parameter = INPUTS[name].parameter
    if parameter.field or name in ("guided_decoding_guide_type", "sampling_parameters"):  # which are joined before
        return False
    assert refuses(parameter)
    return True


def refuses(parameter: Parameter) -> bool:
    """Whether a parameter that sets no field accepts neutral values only."""
    try:
        parameter.read("x")
    except ValueError as error:
        return "is not supported" in str(error)
    except TypeError:  # it needs the context
        return False
    return False


@in_one_test("heading", [matrix.PARAMETERS, matrix.TENSORS])
def test_engines_and_notes_are_those_that_exist(heading: str) -> None:
    for name, row in table(heading).items():
        found = matrix.refusing(heading, name)
        assert found.keys() <= set(ENGINES) - {"openai", "grpc"}, name  # docs/engines-by-url.md has those of servers
        assert len(found) == len(row[matrix.REFUSED_BY].split(", ")) * bool(row[matrix.REFUSED_BY]), name


def test_every_note_is_used() -> None:
    cells = [
        row[matrix.REFUSED_BY] for heading in (matrix.PARAMETERS, matrix.TENSORS) for row in table(heading).values()
    ]
    assert {letter for cell in cells for letter in cell if not letter.isascii()} == set(matrix.notes())


# -- what `read_all` keeps of parameters changes no answer: others get what they would get first -----------------------


def read(context: ServerContext, **given: Any) -> ParsedParameters:
    return read_all(given, context, defaults={"max_new_tokens": 30}, table=LMI)


def test_the_same_numbers_are_read_once() -> None:
    context = ServerContext("echo")
    first = read(context, max_new_tokens=5, temperature=0.5)
    assert read(context, max_new_tokens=5, temperature=0.5) is first
    assert (first.sampling.max_new_tokens, first.sampling.temperature) == (5, 0.5)
    assert first.names == {"max_new_tokens": "parameters.max_new_tokens", "temperature": "parameters.temperature"}
    assert read(context, max_new_tokens=5, top_p=0.5).sampling.top_p == 0.5


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_equal_values_of_other_types_are_refused_all_the_same(wrong: Any) -> None:
    context = ServerContext("echo")
    assert read(context, max_new_tokens=1).sampling.max_new_tokens == 1
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="must be an integer"):
            read(context, max_new_tokens=wrong)


def test_another_table_default_or_limit_counts() -> None:
    context = ServerContext("echo")
    read(context, top_k=5)
    assert read_all({"top_k": 5}, context, defaults={"max_new_tokens": 9}, table=LMI).sampling.max_new_tokens == 9
    longest = read_all({"top_k": 5}, context, defaults={"max_new_tokens": 30}, table=LMI, most_new_tokens=8)
    assert longest.sampling.max_new_tokens == 8
    other = parameters.Table(LMI.parameters, "p.")
    assert read_all({"top_k": 5}, context, defaults={}, table=other).names == {"top_k": "p.top_k"}


def test_a_context_made_of_another_has_its_own() -> None:
    context = ServerContext("echo")
    read(context, top_k=5)
    without = replace(context, unsupported={"min_p": "it lacks it"})
    read(context, min_p=0.5, do_sample=True)
    with pytest.raises(InvalidParameter, match="lacks"):
        read(without, min_p=0.5, do_sample=True)


def test_texts_are_not_kept() -> None:
    context = ServerContext("echo")
    assert read(context, stop=["a"]).sampling.stop == ("a",)
    assert not context.parsed


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_MOST_PARSED", 4)
    context = ServerContext("echo")
    for limit in range(1, 20):
        assert read(context, max_new_tokens=limit).sampling.max_new_tokens == limit
        assert len(context.parsed) <= 4


# -- values of sampling parameters that ask for nothing, in the dialects that lack these parameters --------------------


EXCEPT = frozenset(
    ["do_sample", "temperature", "max_new_tokens", "top_logprobs", "prompt_logprobs", "top_k", "top_p", "typical_p"]
)
"""Fields whose defaults some dialects report or refuse."""

NEUTRAL = {
    **{
        name: default
        for row in ROWS
        if isinstance(default := Sampling._field_defaults.get(row.field), int | float) and row.field not in EXCEPT
        for name in {row.lmi, row.openai} - {""}
    },
    **{key: [] for key in ("stop", "stop_token_ids", "bad_words", "bad_sequences")},
    **dict.fromkeys(("watermark", "decoder_input_details", "use_beam_search"), False),
    **{"beam_width": 1, "no_repeat_ngram_size": 0, "logit_bias": {}},
}
"""Values that `_NEUTRALS` of `kernel/body.py` has to know."""

ASKED: dict[str, dict[str, Any]] = {
    **{key: {"inputs": "a"} for key in ("lmi", "tgi_compat", "lmi_async", "tgi", "mindie")},
    "dynamic_batch": {"inputs": ["a"]},
    "triton_generate": {"text_input": "a"},
    "openai_chat": {"model": "model", "messages": [{"role": "user", "content": "a"}]},
    "openai_completions": {"model": "model", "prompt": "a"},
    "openai_responses": {"model": "model", "input": "a"},
    "anthropic_messages": {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
}


@in_one_test("dialect", ASKED)
def test_values_that_ask_for_nothing_are_ignored_by_no_dialect(dialect: str) -> None:
    """A client that sends all defaults gets no header, and passes a server that refuses unknown names."""
    context = with_options(CAPABLE, unknown_parameters="refuse")
    for name, value in NEUTRAL.items():
        if dialect == "triton_generate" and isinstance(value, list | dict) and name not in INPUTS:
            continue  # Triton takes such values for its inputs alone
        nested = "inputs" in ASKED[dialect]
        body = {**ASKED[dialect], **({"parameters": {name: value}} if nested else {name: value})}
        assert list(DIALECTS[dialect].parse(body, context).ignored) == [], f"_NEUTRALS of kernel/body.py: {name}"


@in_one_test(
    ("name", "value"), [("n", 2), ("n", True), ("min_p", 0.1), ("early_stopping", 0), ("stop_sequences", ["x"])]
)
def test_other_values_of_unknown_parameters_are_reported(name: str, value: Any) -> None:
    found = DIALECTS["tgi"].parse({"inputs": "a", "parameters": {name: value}}, CAPABLE)
    assert list(found.ignored) == [f"parameters.{name}"]
