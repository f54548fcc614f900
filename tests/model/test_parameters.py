"""Parameters on the demo model: those of docs/wire/, and GptManager's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import parameter_matrix as matrix
from tests.app.server import serve
from tests.parameter_matrix import (
    ALL,
    CHAT_VALUES,
    MINDIE_VALUES,
    TGI_VALUES,
    check,
    check_chat,
    check_guide,
    check_tgi,
)
from tests.servers import LiveServer

pytestmark = pytest.mark.model

# -- the parameters of docs/wire/ on the demo model: OpenVINO takes those that the tables do not refuse ----------------


@pytest.mark.parametrize("name", CHAT_VALUES)
def test_chat_on_openvino(model_server: LiveServer, name: str) -> None:
    check_chat(model_server, "openvino", name)


@pytest.mark.parametrize("name", matrix.OBEYS)
def test_answers_follow_their_guides_on_openvino(model_server: LiveServer, name: str) -> None:
    check_guide(model_server, name)


@pytest.mark.parametrize("name", ALL)
def test_openvino(model_server: LiveServer, name: str) -> None:
    check(model_server, "openvino", name)


@pytest.mark.parametrize("name", TGI_VALUES)
def test_tgi_on_openvino(model_server: LiveServer, name: str) -> None:
    check_tgi(model_server, "openvino", name)


@pytest.mark.parametrize("name", MINDIE_VALUES)
def test_mindie(mindie_server: LiveServer, name: str) -> None:
    check_tgi(mindie_server, "openvino", name, heading=matrix.MINDIE)


def test_the_models_own_defaults_hold_where_a_chat_names_none(demo_model: Path) -> None:
    """Of all tokens the most likely: so the engine has got the override's `top_k`, and a client may say otherwise."""
    override = 'option.override_generation_config={"top_k": 1, "max_new_tokens": 12}'
    with serve(str(demo_model), "-o", override) as server:

        def answers(**fields: object) -> set[str]:
            asked = {"messages": [{"role": "user", "content": "Tell me a story."}], **fields}
            replies = [server.post({**asked, "seed": seed}, "/v1/chat/completions").json() for seed in range(2)]
            assert all(reply["usage"]["completion_tokens"] <= 12 for reply in replies)
            return {reply["choices"][0]["message"]["content"] for reply in replies}

        greedy = answers(temperature=0)
        assert answers() == answers(max_tokens=50) == greedy
        assert len(greedy) == 1
        assert len(answers(top_k=0)) > 1


# -- GptManager's tensors on a live model: what they say of it is what LMI's own names say -----------------------------


PROMPT = "The capital of France is"
SIZE = {"max_new_tokens": 12}


def ask(server: LiveServer, prompt: str | None = PROMPT, **parameters: Any) -> Any:
    found = server.post({"inputs": prompt, "parameters": {**SIZE, **parameters}})
    assert found.status_code == 200, found.text
    return found.json()


@pytest.fixture(scope="module")
def plain(model_server: LiveServer) -> Any:
    """The greedy answer, with the prompt's tokens."""
    return ask(model_server, decoder_input_details=True)


def test_ids_of_a_text_are_that_text(model_server: LiveServer, plain: Any) -> None:
    ids = [token["id"] for token in plain["details"]["prefill"]]
    found = ask(model_server, None, input_ids=[ids], details=True, return_full_text=True)
    assert found["generated_text"] == PROMPT + plain["generated_text"]
    assert found["details"]["inputs"] == PROMPT
    assert found["details"]["tokens"] == plain["details"]["tokens"]


def test_outputs_are_the_details_as_tensors(model_server: LiveServer, plain: Any) -> None:
    tokens = plain["details"]["tokens"]
    ids, logprobs = [token["id"] for token in tokens], [token["log_prob"] for token in tokens]
    names = ["output_ids", "sequence_length", "output_log_probs", "cum_log_probs"]
    found = ask(model_server, outputs=names)["outputs"]
    assert found == {
        "output_ids": [ids],
        "sequence_length": [len(ids)],
        "output_log_probs": [[logprobs]],
        "cum_log_probs": [[pytest.approx(sum(logprobs))]],
    }
    body = {"inputs": PROMPT, "parameters": {**SIZE, "streaming": [True], "outputs": names}}
    lines = [json.loads(line)["outputs"] for line in model_server.post(body).text.splitlines()]
    assert [line["output_ids"] for line in lines] == [[[id]] for id in ids]
    assert [line["sequence_length"] for line in lines] == [[1]] * len(ids)
    assert lines[-1]["cum_log_probs"] == [[pytest.approx(sum(logprobs))]]


