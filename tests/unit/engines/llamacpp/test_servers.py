"""What llama-servers report about themselves, and what their refusals of texts say."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handler.config import gguf
from handler.config.config import Config
from handler.core.errors import ConfigError
from handler.core.values import Sampling, StructuredOutput, Task
from handler.engines.base import EngineConfig
from handler.engines.llamacpp import parameters, pooling, readable, servers
from handler.engines.llamacpp.kind import LlamaCppKind
from handler.engines.llamacpp.parameters import Leg, Penalties
from handler.engines.remote.servers import Failed
from tests.one_test import in_one_test
from tests.unit.config.gguf_files import gguf_file, matrix, pair, string

# -- /props ------------------------------------------------------------------------------------------------------------


def props(**fields: Any) -> bytes:
    return json.dumps({"default_generation_settings": {"n_ctx": 512}, "total_slots": 4, **fields}).encode()


def test_a_server_s_model_is_what_it_reports() -> None:
    model = servers._described("name", props())
    assert (model.name, model.max_tokens, model.num_slots, model.projector) == ("name", 512, 4, None)
    images = servers._described("name", props(modalities={"vision": True}, media_marker="<m>"))
    assert images.projector is not None
    assert images.projector.marker == "<m>"
    assert servers._described("", props(default_generation_settings={"n_ctx": 1}, total_slots=1))[1:3] == (1, 1)


def test_what_a_server_does_not_report_is_unknown_and_not_zero() -> None:
    for number in (0, -1, None, "7", True, 1.5):
        assert servers._described("", props(default_generation_settings={"n_ctx": number})).max_tokens is None
        assert servers._described("", props(total_slots=number)).num_slots == 1
    assert servers._described("", b"{}")[1:3] == (None, 1)
    for data in (b"[]", b"?", b"7", b'{"default_generation_settings": [1]}'):
        with pytest.raises(Failed, match="does not describe its model"):
            servers._described("", data)


def responding(monkeypatch: pytest.MonkeyPatch, *responses: bytes | BaseException) -> tuple[str, ...]:
    monkeypatch.setattr(servers, "_ask_props", lambda urls: [*responses])
    servers.has_projector.cache_clear()
    return tuple(f"http://{number}/v1" for number in range(len(responses)))


def test_servers_read_images_if_one_of_them_does_or_none_responds(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = props(modalities={"vision": True}, media_marker="<m>")
    kinds: dict[bytes | Exception, bool | None] = {reads: True, props(): False, OSError("gone"): None, b"?": None}
    for size in (1, 2, 3):
        for responses in itertools.product(kinds, repeat=size):
            known = [kinds[response] for response in responses if kinds[response] is not None]
            urls = responding(monkeypatch, *responses)
            assert servers.has_projector(urls) is (any(known) or not known)


def test_the_served_file_is_that_of_the_first_server_that_has_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    here, elsewhere = props(model_path=str(file)), props(model_path=str(tmp_path / "gone.gguf"))
    too_long = props(model_path="x" * 5000)
    for others in ((), (OSError("gone"),), (elsewhere,), (props(), b"?", too_long, props(model_path=7), b"[]")):
        assert servers.served_path(responding(monkeypatch, *others, here, elsewhere)) == file
    with pytest.raises(ConfigError) as failed:
        servers.served_path(responding(monkeypatch, OSError("is gone"), elsewhere, props(model_path=None)))
    words = str(failed.value)
    assert "http://0/v1: is gone" in words
    assert f"http://1/v1: its file '{tmp_path}/gone.gguf' is not on this machine" in words
    assert "http://2/v1: it does not report its file" in words


def test_the_api_of_the_server_itself_is_beside_that_of_openai() -> None:
    assert [servers.root(url) for url in ("http://a/v1", "http://a", "http://a/v1/x")] == [
        *("http://a", "http://a", "http://a/v1/x")
    ]


def test_a_file_is_served_by_llama_cpp_and_other_models_as_by_other_kinds(tmp_path: Path) -> None:
    kind, config = LlamaCppKind(), EngineConfig()
    assert kind.directory("owner/model", config) is None
    assert kind.directory(str(tmp_path), config) is None
    assert kind.checks_structured_output(())


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_embeddings_are_read_as_they_are_and_not_normalized() -> None:
    draw = random.Random(51)
    for count in (0, 1, 3):
        vectors = [[draw.uniform(-1, 1) for _ in range(4)] for _ in range(count)]
        assert pooling._embeddings(json.dumps([{"embedding": vectors}]).encode()) == vectors
    assert pooling._embedding((1, 2)) == {"content": [1, 2], "embd_normalize": -1}


@in_one_test(
    "value",
    [[], {}, 7, [{}], [{"embedding": 7}], [{"embedding": [7]}], [{"embedding": [["7"]]}], [{"embedding": []}] * 2],
)
def test_embeddings_that_cannot_be_read_are_a_failure(value: Any) -> None:
    with pytest.raises(Failed, match="sent a response that cannot be read"):
        pooling._embeddings(json.dumps(value).encode())


def test_a_refusal_of_a_long_text_tells_the_size_of_a_batch() -> None:
    words = "input (513 tokens) is too large to process. increase the physical batch size (current batch size: 512)"
    assert pooling._batch_size(words) == 512
    for other in (words.replace("too large", "too long"), words.replace("512)", ")"), words.replace("current", ""), ""):
        assert pooling._batch_size(other) is None


@in_one_test(
    ("task", "pooling_of", "by_url", "words"),
    [
        (Task.GENERATION, "mean", False, ""),
        (Task.EMBEDDING, "auto", False, ""),
        *((Task.EMBEDDING, name, False, "") for name in ("cls", "last", "mean")),
        (Task.EMBEDDING, "max", False, "llama-server supports cls, last, mean"),
        (Task.EMBEDDING, "mean", True, "omit the option, and start llama-server with `--pooling mean`"),
        (Task.RERANK, "auto", True, ""),
        (Task.RERANK, "mean", False, "it applies only to embeddings; omit the option"),
        (Task.CLASSIFICATION, "auto", False, "llama-server returns only one score per text"),
    ],
)
def test_a_pooling_that_the_server_does_not_have_is_refused(
    task: Task, pooling_of: str, by_url: bool, words: str
) -> None:
    options: dict[str, Any] = {"base_url": ("http://a",)} if by_url else {}
    config = EngineConfig(Config(pooling=pooling_of, engine_options=options), task=task)
    if not words:
        parameters.check_pooling(config)
        return
    with pytest.raises(ConfigError) as failed:
        parameters.check_pooling(config)
    assert words in str(failed.value)


# -- parameters --------------------------------------------------------------------------------------------------------


def logit_changes(body: dict[str, Any], prompt: Sequence[int], response: Sequence[int]) -> dict[int, float]:
    """What a server adds to the logits of the next token: the biases, and its penalty for each earlier token."""
    changes = {id: value for id, value in body["logit_bias"] if value is not False}
    for id in (*prompt, *response):
        changes[id] = changes.get(id, 0.0) - body["frequency_penalty"]
    return changes


def test_penalties_count_the_response_and_not_the_prompt() -> None:
    """Whichever way is taken, the logits of the next token are changed as the parameters say."""
    draw = random.Random(52)
    for _ in range(100):
        presence, frequency = draw.choice((0.0, 0.5, -1.0)), draw.choice((0.0, 0.25, -0.5, 2.0))
        prompt, response = draw.choices(range(5), k=draw.randrange(9)), draw.choices(range(5), k=draw.randrange(6))
        if draw.random() < 0.2:
            prompt += [7] * 600  # beyond what floats of 32 bits take back
        sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency, max_new_tokens=20)
        penalties = Penalties.of(sampling, prompt)
        assert penalties.single is (bool(presence) or (7 in prompt and frequency == 2.0))
        leg = penalties.added_to(Leg([*prompt, *response], 9), response)
        assert leg.max_tokens == (1 if penalties.single else 9)
        changes = logit_changes(parameters.completion(sampling, leg, 100), prompt, response)
        for id in {*prompt, *response}:
            expected = -(frequency * response.count(id) + (presence if id in response else 0))
            assert changes.get(id, 0.0) == pytest.approx(expected, abs=1e-9)


def test_penalties_that_the_server_cannot_have_together_are_refused() -> None:
    for penalized in (Sampling(presence_penalty=0.5), Sampling(frequency_penalty=0.5)):
        with pytest.raises(ValueError, match="cannot be combined with repetition_penalty"):
            Penalties.of(penalized._replace(repetition_penalty=1.1), ())
    rule = StructuredOutput("json_object", "")
    with pytest.raises(ValueError, match="presence_penalty cannot be combined with structured output"):
        Penalties.of(Sampling(presence_penalty=0.5, structured_output=rule), ())
    Penalties.of(Sampling(frequency_penalty=0.5, structured_output=rule), (1,))
    Penalties.of(Sampling(repetition_penalty=1.1), ())


def test_a_body_for_log_probabilities_asks_for_one_greedy_token_and_no_more() -> None:
    body = parameters.scores((1, 2), 7)
    assert (body["prompt"], body["n_predict"], body["stream"], body["n_probs"]) == ([1, 2], 1, False, 7)
    assert (body["temperature"], body["top_k"], body["logit_bias"], body["ignore_eos"]) == (0.0, 1, [], False)
    assert body["grammar"]


def test_a_body_has_what_the_request_says() -> None:
    drawn = Sampling(do_sample=True, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, typical_p=0.75, seed=5)
    body = parameters.completion(drawn, Leg((1, 2), 9, number=2), 100)
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "n_predict", "repeat_last_n", "prompt")
    assert [body[name] for name in names] == [0.5, 3, 0.25, 0.125, 0.75, 7, 9, 100, [1, 2]]
    nucleus = parameters.completion(drawn._replace(top_p=0), Leg((), 1), 9)
    assert (nucleus["top_k"], nucleus["top_p"]) == (1, 1.0), "the smallest nucleus is one token"
    greedy = parameters.completion(Sampling(), Leg((), 1), 9)
    assert (greedy["temperature"], greedy["top_k"], greedy["stream"]) == (0.0, 1, True)
    last = parameters.completion(drawn._replace(seed=0xFFFFFFFE), Leg((), 1, number=1), 9)
    assert last["seed"] == 0, "the largest number of 32 bits is no seed"
    for count, tells in ((255, False), (256, True)):
        assert ("return_progress" in parameters.completion(Sampling(), Leg([1] * count, 1), 999)) is tells
    with pytest.raises(ValueError, match="allowed_token_ids cannot be combined with repetition_penalty"):
        parameters.completion(Sampling(allowed_token_ids=(1,), repetition_penalty=2.0), Leg((), 1), 9)
    parameters.completion(Sampling(allowed_token_ids=(1,)), Leg((), 1), 9)


def test_biases_are_added_and_forbidden_tokens_stay_forbidden() -> None:
    sampling = Sampling(
        logit_bias=((1, 2.0), (2, 1.0)), allowed_token_ids=(1, 3, 4), bad_token_ids=(4,), stop_token_ids=(9,)
    )
    leg = Leg((), 1, bias={1: 0.5, 5: -1.0})
    bias = dict(parameters.completion(sampling, leg, 9)["logit_bias"])
    assert bias == {1: 1002.5, 2: 1.0, 3: 1000.0, 4: False, 5: -1.0}
    without = parameters.completion(sampling, leg._replace(without_end=True), 9)
    assert dict(without["logit_bias"]) == {**bias, 9: False}


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_llama_cpp_reads_has_a_remedy_and_others_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"

    def header(architecture: bytes, kind: int) -> gguf.Header:
        path.write_bytes(gguf_file(pair(b"general.architecture", 8, string(architecture)), tensors=matrix(kind)))
        with path.open("rb") as file:
            return gguf.read_header(file)

    known = header(b"llama", 8)
    assert readable.unreadable(known) == ""
    assert readable.remedy(known).startswith("use --engine llamacpp")
    for other, words in (
        (header(b"unheard-of", 8), "has the architecture unheard-of"),
        (header(b"llama", 77), "weights, which llama.cpp"),
    ):
        assert words in readable.unreadable(other)
        assert readable.remedy(other) == ""
