"""The parameter tables of docs/wire/, and how a live server is held against them.

A cell of "refused by" lists engines. One with a note's number is refused only where the note's condition is not met.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from handler.core import values
from handler.core.values import Sampling, StructuredOutput
from handler.protocols.kernel.parameters import ROWS, TableRow
from handler.protocols.kernel.schema import schema_of_reader
from tests.docs import pages
from tests.servers import LiveServer

DOCUMENTS = Path(__file__).parents[1] / "docs" / "wire"

PARAMETERS, TENSORS, CHAT = "lmi.md#parameters", "other.md#input-tensors", "openai.md#request"
TGI, MINDIE = "tgi.md#parameters", "other.md#mindies-parameters"

Values = dict[str, tuple[Any, dict[str, Any]]]

SAMPLED = {"do_sample": True}
BEAMS = {"num_beams": 2}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _example(row: TableRow) -> tuple[Any, dict[str, Any]]:
    """Return a value of a number or boolean that is not neutral, with what it needs beside it."""
    neutral, shape = Sampling._field_defaults[row.field], schema_of_reader(row.read)
    beside = SAMPLED if row.field in values.SAMPLED else {}
    if shape["type"] == "boolean":
        return not neutral, beside
    limits: list[Any] = [shape.get(name, shape.get(f"exclusive{name.title()}")) for name in ("minimum", "maximum")]
    if None in limits:
        raise LookupError(f"{row.lmi}: has no lower or no upper bound, so write a value into _VALUES of {__file__}")
    least, most = limits
    middle, upper = (least + most) / 2, (least + 3 * most) / 4
    return upper if middle == neutral else middle, beside


# A value of each parameter that is not neutral, with what it needs beside it.
_VALUES: Values = {
    "do_sample": (True, {}),
    "seed": (7, SAMPLED),
    "temperature": (0.5, SAMPLED),
    "top_k": (3, SAMPLED),
    "top_p": (0.5, SAMPLED),
    "repetition_penalty": (1.2, {}),
    "max_new_tokens": (2, {}),
    "stop_sequences": (["b"], {}),
    "details": (True, {}),
    "return_full_text": (True, {}),
    "decoder_input_details": (True, {}),
    "output_formatter": ("sse", {}),
    "truncate": (1, {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "num_beams": (2, {}),
    "length_penalty": (2.0, BEAMS),
    "early_stopping": (True, BEAMS),
    "stop_token_ids": ([4], {}),
    "include_stop_str_in_output": (True, {"stop_sequences": ["b"]}),
    "logprobs": (2, {}),
    "prompt_logprobs": (1, {}),
    "spaces_between_special_tokens": (False, {}),
    "logit_bias": ({"4": -5}, {}),
    "guided_json": (SCHEMA, {}),
    "guided_json_object": (True, {}),
    "guided_regex": ("[0-9]{1,3}", {}),
    "guided_choice": (["yes", "no"], {}),
    "guided_grammar": ('root ::= "yes" | "no"', {}),
    "min_length": (2, {}),
    "bad_sequences": (["b"], {}),
    "stop": (["b"], {}),
    "top_n_tokens": (2, {}),
    "watermark": (True, {}),
    "grammar": ({"type": "json", "value": SCHEMA}, {}),
    "adapter_id": ("mine", {}),
    "priority": (-1, {}),
    "allowed_token_ids": ([4, 5], {}),
    "cache_salt": ("tenant-1", {}),
    "outputs": (["output_ids", "cum_log_probs"], {}),
}

VALUES: Values = {**{row.lmi: _example(row) for row in ROWS if row.lmi and row.lmi not in _VALUES}, **_VALUES}

FIELD_VALUES: dict[str, Any] = {
    **{
        row.field: VALUES[row.lmi][0]
        for row in ROWS
        if row.lmi and isinstance(Sampling._field_defaults.get(row.field), int | float)
    },
    "do_sample": False, "max_new_tokens": 7, "logit_bias": ((3, 1.0),), "seed": 7, "stop_token_ids": (3,),
    "bad_sequences": ("x",), "bad_token_ids": (3,), "allowed_token_ids": (3,), "logprobs": True,
    "prompt_logprobs": True, "no_repeat_ngram_size": 2, "cache_salt": "x",
    "structured_output": StructuredOutput("json_object", ""),
}  # fmt: skip
"""A value of each field of Sampling that an engine may read. It differs from a sampled request's."""