def test_an_end_token_of_the_clients_ends_as_the_models(model_server: LiveServer, plain: Any) -> None:
    tokens = plain["details"]["tokens"]
    end = tokens[4]["id"]
    first = next(index for index, token in enumerate(tokens) if token["id"] == end)
    details = ask(model_server, end_id=[end], details=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", first + 1)
    details = ask(model_server, stop_words_list=[[end], [1]], details=True)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("stop_sequence", first + 1)


def test_a_word_of_several_tokens_stops_by_its_text(model_server: LiveServer, plain: Any) -> None:
    tokens = plain["details"]["tokens"]
    word, text = [token["id"] for token in tokens[2:4]], "".join(token["text"] for token in tokens[2:4])
    found = ask(model_server, stop_words_list=[[[*word, 0], [2, -1, -1]]], details=True)
    assert found == ask(model_server, stop_sequences=[text], details=True)
    assert found["details"]["finish_reason"] == "stop_sequence"
    assert found["generated_text"] == plain["generated_text"].split(text)[0]


def test_beams_are_rows(model_server: LiveServer) -> None:
    found = ask(model_server, beam_width=[3], pad_id=[0], outputs=["output_ids", "sequence_length"])
    tokens = [found["details"]["tokens"], *(one["tokens"] for one in found["details"]["best_of_sequences"])]
    longest = max(map(len, tokens))
    ids = [[token["id"] for token in own] for own in tokens]
    assert found["outputs"]["sequence_length"] == [len(own) for own in ids]
    assert found["outputs"]["output_ids"] == [[*own, *[0] * (longest - len(own))] for own in ids]


def test_beams_end_at_the_clients_end_token_alone(model_server: LiveServer) -> None:
    wanted: dict[str, Any] = {"beam_width": [3], "length_penalty": 0.0, "early_stopping": True, "details": True}

    def rows(**more: Any) -> list[tuple[list[int], str]]:
        details = ask(model_server, **wanted, **more)["details"]
        rows = [details, *details["best_of_sequences"]]
        return [([token["id"] for token in row["tokens"]], row["finish_reason"]) for row in rows]

    (first, reason), *_ = rows()
    assert (len(first), reason) == (SIZE["max_new_tokens"], "length")
    end = first[3]
    found = rows(end_id=[end])
    assert any((ids[-1], why) == (end, "eos_token") for ids, why in found)
    assert not any(end in ids[:-1] for ids, _ in found)
    assert rows(end_id=[-1]) == rows()
    assert rows(end_id=[2]) == rows(), "the model's own"


def test_the_models_own_end_token_needs_nothing(model_server: LiveServer) -> None:
    """NVIDIA's clients send both ids with each request, whatever else they ask for."""
    ids: dict[str, Any] = {"end_id": [2], "pad_id": [2]}
    assert ask(model_server, **ids, details=True) == ask(model_server, details=True)
    assert ask(model_server, **ids, guided_regex="[0-9]{3}") == ask(model_server, guided_regex="[0-9]{3}")
    tensors = {
        "text_input": ("BYTES", PROMPT),
        "beam_width": ("INT32", 2),
        "end_id": ("INT32", 2),
        "pad_id": ("INT32", 2),
    }
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]}
        for name, (datatype, value) in tensors.items()
    ]
    found = model_server.post({"inputs": inputs}, "/v2/models/model/infer").json()
    assert found["outputs"][0]["shape"] == [2]


def test_a_bias_must_be_as_long_as_the_vocabulary(model_server: LiveServer) -> None:
    found = model_server.post({"inputs": PROMPT, "parameters": {"embedding_bias": [[1.0, 2.0]]}})
    assert found.status_code == 424
    assert "has 2 numbers, but the vocabulary has 49152 tokens" in found.json()["error"]
