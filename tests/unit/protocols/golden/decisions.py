"""The golden cases of System One and of OpenAI's decisions."""

from __future__ import annotations

from typing import Any

from handler.core.errors import Overloaded, PromptTooLong
from handler.core.values import Delta
from tests.unit.protocols.answers import failing, refused

NOUL = {"type": "noul", "instructions": "Is it urgent?"}
CHOICE = {"type": "choice", "instructions": "Which team?", "criteria": {"a": None, "b": "bills", "c": {"k": 1}}}
SCORE = {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"k": "ü"}, ["x"]]}
STATE = {"t": "hi"}
TOO_LONG = refused(PromptTooLong("state with questions.n", 9000, 8191))
BUSY = refused(Overloaded("the queue is full"))


def one(question: Any, **more: Any) -> dict[str, Any]:
    return {"state": STATE, "questions": {"q": question}, **more}


_SYSTEM_ONE: dict[str, tuple[Any, Any]] = {
    "all": ({"model": "jev-latest", "state": STATE, "questions": {"n": NOUL, "c": CHOICE, "s": SCORE}}, None),
    "criteria": (one({"type": "noul", "criteria": {"true": "yes it is", "false": None}}), None),
    "one_option": (one({"type": "choice", "criteria": {"a": None}}), None),
    "one_level": (one({"type": "score", "criteria": ["calm"]}), None),
    "unknown": (one(NOUL, request_id="r", seed=1), None),
    "box": (one({"type": "box", "instructions": "where"}), None),
    "essay": (one({"type": "essay"}), None),
    "no_type": (one({}), None),
    "no_questions": ({"state": STATE, "questions": {}}, None),
    "no_state": ({"questions": {"q": NOUL}}, None),
    "input": ({"input": "hi", "questions": {"q": NOUL}}, None),
    "question_null": (one(None), None),
    "blank_id": ({"state": STATE, "questions": {" ": NOUL}}, None),
    "no_options": (one({"type": "choice", "criteria": {}}), None),
    "same_options": (one({"type": "choice", "criteria": {"a": None, "a ": None}}), None),
    "line_break": (one({"type": "choice", "criteria": {"a\nb": None}}), None),
    "empty_level": (one({"type": "score", "criteria": ["calm", None]}), None),
    "nothing_asked": (one({"type": "noul", "instructions": " "}), None),
    "blank_criteria": (one({"type": "noul", "criteria": {"true": " "}}), None),
    "yes": (one({"type": "noul", "criteria": {"yes": "it is"}}), None),
    "no_questions_at_all": ({"state": STATE}, None),
    "extra_field": (one({**NOUL, "weight": 2}), None),
    "thinks": (one(NOUL, chat_template_kwargs={"enable_thinking": True}), None),
    "joint": (one(NOUL, joint=True), None),
    "temperature": (one(NOUL, temperature=0.5), None),
    "image": (one(NOUL, images=["data:image/png;base64,AAAA"]), None),
    "asset": (one(NOUL, assets={"<image:0>": {"type": "image", "data_base64": "AAAA"}}), None),
    "other_model": (one(NOUL, model="other"), None),
    "list": ([], None),
    "not_json": (b"{", None),
    "too_long": (one(NOUL), TOO_LONG),
    "busy": (one(NOUL), BUSY),
    "fails": (one(NOUL), failing(0)),
}

PREDICATE = {"type": "predicate", "instructions": "It is urgent."}
CHOICES = {"type": "choice", "name": "c", "instructions": "Which?", "choices": [{"value": True}, {"value": "true"}]}
LEVELS = [{"label": "calm", "description": "no shouting"}, {"label": "angry"}]
SCORED = {"type": "score", "name": "s", "instructions": "How angry?", "levels": LEVELS}
CONVERSATION = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_json", "data": {"a": 1}}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "ok"},
    {"role": "assistant", "phase": "final_answer", "content": [{"type": "refusal", "refusal": "no"}]},
]
ORPHAN = [{"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}]
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}]


def asked(*questions: Any, **more: Any) -> dict[str, Any]:
    return {"input": "hi", "questions": list(questions), **more}


_OPENAI: dict[str, tuple[Any, Any]] = {
    "all": (asked(PREDICATE, CHOICES, SCORED, model="model", prompt_cache_key="k"), None),
    "conversation": ({"input": CONVERSATION, "questions": [PREDICATE]}, None),
    "unknown": (asked(PREDICATE, seed=1), None),
    "orphan": ({"input": ORPHAN, "questions": [PREDICATE]}, None),
    "image": ({"input": IMAGE, "questions": [PREDICATE]}, None),
    "no_input": ({"questions": [PREDICATE]}, None),
    "state": ({"state": "hi", "questions": [PREDICATE]}, None),
    "no_questions": (asked(), None),
    "text": (asked("Is it urgent?"), None),
    "no_type": (asked({"instructions": "x"}), None),
    "criteria": (asked({"type": "choice", "instructions": "x", "criteria": {"a": None, "b": None}}), None),
    "wrong_type": (asked({"type": "noul", "instructions": "x"}), None),
    "one_choice": (asked({**CHOICES, "choices": [{"value": "a"}]}), None),
    "same_choices": (asked({**CHOICES, "choices": [{"value": "a"}, {"value": "a"}]}), None),
    "number": (asked({**CHOICES, "choices": [{"value": 1}, {"value": "a"}]}), None),
    "same_names": (asked(CHOICES, CHOICES), None),
    "no_instructions": (asked({"type": "predicate"}), None),
    "cache": (asked(PREDICATE, prompt_cache_options={"ttl": "1h"}), None),
    "stream": (asked(PREDICATE, stream=True), None),
    "list": ([], None),
    "not_json": (b"{", None),
    "too_long": (asked(PREDICATE), TOO_LONG),
    "busy": (asked(PREDICATE), BUSY),
    "fails": (asked(PREDICATE), failing(0)),
}

CASES: dict[str, tuple[str, Any, list[Delta] | None]] = {
    **{f"decisions/systemone_{name}": ("systemone", *case) for name, case in _SYSTEM_ONE.items()},
    **{f"decisions/openai_{name}": ("openai_decisions", *case) for name, case in _OPENAI.items()},
}