TENSOR_VALUES: Values = {
    "request_output_len": ([[2]], {}),
    "input_ids": ([[4, 5, 6]], {}),
    "streaming": ([True], {}),
    "beam_width": ([2], {}),
    "runtime_top_k": ([3], {}),
    "runtime_top_p": ([0.5], {}),
    "len_penalty": ([2.0], {"beam_width": [2]}),
    "no_repeat_ngram_size": ([2], {}),
    "random_seed": ([7], SAMPLED),
    "end_id": ([4], {}),
    "pad_id": ([4], {}),
    "embedding_bias": ([[-5.0]], {}),  # as long as the vocabulary: see `body`
    "bad_words_list": ([[4], [1]], {}),
    "stop_words_list": ([[[4], [1]]], {}),
    "prompt_embedding_table": ([[0.5]], {}),
    "prompt_vocab_size": ([1], {}),
    "lora_task_id": ([1], {}),
    "lora_weights": ([[0.5]], {}),
    "lora_config": ([[1, 2, 3]], {}),
    "return_log_probs": ([True], {}),
    "return_context_logits": ([True], {}),
    "return_generation_logits": ([True], {}),
    "draft_input_ids": ([4], {}),
    "draft_logits": ([[0.5]], {}),
}

CHAT_VALUES: Values = {
    "frequency_penalty": (0.5, {}),
    "presence_penalty": (0.5, {}),
    "logit_bias": ({"5": 1.0}, {}),
    "logprobs": (True, {}),
    "top_logprobs": (2, {"logprobs": True}),
    "max_tokens": (2, {}),
    "max_completion_tokens": (4, {}),  # as many as the check's max_tokens
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "n": (2, {}),
    "seed": (7, {}),
    "stop": (["b"], {}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "ignore_eos": (True, {}),
    "model": ("gpt2", {}),
    "user": ("test", {}),
    "tools": ([{"type": "function", "function": {"name": "f"}}], {}),
    "response_format": ({"type": "json_object"}, {}),
}

_TGI = (
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "seed", "repetition_penalty", "max_new_tokens",
    "details", "decoder_input_details", "return_full_text", "truncate", "watermark", "stop", "adapter_id",
)  # fmt: skip
MINDIE_VALUES: Values = {name: VALUES[name] for name in _TGI}
TGI_VALUES: Values = {
    **MINDIE_VALUES,
    "best_of": (2, SAMPLED),
    **{name: VALUES[name] for name in ("frequency_penalty", "top_n_tokens", "grammar")},
}

ALL = {**VALUES, **TENSOR_VALUES}


def _is_schemas(answer: str) -> bool:
    found = json.loads(answer)
    return list(found) == ["a"] and isinstance(found["a"], int)


def _is_object(answer: str) -> bool:
    return isinstance(json.loads(answer), dict)


OBEYS: dict[str, Callable[[str], object]] = {
    "guided_json": _is_schemas,
    "guided_json_object": _is_object,
    "guided_regex": re.compile("[0-9]{1,3}").fullmatch,
    "guided_choice": ("yes", "no").__contains__,
    "guided_grammar": ("yes", "no").__contains__,
    "grammar": _is_schemas,
    "response_format": _is_object,
}
"""What shows that an answer, which has ended by itself, has followed the guide of that name."""


def section(heading: str) -> str:
    """Return the text under a heading, which is named by a page and an anchor in it."""
    page, _, anchor = heading.partition("#")
    return pages.section((DOCUMENTS / page).read_text(), anchor)


REFUSED_BY = "refused by"
AS_LMIS: dict[str, dict[str, str]] = {
    CHAT: {"logprobs": "details", "top_logprobs": "logprobs", "response_format": "guided_json"},
}
"""The heading of a table without engines -> a parameter -> the one of LMI's that the same engines refuse."""

_NOTE = re.compile(r"^\* ([¹²³⁴⁵⁶⁷⁸⁹]) Accepted (.+?)(?: \(.+\))?\.$", re.MULTILINE)


@cache
def table(heading: str = PARAMETERS) -> dict[str, dict[str, str]]:
    """parameter -> column -> cell. A row may be about several parameters."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    header, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found: dict[str, dict[str, str]] = {}
    for row in body:
        names = re.findall(r"`(\w+)`", row[0])
        assert names, row
        cells = dict(zip(header, row, strict=True))
        found.update(dict.fromkeys(names, cells))
    return found


@cache
def notes() -> dict[str, str]:
    """The number of a note -> the condition on which an engine accepts the parameter."""
    return dict(_NOTE.findall(section(PARAMETERS) + section(TENSORS)))


def refusing(heading: str, name: str) -> dict[str, str]:
    """engine -> the condition on which it accepts the parameter, empty for none; without the engines that accept it."""
    row = table(heading)[name]
    if REFUSED_BY not in row:
        row = table(PARAMETERS).get(AS_LMIS.get(heading, {}).get(name, name), {REFUSED_BY: ""})
    engines = re.findall(r"(\w+?)([¹²³⁴⁵⁶⁷⁸⁹]?)(?:, |$)", row[REFUSED_BY])
    return {engine: notes()[note] if note else "" for engine, note in engines}


def expected(heading: str, engine: str, name: str, unmet: Collection[str]) -> str:
    """What the table says of the parameter on this engine: accepted, refused or ignored.

    Args:
        unmet: parameters whose condition the server does not meet; they must have one.
    """
    rows = table(heading)
    assert name in rows, f"docs/wire/{heading} needs a row for `{name}`"
    if heading == MINDIE and "no effect" in rows[name]["type and range (default)"]:
        return "ignored"
    condition = refusing(heading, name).get(engine)
    if name in unmet:
        assert condition, f"{name} is on no condition with {engine}"
        return "refused"
    return "refused" if condition == "" else "accepted"


def is_met(condition: str, version: str, options: Mapping[str, str]) -> bool:
    """`from TensorRT-LLM 1.3`, `with option.x[=y]` or `without option.x=y`, several by `or`."""
    if " or " in condition:
        return any(is_met(one, version, options) for one in condition.split(" or "))
    kind, _, what = condition.partition(" ")
    if kind == "from":
        return version.split(".") >= what.split()[-1].split(".")
    key, _, value = what.strip("`").partition("=")
    there = key in options and (not value or options[key] == value)
    return {"with": there, "without": not there}[kind]


def unmet(heading: str, engine: str, version: str, options: Mapping[str, str]) -> set[str]:
    """Parameters of the table whose condition an engine of that version with these options does not meet."""
    conditions = {name: refusing(heading, name).get(engine) for name in table(heading)}
    return {name for name, condition in conditions.items() if condition and not is_met(condition, version, options)}


def check(
    server: LiveServer, engine: str, name: str, *, unmet: Collection[str] = (), vocabulary: int | None = None
) -> None:
    """Ask for a parameter of LMI's or a tensor, and hold what happens against the table.

    Args:
        vocabulary: its size, which `embedding_bias` must have.
    """
    heading = PARAMETERS if name in VALUES else TENSORS
    value, beside = ALL[name]
    if name == "embedding_bias":
        value = [[*value[0], *[0.0] * ((vocabulary or 1) - 1)]]
    body: dict[str, Any] = {"parameters": {"max_new_tokens": 2, **beside, name: value}}
    if name == "request_output_len":
        del body["parameters"]["max_new_tokens"]
    if name != "input_ids":
        body["inputs"] = "a b c"
    found = server.post(body)
    if expected(heading, engine, name, unmet) == "refused":
        assert found.status_code == 424, found.text
        named = [f"parameters.{one}=" for one in (name, *beside)]  # beams themselves, where there are none
        assert any(one in found.json()["error"] for one in named), found.text
    else:
        assert found.status_code == 200, found.text
        assert "x-lmi-ignored-parameters" not in found.headers


def check_guide(server: LiveServer, name: str) -> None:
    """Ask for a guide four times at once, and see whether the answers follow it; those that end, which most do."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda seed: _guided(server, name, seed), range(4)))
    ended = [answer for answer, finish in answers if finish == "eos_token"]
    assert ended
    for answer in ended:
        assert OBEYS[name](answer), answer


def _guided(server: LiveServer, name: str, seed: int) -> tuple[str, str]:
    """The answer, and why it ended."""
    value, beside = (CHAT_VALUES if name in CHAT_VALUES else VALUES)[name]
    if name in CHAT_VALUES:
        messages = [{"role": "user", "content": "Answer in JSON: who are you?"}]
        sampled = {"max_tokens": 200, "temperature": 0.8, "seed": seed}
        [choice] = server.post({"messages": messages, **sampled, **beside, name: value}).json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    parameters = {"max_new_tokens": 200, "details": True, "do_sample": True, "seed": seed, **beside, name: value}
    found = server.post({"inputs": "a b c", "parameters": parameters}).json()
    return found["generated_text"], found["details"]["finish_reason"]


def check_chat(server: LiveServer, engine: str, name: str, *, unmet: Collection[str] = ()) -> None:
    """The same for a chat's parameter."""
    value, beside = CHAT_VALUES[name]
    found = server.post({"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 4, **beside, name: value})
    if expected(CHAT, engine, name, unmet) == "refused":
        assert found.status_code == 424, found.text
        assert f'"error":"{name}=' in found.text
    else:
        assert found.status_code == 200, found.text
        assert "x-lmi-ignored-parameters" not in found.headers


def check_tgi(server: LiveServer, engine: str, name: str, *, heading: str = TGI, unmet: Collection[str] = ()) -> None:
    """The same for a parameter at TGI's `/`, or at MindIE's."""
    value, beside = (TGI_VALUES if heading == TGI else MINDIE_VALUES)[name]
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": 2, **beside, name: value}}
    found = server.post(body, "/")
    wanted = expected(heading, engine, name, unmet)
    if wanted == "refused":
        assert found.status_code == 422, found.text
        assert found.json()["error"].startswith(f"Input validation error: parameters.{name}="), found.text
    else:
        assert found.status_code == 200, found.text
        reported = {"x-lmi-ignored-parameters": f"parameters.{name}"} if wanted == "ignored" else {}
        assert {key: value for key, value in found.headers.items() if key.startswith("x-lmi-")} == reported
