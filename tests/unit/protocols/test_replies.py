"""What all dialects' replies share: the output of a sequence, documents and streams, errors, and types as schemas."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Annotated, Any, Literal, TypedDict

import pytest

from handler.core.errors import GenerationFailed, InvalidParameter, InvalidPayload, Overloaded, ServingError
from handler.core.framing import JSON, JSONLINES, SSE
from handler.core.text import Prompt, Vocabulary
from handler.core.values import NO_TOKEN, Delta, Extras, Finish, Pooling, Request, Sampling, Token
from handler.protocols.kernel import errors
from handler.protocols.kernel import reply as replies
from handler.protocols.kernel.context import DEFAULT_MAX_MEDIA
from handler.protocols.kernel.dialect import WithoutEngine, prompt_request
from handler.protocols.kernel.errors import FRONT_END, SERVER, retry_headers
from handler.protocols.kernel.parameters import PARAMETERS, parameter
from handler.protocols.kernel.readers import json_schema, number, regex, show, tgi_grammar
from handler.protocols.kernel.reply import (
    PreparedDocument,
    PromptOnly,
    Reply,
    SequenceOutput,
    TokenStream,
    VectorReply,
    WholeReply,
    finish_of,
    list_parts,
    rank_sequences,
)
from handler.protocols.kernel.schema import NotRequired, components_of, nullable, schema_of_type
from handler.protocols.kernel.stored import too_long
from handler.protocols.kernel.tensors import OutputTensors, document
from handler.protocols.kernel.texts import cosine, embedding_requests
from tests.limits import undocumented
from tests.one_test import in_one_test
from tests.unit.protocols.answers import CAPABLE


def token(id: int, text: str = "a", logprob: float | None = -0.5, *, special: bool = False, top: Any = ()) -> Token:
    return Token(id, text, logprob, special, top)


def delta(*tokens: Token, finish: Finish | None = None, sequence: int = 0, **more: Any) -> Delta:
    return Delta(1, sequence, tokens, finish, **more)


# -- a sequence --------------------------------------------------------------------------------------------------


def test_a_sequence_adds_up_what_it_gets() -> None:
    output = SequenceOutput()
    assert (output.text, output.num_tokens, output.last_id, output.num_values) == ("", 0, -1, 0)
    assert (output.logprob, output.mean_logprob, output.finish) == (0, 0, Finish.ERROR)
    output.take(delta(token(1, "a"), token(2, "<s>", special=True), prefill=[token(9)]))
    output.take(delta(token(-1, "held", None), extras=Extras(num_cached_tokens=3, generation_logits=[[1.0]])))
    output.take(delta(token(3, "b", -1.0), extras=Extras(generation_logits=[[2.0], [3.0]], stop="x")))
    assert (output.text, output.num_tokens, output.last_id) == ("a<s>heldb", 3, 3)
    assert (output.logprob, output.mean_logprob) == (-2.0, -0.5)
    assert (output.prefill, output.rows) == ([token(9)], [[1.0], [2.0], [3.0]])
    assert (output.extras.num_cached_tokens, output.extras.stop) == (3, "x")
    hidden = SequenceOutput(special_in_text=False)
    hidden.take(delta(token(1, "a"), token(2, "<s>", special=True)))
    assert hidden.text == "a"


def test_alternatives_count_as_values() -> None:
    output = SequenceOutput()
    output.take(delta(*[token(1, top=(token(2), token(3)))] * 4, prefill=[token(9)] * 5))
    assert output.num_values == 4 * 3 + 5


@pytest.mark.parametrize(
    ("end", "eos", "wanted"),
    [
        (delta(token(7), finish=Finish.STOP), 7, Finish.EOS),
        (delta(token(6), finish=Finish.STOP), 7, Finish.STOP),
        (delta(token(7), finish=Finish.STOP), None, Finish.STOP),
        (delta(finish=Finish.STOP), 7, Finish.STOP),
        (delta(token(7), finish=Finish.LENGTH), 7, Finish.LENGTH),
        (delta(token(7)), 7, None),
    ],
)
def test_a_stop_at_a_requests_own_end_token_is_its_end(end: Delta, eos: int | None, wanted: Finish | None) -> None:
    assert finish_of(Request("a", eos_token_id=eos), end) is wanted


@pytest.mark.parametrize(
    ("sampling", "ranked"),
    [
        (Sampling(n=2, best_of=3), [1, 2]), (Sampling(n=3), [1, 2, 0]), (Sampling(), [1, 2, 0]),
        (Sampling(num_beams=3, n=2), [0, 1]),
    ],
)  # fmt: skip
def test_the_best_sequences_come_first_and_beams_as_they_are(sampling: Sampling, ranked: list[int]) -> None:
    assert rank_sequences([-3.0, -1.0, -2.0], sampling) == ranked


# -- documents ---------------------------------------------------------------------------------------------------


class Texts(WholeReply):
    """The texts and finish reasons of all sequences."""

    def _document(self) -> Any:
        return [[one.text, one.finish.value] for one in self._sequences]


def test_a_document_comes_when_all_sequences_have_ended() -> None:
    reply = Texts(2)
    reply.start(0, 5)
    assert reply.feed(0, delta(token(1, "a"))) == b""
    assert reply.feed(0, delta(token(1, "b"), finish=Finish.EOS, sequence=1)) == b""
    assert not reply.finished
    body = reply.feed(0, delta(token(1, "c"), finish=Finish.LENGTH))
    assert json.loads(body) == [["ac", "length"], ["b", Finish.EOS.value]]
    assert (reply.finished, reply.content_type) == (True, "application/json")


def test_the_encoder_of_a_document_of_one_sequence_stores_the_tokens() -> None:
    assert Texts(2).token_encoder() is None
    assert VectorReply(1, lambda vectors, count: {}).token_encoder() is None
    reply = Texts(1)
    encode = reply.token_encoder()
    assert encode is not None
    assert reply.feed(0, delta(token(1, "a"))) == encode(token(2, "b")) == b""
    body = reply.feed(0, delta(token(3, "c"), finish=Finish.LENGTH))
    assert json.loads(body) == [["abc", "length"]]


def test_only_the_last_end_of_a_large_document_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_LONG", 4)
    reply, end = Texts(2), delta(token(1), finish=Finish.EOS)
    reply.feed(0, delta(*[token(1)] * 4))
    assert not reply.takes_long(end), "the other sequence goes on"
    reply.feed(0, delta(token(1), finish=Finish.EOS, sequence=1))
    assert [reply.takes_long(one) for one in (end, delta(token(1)))] == [True, False]
    small = Texts(1)
    small.feed(0, delta(*[token(1)] * 4))
    assert not small.takes_long(end)
    small.num_repeated = replies.LONG_TEXT
    assert not small.takes_long(end)
    small.num_repeated += 1
    assert small.takes_long(end)


def test_a_request_for_no_tokens_hides_the_one_that_engines_make() -> None:
    reply = PromptOnly(inner := Texts(1))
    reply.start(0, 3)
    assert inner._num_prompt_tokens == 3
    assert reply.feed(0, delta(token(1), prefill=[token(8)])) == b""
    assert json.loads(reply.feed(0, delta(finish=Finish.EOS))) == [["", "length"]]
    assert (reply.finished, inner._sequences[0].prefill) == (True, [token(8)])


def test_vectors_are_rendered_in_the_order_of_the_requests() -> None:
    reply = VectorReply(2, lambda vectors, count: {"vectors": [list(one) for one in vectors], "tokens": count})
    reply.start(0, 3)
    reply.start(1, 4)
    assert reply.feed(1, delta(finish=Finish.EOS, extras=Extras(vector=[2.0]))) == b""
    body = reply.feed(0, delta(finish=Finish.EOS))
    assert json.loads(body) == {"vectors": [[], [2.0]], "tokens": 7}


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_a_long_list_is_encoded_in_parts(count: int) -> None:
    parts = [*list_parts(range(count))]
    assert json.loads(b"".join(parts)) == [*range(count)]
    assert len(parts) == math.ceil(count / 1024) + 1


def test_a_prepared_document_is_sent_at_once_or_when_its_prompt_is_known() -> None:
    reply = PreparedDocument(b"{}")
    assert (reply.finished, reply.feed(0, delta()), reply.finished) == (False, b"{}", True)
    assert (reply.shows_logprobs, reply.takes_long(delta()), reply.token_encoder()) == (True, False, None)
    parsed = prompt_request(Request("a"), lambda prompt: [prompt.text.encode(), b"!"], FRONT_END, ["x"])
    assert (parsed.ignored, parsed.streams, parsed.requests) == (["x"], False, (Request("a"),))
    assert isinstance(parsed.course, WithoutEngine)
    parsed.course.take(Prompt("text", [1], Vocabulary([b"a"])))
    assert parsed.reply.feed(0, delta()) == b"text!"


# -- streams -----------------------------------------------------------------------------------------------------


class Stream(TokenStream):
    """Each part as a word; the second token of a sequence on is plain."""

    def _head(self) -> bytes:
        return b"head "

    def _token(self, position: int, token: Token) -> bytes:
        self._events[position] = b"plain:%b "
        return f"{position}:{token.text} ".encode()

    def _last(self, position: int, token: Token, finish: Finish) -> bytes:
        return f"{position}:{token.text}|{finish.value}|{self._num_tokens} ".encode()

    def _end(self) -> bytes:
        return b"end"


def test_a_stream_is_a_head_tokens_ends_and_an_end() -> None:
    stream: Reply = Stream(FRONT_END, JSONLINES, 2, 2)
    stream.start(0, 3)
    stream.start(1, 4)
    assert stream.feed(0, delta(token(1, "a"))) == b"head 0:a "
    assert stream.feed(0, delta(token(1, "b"), token(2, "c"))) == b'plain:"b" plain:"c" '
    assert stream.feed(1, delta(token(1, "x"), token(2, "y"), token(3, "z"), sequence=1)) == b'3:x plain:"y" plain:"z" '
    assert stream.feed(0, delta(token(1, "d"), finish=Finish.EOS)) == f"0:d|{Finish.EOS.value}|7 ".encode()
    assert stream.feed(0, delta(finish=Finish.STOP, sequence=1)).startswith(b"1:|")
    assert stream.feed(1, delta(token(1, "e"), token(-1, "f"), finish=Finish.LENGTH)) == b"2:e 2:f|length|8 "
    assert not stream.finished
    assert stream.feed(1, delta(token(2, "g"), finish=Finish.LENGTH, sequence=1)) == b"3:g|length|9 end"
    assert stream.finished
    assert stream.token_encoder() is None


def test_a_streams_encoder_does_as_its_feed() -> None:
    stream = Stream(FRONT_END, JSONLINES)
    assert stream.token_encoder() is None
    stream.feed(0, delta(token(1, "a")))
    encode = stream.token_encoder()
    assert encode is not None
    assert encode(token(2, "b")) == stream.feed(0, delta(token(2, "b"))) == b'plain:"b" '
    assert stream.feed(0, delta(token(3, "c"), finish=Finish.LENGTH)) == b"0:c|length|4 end"
    assert stream._num_tokens == 4


def test_tokens_of_the_cache_are_counted_once_a_request() -> None:
    stream = Stream(FRONT_END, JSONLINES, 2, 2)
    for index in range(2):
        for sequence in range(2):
            stream.feed(index, delta(token(1), sequence=sequence, extras=Extras(num_cached_tokens=5)))
    assert stream._num_cached_tokens == 10


def test_a_failure_is_the_last_value_of_a_stream() -> None:
    for framing, end in ((SSE, SSE.end), (JSONLINES, b"")):
        stream = Stream(FRONT_END, framing)
        assert stream.content_type == framing.content_type
        last = stream.feed(0, delta(finish=Finish.ERROR, error=GenerationFailed("gone")))
        assert last == framing.encode(FRONT_END.body(GenerationFailed("gone"))) + end
        assert stream.finished


# -- errors ------------------------------------------------------------------------------------------------------


def test_errors_of_the_front_end_name_status_type_and_message() -> None:
    error = InvalidPayload("no")
    assert FRONT_END.body(error) == {"code": 424, "type": error.type, "message": "no", "error": "no"}
    assert SERVER.body(error) == {"code": 424, "type": error.type, "message": "no"}
    assert FRONT_END.tail(error) == FRONT_END.body(error)
    whole = FRONT_END.whole(error)
    assert (whole.status, whole.content_type, whole.headers) == (424, JSON.content_type, ())
    assert json.loads(whole.body) == FRONT_END.body(error)
    assert [FRONT_END.status(one) for one in (InvalidParameter("x"), Overloaded("x"), ServingError("x"))] == [
        424, 503, ServingError.status,
    ]  # fmt: skip


@pytest.mark.parametrize("status", [429, 503, 529])
def test_a_busy_server_says_when_to_try_again(status: int) -> None:
    assert retry_headers(status, 1.2345) == (("retry-after", "2"), ("retry-after-ms", "1235"))
    for _ in range(50):
        (_, seconds), (_, milliseconds) = retry_headers(status)
        assert 1 <= int(seconds) <= 4
        assert 1000 <= int(milliseconds) <= 4000


@pytest.mark.parametrize("status", [200, 424, 430, 500, 504, 530])
def test_no_other_status_says_when_to_try_again(status: int) -> None:
    assert retry_headers(status, 1.0) == ()


def test_stored_values_that_are_too_long_name_their_field_and_the_limit() -> None:
    error = too_long("previous_response_id", "the responses", 7)
    assert error.message == "previous_response_id: the responses exceed 7 bytes (max_request_size)"


# -- tensors of an answer ----------------------------------------------------------------------------------------


def test_shorter_sequences_are_padded_and_tokens_of_text_alone_left_out() -> None:
    every = OutputTensors(
        ("output_ids", "sequence_length", "output_log_probs", "cum_log_probs", "context_logits", "generation_logits"), 7
    )
    long, short = [token(1), token(2, logprob=None)], [token(3), NO_TOKEN]
    rows = [(long, [[0.1, 0.2], [0.3, 0.4]]), (short, [[0.5, 0.6], [0.7, 0.8]])]
    assert document(every, rows, [[9.0]]) == {
        "output_ids": [[1, 2], [3, 7]],
        "sequence_length": [2, 1],
        "output_log_probs": [[[-0.5, None], [-0.5, 0.0]]],
        "cum_log_probs": [[-0.5, -0.5]],
        "context_logits": [[[9.0]]],
        "generation_logits": [[[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.6], [0.0, 0.0]]]],
    }
    assert document(every, [([], ())], None)["output_ids"] == [[]]
    assert document(OutputTensors(("output_ids",)), rows, None) == {"output_ids": [[1, 2], [3, -1]]}


# -- values and schemas ------------------------------------------------------------------------------------------


def test_a_value_is_shown_in_eighty_characters() -> None:
    assert show("é" * 78) == '"' + "é" * 78 + '"'
    assert show("a" * 79) == '"' + "a" * 76 + "..."
    assert show([1, 2]) == "[1, 2]"
    assert len(show(["a" * 1000] * 1000)) == 80
    assert len(show("\n" * 1_000_000)) == 80


def test_a_number_is_one_that_an_engine_of_32_bits_has() -> None:
    read = number(-math.inf)
    assert [read(value) for value in (1e-38, 1.1754943508222875e-38, -1e-50)] == [0.0, 1.1754943508222875e-38, 0.0]
    assert read(3.4028234663852886e38) == 3.4028234663852886e38
    for value in (3.5e38, -3.5e38, 10**400, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^must be a number of at least -inf$"):
            read(value)
    with pytest.raises(ValueError, match=r"^must be a number above 0 and below 1$"):
        number(0, 1, above=True, below=True)(1)


def test_structured_output_has_a_length_and_names_what_it_does_not_know() -> None:
    assert regex("a" * 16_384).value == "a" * 16_384
    with pytest.raises(ValueError, match=r"^must have at most 16384 characters; it has 16385$"):
        regex("a" * 16_385)
    with pytest.raises(ValueError, match=r"^must be a regular expression as a non-empty string$"):
        regex("")
    with pytest.raises(ValueError, match=r"^must be a JSON schema, but its text is not JSON$"):
        json_schema("NaN")
    with pytest.raises(ValueError, match=r"^must be a JSON schema object$"):
        json_schema("[]")
    tagged = {"type": "json_schema", "value": {"schema": {"a": 1}, "name": "x", "strict": True}}  # TGI's example
    assert tgi_grammar(tagged).value == '{"a": 1}'
    for wrong, words in (
        ({**tagged, "other": 1}, "has an unknown name 'other'; the names are type, value"),
        (
            {"type": "json_schema", "value": {"schema": {}, "loose": True}},
            "has an unknown name 'loose'; the names are schema, name, strict",
        ),
        ({"type": "json_schema", "value": {"name": "x"}}, "must have a 'value' with 'schema'"),
        ({"type": "regex"}, "must be a regular expression as a non-empty string"),
    ):
        with pytest.raises(ValueError, match=rf"^{words}$"):
            tgi_grammar(wrong)


class Inner(TypedDict):
    name: str


class Outer(TypedDict):
    kind: Literal["a"]
    kinds: Literal["a", "b"]
    items: list[Inner]
    maybe: float | None
    either: str | int | None
    count: Annotated[int, ("minimum", 0)]
    others: dict[str, Any]
    left_out: NotRequired[bool]


def test_types_of_responses_are_schemas() -> None:
    assert components_of([Outer]) == {
        "Inner": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        "Outer": {
            "type": "object",
            "properties": {
                "kind": {"const": "a"},
                "kinds": {"enum": ["a", "b"]},
                "items": {"type": "array", "items": {"$ref": "#/components/schemas/Inner"}},
                "maybe": {"type": ["number", "null"]},
                "either": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
                "count": {"type": "integer", "minimum": 0},
                "others": {"type": "object"},
                "left_out": {"type": "boolean"},
            },
            "required": ["kind", "kinds", "items", "maybe", "either", "count", "others"],
        },
    }
    assert schema_of_type(Any) == {}


@in_one_test(
    ("shape", "wanted"),
    [
        ({"type": "string"}, {"type": ["string", "null"]}),
        ({"type": "null"}, {"type": "null"}),
        ({"type": ["string", "null"]}, {"type": ["string", "null"]}),
        ({"const": 1, "description": "d"}, {"anyOf": [{"const": 1}, {"type": "null"}], "description": "d"}),
        ({"type": "string", "enum": ["a"]}, {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}),
        (
            {"anyOf": [{"const": 1}], "description": "d"},
            {"anyOf": [{"const": 1}, {"type": "null"}], "description": "d"},
        ),
    ],
)
def test_a_nullable_schema_takes_null_too(shape: Any, wanted: Any) -> None:
    assert nullable(shape) == wanted


def test_an_unsupported_parameter_says_so_in_the_document() -> None:
    bare = replace(CAPABLE, unsupported={"seed": "it has none"})
    shown = parameter(PARAMETERS["seed"], bare)
    assert shown["description"] == "Refused: the engine able does not support it: it has none"
    assert parameter(PARAMETERS["seed"], CAPABLE) == {
        "type": ["integer", "null"], "minimum": 0, "maximum": (1 << 64) - 1,
    }  # fmt: skip


def test_embeddings_of_several_texts_are_named_by_their_place() -> None:
    def requests(*texts: Any) -> list[Request]:
        return embedding_requests(texts, "input", Pooling("embed"), CAPABLE)

    (one,) = requests("a")
    first, second = requests("a", (1, 2))
    assert (one.names.prompt, first.names.prompt, second.names.prompt) == ("input", "input[0]", "input[1]")
    assert (first.prompt, first.prompt_ids, second.prompt_ids) == ("a", None, (1, 2))
    assert cosine([0.6, 0.8], [1.0, 0.0]) == 0.6


def test_the_limits_of_media_and_retries_are_documented() -> None:
    least, most = errors.WAIT
    assert not undocumented("wire/README.md", f"random, from {least:g} to {most:g} s")
    assert not undocumented("media.md", f"images in a request | {DEFAULT_MAX_MEDIA} |")
    assert not undocumented("media.md", f"audio files in a request | {DEFAULT_MAX_MEDIA} |")
