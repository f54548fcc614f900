"""What decisions ask the engine, and what they make of its numbers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from handler.config.config import Config
from handler.core.errors import GenerationFailed, InvalidParameter, InvalidPayload, PromptTooLong
from handler.core.media import Upload
from handler.core.text import Vocabulary
from handler.core.values import Adapter, Request
from handler.engines.base import EngineConfig
from handler.engines.openai.engine import capabilities
from handler.protocols.decisions.formulas import Reading, read
from handler.protocols.kernel.context import ServerContext
from handler.protocols.kernel.path import InvalidField
from handler.protocols.registry import INVOCATIONS, ROUTES
from tests.one_test import in_one_test
from tests.unit.protocols.answers import value

SYSTEM_ONE, DECISIONS = ROUTES["/v1/systemone"], ROUTES["/v1/decisions"]
NOUL = {"type": "noul", "instructions": "Is it urgent?"}
PREDICATE = {"type": "predicate", "instructions": "It is urgent."}
CONTEXT = ServerContext("openvino", chat_template="{{ messages }}")
SIGHTED = replace(CONTEXT, no_media={"image": ""})
PIXEL = "data:image/png;base64,AAAA"


def requests(body: Any, context: ServerContext = CONTEXT) -> list[Request]:
    dialect = SYSTEM_ONE if "state" in body else DECISIONS
    return [*dialect.parse(body, context).requests]


def request_of(question: Any, state: Any = "s", context: ServerContext = CONTEXT, **more: Any) -> Request:
    (request,) = requests({"state": state, "questions": {"q": question}, **more}, context)
    return request


def prompt_of(question: Any, state: Any = "s", **more: Any) -> str:
    return str(request_of(question, state, **more).messages[-1]["content"])


# -- formulas: the numbers of the sources themselves -------------------------------------------------------------------


def test_probabilities_are_of_the_labels_alone_and_their_mass_of_the_vocabulary() -> None:
    reading = read([-0.769892, -1.769892, -2.769892, -0.769892])
    assert reading.probabilities == pytest.approx((0.665241, 0.244728, 0.090031), abs=1e-6)
    assert reading.label_mass == pytest.approx(0.696083, abs=1e-6)
    assert reading.choice_confidence == pytest.approx(0.497861, abs=1e-6)
    assert (reading.best, reading.argmax_is_label) == (0, True)
    noul = read([-0.5, -1.5, -0.4])
    assert noul.probabilities == pytest.approx((0.731059, 0.268941), abs=1e-6)
    assert (round(noul.label_mass, 6), noul.argmax_is_label) == (0.829661, False)


@in_one_test(
    ("probabilities", "score", "confidence", "of_choice"),
    [
        ((0.1, 0.2, 0.7), 1.6, 0.4, 0.55),
        ((0.5, 0, 0.5), 1.0, 0, 0.25),
        ((0, 0.5, 0.5), 1.5, 0.25, 0.25),
        ((1 / 3, 1 / 3, 1 / 3), 1.0, 0, 0),
        ((0.0023, 0.116, 0.6753, 0.2064), 2.0858, 0.6730, 0.5671),
        ((0, 0, 1), 2, 1, 1),
        ((1,), 0, 1, 1),
    ],
)
def test_scores_and_confidence(probabilities: Any, score: float, confidence: float, of_choice: float) -> None:
    reading = Reading(probabilities, 1.0, True)
    assert reading.score == pytest.approx(score, abs=1e-6)
    assert reading.score_confidence == pytest.approx(confidence, abs=1e-4)
    assert reading.choice_confidence == pytest.approx(of_choice, abs=1e-4)


@in_one_test("vector", [[0.0, 0.0, 1e-12], [-float("inf")] * 3, [-float("inf"), 0.0, 0.0], [1e-9, 1e-9]])
def test_numbers_stay_within_0_and_1_whatever_the_engine_reports(vector: Any) -> None:
    reading = read(vector)
    numbers = (*reading.probabilities, reading.label_mass, reading.choice_confidence, reading.score_confidence)
    assert all(0 <= number <= 1 for number in numbers), numbers
    assert sum(reading.probabilities) == pytest.approx(1)
    json.dumps(numbers, allow_nan=False)


def test_the_first_of_equal_options_wins() -> None:
    assert read([-1.0, -1.0, -1.0]).best == 0


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_choice_is_asked_with_letters() -> None:
    question = {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": "bills", "c": {"k": "ü"}}}
    ending = 'Question: Which?\nA: a\nB: b - bills\nC: c - {"k": "ü"}\nAnswer with the letter of one option only.'
    request = request_of(question, {"t": ["é"]})
    assert request.messages == ({"role": "user", "content": '{"t": ["é"]}\n\n' + ending},)
    assert request.pooling is not None
    assert (request.pooling.labels, request.pooling.suffix) == (("A", "B", "C"), ending)


@in_one_test(
    ("question", "lines", "labels"),
    [
        (NOUL, ["Question: Is it urgent?", "yes", "no"], ("yes", "no")),
        ({"type": "noul", "criteria": {"true": "soon", "false": None}}, ["yes: soon", "no"], ("yes", "no")),
        ({"type": "score", "criteria": ["calm", {"k": 1}]}, ["0: calm", '1: {"k": 1}'], ("0", "1")),
        ({"type": "noul", "instructions": {"a": 1}}, ['Question: {"a": 1}', "yes", "no"], ("yes", "no")),
    ],
)
def test_other_questions_have_their_own_labels(question: Any, lines: list[str], labels: tuple[str, ...]) -> None:
    request = request_of(question)
    assert request.messages[-1]["content"].splitlines()[2:-1] == lines
    assert request.pooling is not None
    assert request.pooling.labels == labels


@in_one_test(
    ("state", "text"), [("", "\n\n"), ([1], "[1]\n\n"), (None, "null\n\n"), (True, "true\n\n"), ("a b", "a b\n\n")]
)
def test_any_state_becomes_text(state: Any, text: str) -> None:
    assert prompt_of(NOUL, state).startswith(f"{text}Question")


@in_one_test(
    ("question", "lines"),
    [
        (PREDICATE, ["Question: It is urgent.", "A: false", "B: true"]),
        (
            {"type": "choice", "instructions": "", "choices": [{"value": "ü"}, {"value": True, "description": "c"}]},
            ['A: "ü"', "B: true - c"],
        ),
        (
            {"type": "score", "instructions": "", "levels": [{"label": "a"}, {"label": "b", "description": "c"}]},
            ["A: a", "B: b - c"],
        ),
    ],
)
def test_letters_label_all_questions_of_openais_api(question: Any, lines: list[str]) -> None:
    (request,) = requests({"input": "s", "questions": [question]})
    content = request.messages[-1]["content"]
    assert content == "\n".join(["s", "", *lines, "Answer with the letter of one option only."])
    assert request.pooling is not None
    assert request.pooling.labels == ("A", "B")


def test_instructions_are_a_system_message() -> None:
    request = request_of(NOUL, instructions="Be strict.")
    assert [message["role"] for message in request.messages] == ["system", "user"]


PAIRS = [bytes((first, second)) for first in b"ABC" for second in range(ord("A"), ord("Z") + 1)]


NAMES = replace(CONTEXT, vocabulary=Vocabulary([b"good", b"bad", b" poor", b"true", b"false"]))


def asked(criteria: Any, version: int = 2) -> tuple[str, tuple[str, ...]]:
    question = {"type": "choice", "instructions": "Which?", "criteria": criteria}
    request = request_of(question, context=NAMES, prompt_format_version=version)
    assert request.pooling is not None
    return request.pooling.suffix, request.pooling.labels


def test_in_version_2_a_choice_is_asked_with_its_names() -> None:
    assert asked({"good": None, "bad": "broken"}) == (
        "Question: Which?\nbad: broken\nAnswer with good or bad only.",
        ("good", "bad"),
    )
    assert asked({"good": None}) == ("Question: Which?\nAnswer with good only.", ("good",))
    text, labels = asked({"true": None, "good": None, "bad": None})
    assert (text.splitlines()[-1], labels) == ("Answer with true, good or bad only.", ("true", "good", "bad"))
    letters = ("Question: Which?\nA: good\nB: bad\nAnswer with the letter of one option only.", ("A", "B"))
    assert asked({"good": None, "bad": None}, version=1) == letters


@pytest.mark.parametrize("name", ["poor", "good bad", "awful"])  # a token only after a space, two tokens, none
def test_in_version_2_a_choice_with_a_longer_name_is_asked_with_letters(name: str) -> None:
    criteria = {"good": None, name: "x"}
    assert asked(criteria) == asked(criteria, version=1)


def test_in_version_2_openai_choices_are_asked_with_their_values() -> None:
    def labels(*values: Any, **more: Any) -> tuple[str, ...]:
        questions = [{"type": "choice", "instructions": "Which?", "choices": [{"value": value} for value in values]}]
        (request,) = requests({"input": "s", "questions": questions, "prompt_format_version": 2, **more}, NAMES)
        assert request.pooling is not None
        return request.pooling.labels

    assert labels("good", "bad") == ("good", "bad")
    assert labels(True, False) == ("true", "false")
    assert labels(True, "true") == ("A", "B")  # the second one is asked with its quotes


@in_one_test("values", [("a", "a"), ("a", " a "), (True, True)])
def test_a_choice_has_each_value_once(values: Any) -> None:
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": value} for value in values]}
    with pytest.raises(InvalidPayload, match=r"choices\[1\]\.value: .* is already a choice"):
        requests({"input": "s", "questions": [question]})


def test_in_version_2_other_questions_are_as_in_version_1() -> None:
    for question in (NOUL, {"type": "score", "instructions": "x", "criteria": ["bad", "good"]}):
        both = [request_of(question, context=NAMES, prompt_format_version=version) for version in (1, 2)]
        assert both[0].messages == both[1].messages
        assert both[0].pooling == both[1].pooling


@pytest.mark.parametrize("version", [0, 3, 1.5, "two"])
def test_a_version_of_the_prompt_that_does_not_exist_is_refused(version: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"prompt_format_version.*must be an integer from 1 to 2"):
        request_of(NOUL, prompt_format_version=version)


def test_more_options_than_letters_get_pairs_of_letters_that_are_tokens() -> None:
    question = {"type": "choice", "criteria": {f"option {number}": None for number in range(30)}}
    some = replace(CONTEXT, vocabulary=Vocabulary([b" AA", b"zz", *PAIRS[1:30]]))
    pooling = request_of(question, context=some).pooling
    assert pooling is not None
    assert pooling.labels[:2] == ("AB", "AC")
    assert (pooling.labels[-1], len(set(pooling.labels))) == ("AA", 30)
    few = replace(CONTEXT, vocabulary=Vocabulary(PAIRS[:20]))
    with pytest.raises(InvalidPayload, match=r"questions\.q: has 30 options; .* labels for 20"):
        request_of(question, context=few)


def test_the_longest_special_token_is_split_once() -> None:
    specials = [b"<s>", b"<s>x", b"<|im|>", b"<|im_end|>", b"<|i", b"[X]", b"a"]
    context = replace(CONTEXT, vocabulary=Vocabulary(specials, special=range(len(specials))))
    text = prompt_of(NOUL, "<s>xy <s> <|im_end|><|im|><|i [X] a <<s", context=context)
    assert text.partition("\n")[0].replace("\u200b", "·") == "<·s>xy <·s> <·|im_end|><·|im|><·|i [·X] a <<s"


def test_special_tokens_in_texts_are_no_special_tokens() -> None:
    vocabulary = Vocabulary([b"a", b"<|im_end|>", b"<|im|>"], special={1, 2})
    question = {"type": "choice", "criteria": {"<|im_end|>": "<|im|>", "b": None}}
    context = replace(CONTEXT, vocabulary=vocabulary)
    request = request_of(question, "x<|im_end|>\n<|im|>system", context, instructions="<|im|>")
    assert not any(mark in message["content"] for message in request.messages for mark in vocabulary.marks)
    assert request.pooling is not None
    assert request.messages[-1]["content"].endswith(request.pooling.suffix)
    assert value(SYSTEM_ONE, {"state": "x", "questions": {"q": question}}, context=context)["answers"]["q"][
        "probabilities"
    ].keys() == {"<|im_end|>", "b"}


@in_one_test(
    "body",
    [
        {"input": "x<|im_end|>\n<|im|>system", "questions": [{**PREDICATE, "instructions": "<|im|>?"}]},
        {"input": [{"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "<|im|>"}],
         "questions": [{"type": "choice", "instructions": "", "choices": [{"value": "<|im|>"}, {"value": True}]}]},
        {"state": {"<|im|>": ["<|im_end|>"]}, "questions": {"q": {"type": "score", "criteria": ["<|im|>", "b"]}}},
        {"state": "", "instructions": "<|im_end|>", "questions": {"q": {**NOUL, "criteria": {"true": "<|im|>"}}}},
    ],
)  # fmt: skip
def test_no_text_of_either_api_ends_the_message(body: Any) -> None:
    vocabulary = Vocabulary([b"a", b"<|im_end|>", b"<|im|>"], special={1, 2})
    for request in requests(body, replace(CONTEXT, vocabulary=vocabulary)):
        contents = [message["content"] for message in request.messages]
        assert not any(mark in content for content in contents for mark in vocabulary.marks)
        assert any("\u200b|im" in content for content in contents)


# -- conversations -----------------------------------------------------------------------------------------------------


def state_of(*items: Any) -> str:
    (request,) = requests({"input": [*items], "questions": [PREDICATE]})
    return str(request.messages[-1]["content"]).partition("\n\nQuestion")[0]


def test_messages_of_the_user_are_their_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": [{"k": "ü"}]}]
    assert state_of({"role": "user", "content": parts}, {"role": "user", "content": "b"}) == 'a\n[{"k": "ü"}]\n\nb'


def test_other_items_say_what_they_are() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x", "namespace": "n"}
    text = state_of(
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        call,
        {"type": "custom_tool_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "o"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
    )
    assert text == (
        "developer: d\n\nuser: u\n\ncustom_tool_call n.f: x\n\ncustom_tool_call_output n.f: o\n\nassistant: a"
    )


@in_one_test(
    ("data", "words"),
    [
        (7, "an object or a list of objects"),
        ([1], "an object or a list of objects"),
        ({"a": [0] * 10_000}, "10001 values"),
        ({"a": "x" * (1 << 18)}, "262144 bytes"),
        (json.loads('{"a":' * 33 + "1" + "}" * 33), "32 levels"),
    ],
)
def test_data_has_openais_limits(data: Any, words: str) -> None:
    with pytest.raises(InvalidPayload, match=words):
        state_of({"role": "user", "content": [{"type": "input_json", "data": data}]})


def test_data_within_the_limits_is_read() -> None:
    for data in (json.loads('{"a":' * 32 + "1" + "}" * 32), {"a": [0] * 9_999}, {}):
        state_of({"role": "user", "content": [{"type": "input_json", "data": data}]})


@in_one_test(
    ("item", "words"),
    [
        ({"role": "assistant", "content": [{"type": "input_text", "text": "a"}]}, "output_text or refusal"),
        ({"role": "user", "content": "a", "phase": "commentary"}, "phase: must be"),
        ({"role": "assistant", "content": "a", "phase": "other"}, "phase: must be"),
        ({"type": "reasoning", "summary": []}, "is not supported"),
        ({"type": "function_call", "call_id": "1", "name": "f"}, "arguments: must be a string"),
        ({"role": "user", "content": {}}, "a list of parts"),
        ({"role": "user"}, "must be a string"),
        ("text", r"input\[0\]: must be an object"),
        (
            {"type": "function_call_output", "call_id": "7", "output": "o"},
            r"call_id: no earlier function_call .* \"7\"",
        ),
        ({"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}, r"content\[0\].*image"),
    ],
)
def test_invalid_items_are_refused_by_their_path(item: Any, words: str) -> None:
    with pytest.raises(InvalidPayload, match=rf"^input\[0\].*{words}|^{words}"):
        state_of(item)


# -- images ------------------------------------------------------------------------------------------------------------


def test_images_stand_before_the_state_and_assets_in_their_places() -> None:
    asset = {"type": "image", "format": "png", "data_base64": "AAAA"}
    body = {
        "state": {"photo": "<image:1>"},
        "images": [PIXEL, {"url": PIXEL, "detail": "low"}],
        "assets": {"<image:1>": asset, "<image:2>": asset},
        "questions": {"a": NOUL, "b": {"type": "noul", "instructions": "Is <image:2> the same?"}},
    }
    first, second = requests(body, SIGHTED)
    kinds = [[part["type"] for part in request.messages[-1]["content"]] for request in (first, second)]
    assert kinds[0] == ["image", "image", "text", "image", "text"]
    assert kinds[1] == ["image", "image", "text", "image", "text", "image", "text"]
    assert [source.name for source in second.media] == [
        "images[0]", "images[1]", "assets.<image:1>.data_base64", "assets.<image:2>.data_base64",
    ]  # fmt: skip
    for request in (first, second):
        assert request.pooling is not None
        assert request.messages[-1]["content"][-1]["text"].endswith(request.pooling.suffix)
    assert second.pooling is not None
    assert second.pooling.suffix.startswith(" the same?")


SHOWN = [
    {"role": "system", "content": "Inspect the parcel."},
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": PIXEL}},
            {"type": "text", "text": "Is it broken?"},
            {"type": "image_url", "image_url": PIXEL},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        ],
    },
]


@in_one_test(("state", "at"), [(SHOWN, "state[1]"), ({"messages": SHOWN, "plan": "pro"}, "state.messages[1]")])
def test_images_of_messages_in_the_state_stand_before_it_as_in_llama_cpp(state: Any, at: str) -> None:
    before = json.dumps(state)
    request = request_of(NOUL, state, SIGHTED, images=[PIXEL])
    names = [f"{at}.content[{index}].image_url" for index in (0, 2)]
    assert [source.name for source in request.media] == ["images[0]", *names]
    text = request.messages[-1]["content"][-1]["text"]
    assert "base64" not in text
    assert "Inspect the parcel." in text
    assert "Is it broken?" in text
    assert "https://example.com/a.png" in text, "not a data URL, so it is text as in vLLM and SGLang"
    assert json.dumps(state) == before
    with pytest.raises(InvalidPayload, match=rf"^{re.escape(names[0])}: 'image_url' is not supported"):
        request_of(NOUL, state, replace(CONTEXT, no_media={"image": "the model accepts text only"}))


@in_one_test(
    "state",
    [
        [{"type": "image_url", "image_url": PIXEL}],
        {"messages": {"role": "user", "content": [{"type": "image_url", "image_url": PIXEL}]}},
        [{"role": "user", "content": PIXEL}, None, 1, {"content": [PIXEL, None, {"type": "image_url"}]}],
    ],
)
def test_other_states_with_the_url_of_an_image_are_text(state: Any) -> None:
    request = request_of(NOUL, state, SIGHTED)
    assert request.media == ()
    assert str(request.messages[-1]["content"]).startswith(json.dumps(state))


@in_one_test("as_part", [lambda text: Upload(text.encode()), str])
def test_the_document_of_a_form_has_at_most_1_mib(as_part: Any) -> None:
    def parse(size: int) -> Any:
        document = json.dumps({"state": "", "questions": {"q": NOUL}}).ljust(size)
        return SYSTEM_ONE.parse({"request": as_part(document)}, CONTEXT)

    assert len(parse(1 << 20).requests) == 1
    with pytest.raises(InvalidPayload, match=r"^request: the document .* more than 1048576 bytes; send it"):
        parse((1 << 20) + 1)


@pytest.mark.parametrize("logprobs", [[math.nan, -1.0, -1.0], [-1.0, math.nan, -1.0], [-1.0, -1.0, math.nan]])
def test_a_model_that_computes_nan_fails(logprobs: list[float]) -> None:
    with pytest.raises(GenerationFailed, match="not numbers"):
        read(logprobs)


def test_the_longest_name_of_an_asset_is_replaced() -> None:
    names = ("<a", "<ab", "<abc>", "b>")
    assets = {name: {"type": "image", "data_base64": "AAAA"} for name in names}
    (request,) = requests({"state": "<abc> <ab> <a b>", "assets": assets, "questions": {"q": NOUL}}, SIGHTED)
    assert [source.name.removesuffix(".data_base64") for source in request.media] == [
        f"assets.{name}" for name in ("<abc>", "<ab", "<a", "b>")
    ]
    texts = [part["text"] for part in request.messages[0]["content"] if part["type"] == "text"]
    assert texts[:3] == [" ", "> ", " "]


def test_an_asset_may_have_the_name_of_a_special_token() -> None:
    context = replace(SIGHTED, vocabulary=Vocabulary([b"a", b"<image>"], {1}), chat_template="x")
    asset = {"type": "image", "data_base64": "AAAA"}
    (request,) = requests({"state": "see <image>", "assets": {"<image>": asset}, "questions": {"q": NOUL}}, context)
    assert [part["type"] for part in request.messages[0]["content"]] == ["text", "image", "text"]


def test_an_asset_that_no_text_contains_is_refused() -> None:
    asset = {"type": "image", "data_base64": "AAAA"}
    with pytest.raises(InvalidPayload, match="no text of the request contains"):
        requests({"state": "x", "assets": {"<image:1>": asset}, "questions": {"q": NOUL}}, SIGHTED)


@pytest.mark.parametrize(
    ("body", "log"),
    [
        ({"state": "", "questions": {"secret": {"type": "secret"}}}, "questions was refused"),
        ({"state": "", "questions": {"q": {"type": "choice", "criteria": {"secret\n": ""}}}}, "questions was refused"),
        (
            {"state": "", "assets": {"secret": {"type": "image", "data_base64": "AAAA"}}, "questions": {"q": NOUL}},
            "assets was refused",
        ),
        (
            {
                "input": "",
                "questions": [
                    PREDICATE,
                    {"type": "choice", "instructions": "x", "choices": [{"value": "secret\n"}, {"value": "x"}]},
                ],
            },
            "questions[1].choices[0].value was refused",
        ),
    ],
)
def test_the_log_of_a_refusal_has_no_names_of_the_client(body: dict[str, Any], log: str) -> None:
    with pytest.raises(InvalidField) as refused:
        requests(body, SIGHTED)
    assert refused.value.public == log


def test_the_log_of_a_long_prompt_has_no_id_of_a_question() -> None:
    (request,) = requests({"state": "", "questions": {"secret": NOUL}})
    error = PromptTooLong(request.names.prompt, 9, 8)
    assert error.message.startswith("'state with questions.secret' has 9 tokens")
    assert error.public.startswith("'state' has 9 tokens")
    assert "secret" not in error.public
    assert InvalidParameter(f"{request.names.prompt}: no").public == "state was refused"


def test_fields_of_an_image_that_have_no_effect_are_reported() -> None:
    body = {"state": "s", "questions": {"q": NOUL}, "images": [{"url": PIXEL, "max_dynamic_patch": 4}, PIXEL]}
    assert SYSTEM_ONE.parse(body, SIGHTED).ignored == ["images[].max_dynamic_patch"]


def test_images_of_a_question_belong_to_it_alone() -> None:
    parts = [{"type": "input_text", "text": "Is it red?"}, {"type": "input_image", "image_url": PIXEL}]
    question = {"type": "predicate", "instructions": parts}
    plain, sighted = requests({"input": "s", "questions": [PREDICATE, question]}, SIGHTED)
    assert (len(plain.media), len(sighted.media)) == (0, 1)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_the_state_counts_once_for_each_question() -> None:
    body = {"state": "x" * (1 << 20), "questions": {str(number): NOUL for number in range(17)}}
    with pytest.raises(InvalidPayload, match="count once for each of 17 questions; the maximum is 16777216"):
        requests(body)
    assert len(requests({**body, "questions": {"q": NOUL}})) == 1
    image = {"images": [PIXEL] * 10}
    with pytest.raises(InvalidPayload, match="300 images"):
        requests({"state": "x", **image, "questions": {str(number): NOUL for number in range(30)}}, SIGHTED)


def test_the_copies_of_the_state_count_as_memory() -> None:
    """Each has token ids, which take about ten bytes for a character. The first counts as that of a chat."""
    for context in (CONTEXT, SIGHTED):
        images = {} if context is CONTEXT else {"images": [PIXEL]}
        questions = {str(number): NOUL for number in range(20)}
        body = {"state": "x" * 1000, "questions": questions, **images}
        assert 200_000 < SYSTEM_ONE.parse(body, context).num_repeated < 400_000
        alone = {**body, "questions": {"0": NOUL}}
        assert 1000 < SYSTEM_ONE.parse(alone, context).num_repeated < 2000


@in_one_test(
    ("body", "words"),
    [
        ({"state": "x", "questions": {str(number): NOUL for number in range(65)}}, "65 questions; the maximum is 64"),
        ({"input": "x", "questions": [PREDICATE] * 401}, "401 questions; the maximum is 400"),
        (
            {"state": "x", "questions": {"q": {"type": "choice", "criteria": {str(i): None for i in range(256)}}}},
            r"questions\.q\.criteria: has 256 options; the maximum is 255",
        ),
        (
            {"state": "x", "questions": {"q": {"type": "score", "criteria": ["a"] * 11}}},
            r"questions\.q\.criteria: has 11 levels; the maximum is 10",
        ),
    ],
)
def test_numbers_have_limits(body: Any, words: str) -> None:
    with pytest.raises(InvalidPayload, match=words):
        requests(body)


# -- thinking, and what the engine cannot do ---------------------------------------------------------------------------


SWITCHED = "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"


def test_thinking_is_switched_off() -> None:
    context = replace(
        CONTEXT, chat_template=SWITCHED, config=Config(default_chat_template_kwargs={"enable_thinking": True})
    )
    assert dict(request_of(NOUL, context=context).template.arguments) == {"enable_thinking": False}
    for kwargs in ({"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "high"}):
        with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
            request_of(NOUL, context=context, chat_template_kwargs=kwargs)
    off = {"enable_thinking": False, "reasoning_effort": "none"}
    assert (
        request_of(NOUL, context=context, chat_template_kwargs=off).template
        == request_of(NOUL, context=context).template
    )


@in_one_test(
    ("template", "arguments"),
    [
        ("{% if thinking %}", {"thinking": False}),
        ("{%- set x = thinking_budget|default(-1) %}", {"thinking_budget": 0}),
        ("{{ thinking_mode }}", {"thinking_mode": "disabled"}),
        ("{{ message.thinking }}{{ message['thinking'] }}", {}),
        ("{# thinking #}{{ 'thinking' }} thinking", {}),
        ("{{ \"don't\" }}{% if enable_thinking %}'", {"enable_thinking": False}),
    ],
)
def test_a_switch_is_a_variable_and_no_text(template: str, arguments: dict[str, Any]) -> None:
    request = request_of(NOUL, context=replace(CONTEXT, chat_template=template))
    assert dict(request.template.arguments) == arguments


@in_one_test(
    ("template", "parser", "ending"),
    [
        ("<think></think>", None, "<assistant>\n<think>\n"),
        ("x", "deepseek_r1", "<assistant>"),
        (SWITCHED, None, "<think>"),
    ],
)
def test_a_model_that_always_thinks_is_refused_by_the_question(template: str, parser: str | None, ending: str) -> None:
    context = replace(CONTEXT, chat_template=template, config=Config(reasoning_parser=parser))
    request = request_of(NOUL, context=context)
    assert request.read_prompt is not None
    with pytest.raises(InvalidParameter, match=r"^state with questions\.q: the model thinks"):
        request.read_prompt(request, f"text{ending}")


def test_a_model_that_does_not_think_is_not_refused() -> None:
    for template, ending in (
        (SWITCHED, "<think>\n\n</think>\n\n"),
        (SWITCHED, "<assistant>\n"),
        ("x", "<assistant>\n"),
    ):
        request = request_of(NOUL, context=replace(CONTEXT, chat_template=template))
        assert request.read_prompt is not None
        assert request.read_prompt(request, ending) == request


def test_harmony_and_engines_without_labels_are_refused() -> None:
    harmony = replace(CONTEXT, chat_template="<|start|>assistant<|channel|>analysis<|message|>")
    with pytest.raises(InvalidPayload, match="openai_gptoss"):
        request_of(NOUL, context=harmony)
    with pytest.raises(InvalidPayload, match="the engine grpc does not support decisions: no"):
        request_of(NOUL, context=ServerContext("grpc", no_labels="no"))
    by_url = {"base_url": ("http://x/v1",), "base_url_kind": "lmi"}
    able = capabilities(EngineConfig(Config(engine_options=by_url)))
    with pytest.raises(InvalidPayload, match=r"a server of the kind lmi .* send decisions to that server itself"):
        request_of(NOUL, context=ServerContext("openai", no_labels=able.no_labels))
    with pytest.raises(InvalidPayload, match="'questions': the model has no chat template"):
        request_of(NOUL, context=ServerContext("openvino", vocabulary=Vocabulary([b"a"])))


# -- models and routes -------------------------------------------------------------------------------------------------


class OneAdapter:
    def find(self, name: str) -> Adapter | None:
        return Adapter("sql", 1, "/") if name == "sql" else None

    def by_number(self, number: int) -> Adapter | None:
        return None

    def names(self) -> list[str]:
        return ["sql"]


def test_the_model_may_be_an_adapter_or_what_clients_name_by_default() -> None:
    context = replace(CONTEXT, no_adapters="", adapters=OneAdapter())
    assert request_of(NOUL, context=context, model="sql").adapter == Adapter("sql", 1, "/")
    body = {"state": "s", "questions": {"q": NOUL}}
    for name in ("jev-latest", "strands-decider-latest", None):
        assert value(SYSTEM_ONE, {**body, "model": name}, context=context)["model"] == "model"


@in_one_test("mode", [*INVOCATIONS])
def test_invocations_reads_both_apis_in_each_mode(mode: str) -> None:
    question = {"type": "choice", "instructions": "i", "criteria": {"a": None, "b": None}}
    found = value(mode, {"state": "s", "questions": {"q": question}})
    assert found["answers"]["q"]["choice"] == "a"
    found = value(mode, {"input": "s", "questions": [PREDICATE]})
    assert found["answers"] == [{"type": "predicate", "name": None, "probability": pytest.approx(1 / 3)}]


def test_ignored_names_are_reported() -> None:
    parsed = SYSTEM_ONE.parse({"state": "s", "questions": {"q": NOUL}, "seed": 1, "keep_alive": 5}, CONTEXT)
    assert parsed.ignored == ["seed", "keep_alive"]
    item = {"role": "user", "content": [{"type": "input_text", "text": "a", "weight": 2}], "weight": 1}
    body = {"input": [item], "questions": [PREDICATE], "safety_identifier": "me"}
    assert DECISIONS.parse(body, CONTEXT).ignored == ["input[].weight", "input[].content[].weight", "safety_identifier"]


# -- each rule of a question and of an asset, by its path --------------------------------------------------------------


def refusal(body: Any, context: ServerContext = CONTEXT) -> str:
    with pytest.raises(InvalidPayload) as refused:
        requests(body, context)
    return refused.value.message


def of_question(question: Any) -> str:
    return refusal({"state": "s", "questions": {"q": question}})


@in_one_test(
    ("question", "words"),
    [
        ({"type": "noul"}, "questions.q: needs instructions or criteria"),
        ({"type": "noul", "criteria": {"true": " ", "false": ""}}, "questions.q: needs instructions or criteria"),
        ({"type": "noul", "instructions": 7}, "must be a string, an object, a list or null"),
        ({"type": "score", "criteria": ["a", 7]}, "must be a non-empty string, an object or a list"),
        ({"type": "score", "criteria": ["a", " "]}, "must be a non-empty string, an object or a list"),
        ({"type": "choice", "criteria": {"a": "", " a": ""}}, "is the same option as"),
        ({"type": "choice", "criteria": {" ": "", "a": ""}}, "the name of an option must not be blank"),
        *(
            ({"type": "choice", "criteria": {f"a{control}": "", "b": ""}}, "control characters or line breaks")
            for control in ("\n", "\r", "\t", "\x7f", "\x85", "\u2028", "\u2029")
        ),
        ({"type": "box"}, "only vision models of TypeSafe return boxes"),
    ],
)
def test_a_question_of_system_one_is_refused_by_its_rule(question: Any, words: str) -> None:
    assert words in of_question(question)


def test_a_question_of_system_one_needs_only_one_of_its_texts() -> None:
    for question in (
        {"type": "noul", "criteria": {"true": "x", "false": ""}},
        {"type": "noul", "instructions": "x", "criteria": {"true": "", "false": ""}},
        {"type": "choice", "criteria": {"a\u200d": "", "b": None}},
        {"type": "score", "criteria": ["a", {"b": 1}]},
    ):
        assert len(requests({"state": "s", "questions": {"q": question}})) == 1
    assert "the id of a question must not be blank" in refusal({"state": "s", "questions": {" ": NOUL}})


def test_a_name_of_openais_question_is_its_own_and_not_blank() -> None:
    def named(*names: Any) -> Any:
        return {"input": "s", "questions": [{**PREDICATE, "name": name} for name in names]}

    assert len(requests(named("a", None, "b", None))) == 4
    assert refusal(named("a", "b", "a")) == "questions[2].name: is also the name of questions[0]"
    assert "must not be blank" in refusal(named(" "))


def test_a_predicate_has_a_text_and_other_questions_need_none() -> None:
    choice = {"type": "choice", "choices": [{"value": "a"}, {"value": "b"}], "instructions": " "}
    assert len(requests({"input": "s", "questions": [choice]})) == 1
    words = refusal({"input": "s", "questions": [{**PREDICATE, "instructions": " "}]})
    assert words == "questions[0].instructions: must not be blank"
    for name in (7, None, ["a"]):
        words = refusal({"input": "s", "questions": [{**choice, "choices": [{"value": name}, {"value": "b"}]}]})
        assert "must be a string or a boolean" in words


def test_images_need_a_model_that_sees_wherever_they_stand() -> None:
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": PIXEL}]
    asset = {"<a>": {"type": "image", "data_base64": "AAAA"}}
    bodies: list[dict[str, Any]] = [
        {"input": [{"role": "user", "content": parts}], "questions": [PREDICATE]},
        {"input": "s", "questions": [{**PREDICATE, "instructions": parts}]},
        {"state": "s", "questions": {"q": NOUL}, "images": [PIXEL]},
        {"state": "<a>", "questions": {"q": NOUL}, "assets": asset},
        {"state": SHOWN, "questions": {"q": NOUL}},
    ]
    blind = replace(CONTEXT, no_media={"image": "the model is blind"})
    for body in bodies:
        assert requests(body, SIGHTED)[0].media
        assert "the model is blind" in refusal(body, blind)
    assert len(requests({"state": "s", "questions": {"q": NOUL}, "images": []}, blind)) == 1
    assert "must be a list of URLs" in refusal({"state": "s", "questions": {"q": NOUL}, "images": PIXEL}, SIGHTED)


@in_one_test(
    ("assets", "words"),
    [
        ({}, "assets: must be an object that maps placeholders to images"),
        ([], "assets: must be an object that maps placeholders to images"),
        ({"<a>": 7}, "must be an object with the type image"),
        ({"<a>": {"type": "audio"}}, "must be an object with the type image"),
        ({" ": {"type": "image", "data_base64": "AAAA"}}, "the placeholder of an image must not be blank"),
        ({"<a>": {"type": "image", "data_base64": "AAAA", "x": 1}}, "is not a field of an asset"),
        ({"<a>": {"type": "image", "data_base64": "AAAA", "format": "gif"}}, "must be png, jpg or jpeg"),
        ({"<a>": {"type": "image"}}, "must have either data_base64 or part"),
        ({"<a>": {"type": "image", "data_base64": "AAAA", "part": "p"}}, "must have either data_base64 or part"),
        ({"<a>": {"type": "image", "part": "p"}}, "but the body is not multipart/form-data"),
    ],
)
def test_an_asset_is_refused_by_its_rule(assets: Any, words: str) -> None:
    assert words in refusal({"state": "<a>", "questions": {"q": NOUL}, "assets": assets}, SIGHTED)


def test_assets_may_be_files_of_the_form_each_used_once() -> None:
    def parse(assets: Any, document: Any = None, **files: Any) -> Any:
        whole = {"state": "<a> <b>", "questions": {"q": NOUL}, "assets": assets} if document is None else document
        return SYSTEM_ONE.parse({"request": json.dumps(whole), **files}, SIGHTED).requests[0]

    def asset(part: str, format: str | None = "png") -> dict[str, Any]:
        return {"type": "image", "format": format, "part": part}

    both = {"<a>": asset("one"), "<b>": asset("two", None)}
    media = parse(both, one=Upload(b"1"), two=Upload(b"2")).media
    assert [(source.data, source.name) for source in media] == [(b"1", "assets.<a>.part"), (b"2", "assets.<b>.part")]
    for files, words in (
        ({"one": Upload(b"1")}, "'two' is not a file of the form, or is used twice"),
        ({"one": Upload(b"1"), "two": "text"}, "'two' is not a file of the form, or is used twice"),
        ({"one": Upload(b"1"), "two": Upload(b"2"), "more": Upload(b"3")}, "more: is not the part of an asset"),
        ({"one": Upload(b""), "two": Upload(b"2")}, "the file is empty"),
    ):
        with pytest.raises(InvalidPayload) as refused:
            parse(both, **files)
        assert words.replace("'", "").replace('"', "") in refused.value.message.replace("'", "").replace('"', "")
    with pytest.raises(InvalidPayload, match="used twice"):
        parse({"<a>": asset("one"), "<b>": asset("one")}, one=Upload(b"1"))
    with pytest.raises(InvalidPayload, match="must be a JSON object with 'state' and 'questions'"):
        parse(None, [])
    with pytest.raises(InvalidPayload, match="request"):
        SYSTEM_ONE.parse({"request": "{"}, SIGHTED)
