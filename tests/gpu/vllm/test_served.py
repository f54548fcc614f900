"""vLLM behind the embedded server: parameters, streams, chats, and adapters from registering to dropping."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import vllm_forks
from tests.app.server import serve
from tests.gpu.vllm.conftest import SMALL
from tests.model.test_tools import REPEAT, ask, calls
from tests.parameter_matrix import ALL, CHAT_VALUES, TGI_VALUES, check, check_chat, check_tgi
from tests.servers import LiveServer, http, options, wait_for

pytestmark = pytest.mark.vllm

PROMPT = "Once upon a time, in a small village"


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_of_lmis_with_vllm(server: LiveServer, hf_demo: Path, name: str) -> None:
    size = json.loads((hf_demo / "config.json").read_text())["vocab_size"]
    check(server, "vllm", name, unmet={"adapter_id", "lora_task_id"}, vocabulary=size)


@pytest.mark.parametrize("name", CHAT_VALUES)
def test_a_chats_parameter_with_vllm(server: LiveServer, name: str) -> None:
    check_chat(server, "vllm", name)


@pytest.mark.parametrize("name", TGI_VALUES)
def test_a_parameter_of_tgis_with_vllm(server: LiveServer, name: str) -> None:
    check_tgi(server, "vllm", name, unmet={"adapter_id"})


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_stream_is_the_answer_in_pieces_with_vllm(server: LiveServer) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 20, "details": True}}
    whole = server.post(body).json()
    found = lines(server.post({**body, "stream": True}))
    assert [line["token"]["id"] for line in found] == [token["id"] for token in whole["details"]["tokens"]]
    assert "".join(line["token"]["text"] for line in found) == found[-1]["generated_text"] == whole["generated_text"]


def test_a_chat_answers_and_shows_log_probabilities_only_when_asked(server: LiveServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France? Answer with its name."}],
        "temperature": 0,
    }
    plain = server.post({**body, "max_tokens": 12}).json()["choices"][0]
    asked = server.post({**body, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}).json()["choices"][0]
    assert "Paris" in plain["message"]["content"]
    assert plain["logprobs"] is None
    assert asked["message"]["content"] == plain["message"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in asked["logprobs"]["content"])


def test_the_cores_statistics_are_among_the_metrics(server: LiveServer) -> None:
    labels = '{engine="0",model_name="model"}'
    names = [f"vllm:{name}{labels}" for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")]
    before = [server.metric(name) for name in names]
    for _ in range(2):
        server.post({"inputs": PROMPT * 20, "parameters": {"max_new_tokens": 2}})
    wait_for(lambda: all(server.metric(name) > least for name, least in zip(names, before, strict=True)), 5, "no hits")
    wait_for(lambda: server.metric(f"vllm:kv_cache_usage_perc{labels}") == 0, 5, "the cache is not free")


TRITON = "/v2/models/model/generate"


@pytest.mark.parametrize(
    ("kind", "structured_output", "pattern"),
    [
        ("regex", "[0-9]{3}-[0-9]{2}", r"\d{3}-\d{2}"),
        ("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}', r'\{\s*"a"\s*:.*'),
        ("ebnf_grammar", 'root ::= "yes" | "no"', "yes|no"),
        ("json", "", r"\{.*"),
    ],
)
def test_tritons_guided_decoding(server: LiveServer, kind: str, structured_output: str, pattern: str) -> None:
    body = {
        "text_input": PROMPT,
        "max_tokens": 24,
        "guided_decoding_guide_type": kind,
        "guided_decoding_guide": structured_output,
    }
    whole = server.post({**body, "exclude_input_in_output": True}, TRITON).json()["text_output"]
    assert re.fullmatch(pattern, whole, re.DOTALL)
    events = server.post(body, f"{TRITON}_stream").text.removesuffix("\n\n").split("\n\n")
    assert "".join(json.loads(event.removeprefix("data: "))["text_output"] for event in events) == whole


def test_tritons_sequences_and_words(server: LiveServer) -> None:
    body: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 12, "exclude_input_in_output": True}
    plain = server.post(body, TRITON).json()["text_output"]
    word = plain.split()[1]
    assert word not in server.post({**body, "bad_words": [f" {word}"]}, TRITON).json()["text_output"].split()[:2]
    beams = server.post({**body, "beam_width": 3, "return_log_probs": True}, TRITON).json()
    assert len(beams["text_output"]) == len(beams["cum_log_probs"]) == 3
    several = server.post({**body, "num_return_sequences": 2, "top_k": 40, "seed": 1}, TRITON).json()["text_output"]
    assert len(set(several)) == 2


def test_a_client_that_leaves_frees_its_place_with_vllm(server: LiveServer) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1500, "ignore_eos_token": True}, "stream": True}
    with http.stream("POST", f"{server.url}/invocations", json=body, timeout=30) as answer:
        next(answer.iter_lines())
    assert server.post({"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}).status_code == 200
    assert server.metric("lmi_active_sequences") == 0


def make_adapter(directory: Path, seed: int, model: Path) -> Path:
    """A LoRA adapter of random weights in PEFT's form, strong enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, rank = shape["hidden_size"], 4
    value = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, rows in (("q_proj", hidden), ("v_proj", value)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw) * 0.05
            tensors[f"{at}.lora_B.weight"] = torch.randn(rows, rank, generator=draw) * 0.05
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
        "base_model_name_or_path": str(model), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def register(server: LiveServer, source: Path) -> httpx.Response:
    return server.post({"name": source.name, "src": str(source)}, path="/adapters")


class TestAdapters:
    """One that lies there at the start, two that are registered, and none, in an engine that has room for two."""

    @pytest.fixture(scope="module")
    @classmethod
    def model(cls, hf_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        at = tmp_path_factory.mktemp("model")
        for file in hf_demo.iterdir():
            (at / file.name).symlink_to(file)
        make_adapter(at / "adapters" / "mine", 1, hf_demo)
        make_adapter(at / "later", 2, hf_demo)
        make_adapter(at / "last", 3, hf_demo)
        return at

    @pytest.fixture(scope="module")
    @classmethod
    def lora(cls, model: Path) -> Iterator[LiveServer]:
        lora = ["option.enable_lora=true", "option.max_loras=2", "option.max_lora_rank=8"]
        if vllm_forks.on_gpu():
            lora.append("option.dtype=bf16")  # vLLM's kernels for adapters take no other
        with vllm_forks.engines(), serve(str(model), *SMALL, *options(*lora)) as found:
            found.wait_ready(280)
            yield found

    @pytest.mark.parametrize("name", ["adapter_id", "lora_task_id"])
    def test_a_parameter_that_selects_an_adapter(self, lora: LiveServer, name: str) -> None:
        check(lora, "vllm", name)

    @staticmethod
    def answer(lora: LiveServer, adapter: str | None) -> str:
        found = lora.post({"inputs": PROMPT, "parameters": {"max_new_tokens": 6}, "adapters": adapter})
        assert found.status_code == 200, found.text
        return str(found.json()["generated_text"])

    def test_from_registering_to_dropping(self, lora: LiveServer, model: Path) -> None:
        for name in ("later", "last"):
            registered = register(lora, model / name)
            assert registered.status_code == 200, registered.text
        alone = {name: self.answer(lora, name) for name in (None, "mine", "later", "last")}
        assert len(set(alone.values())) == 4
        names = [*alone] * 2
        with ThreadPoolExecutor(len(names)) as pool:
            assert list(pool.map(partial(self.answer, lora), names)) == [alone[name] for name in names]
        assert http.delete(f"{lora.url}/adapters/later", timeout=30).status_code == 200
        refused = lora.post({"inputs": PROMPT, "adapters": "later"})
        assert (refused.status_code, "later" in refused.text) == (424, True)
        assert self.answer(lora, "mine") == alone["mine"]

    def test_a_broken_one_is_refused_and_says_why(self, lora: LiveServer, model: Path, hf_demo: Path) -> None:
        broken = make_adapter(model / "broken", 3, hf_demo)
        (broken / "adapter_model.safetensors").write_bytes(b"junk")
        refused = register(lora, broken)
        assert refused.status_code == 424
        assert "the engine could not load the adapter broken: Error while deserializing header" in refused.text
        assert lora.ping() == 200

    def test_an_adapter_broken_outside_the_engine_fails_its_request_alone(
        self, lora: LiveServer, model: Path, hf_demo: Path
    ) -> None:
        fading = make_adapter(model / "fading", 4, hf_demo)
        assert register(lora, fading).status_code == 200
        alone = [self.answer(lora, name) for name in ("mine", "last")]  # now there is no room for it
        (fading / "adapter_model.safetensors").write_bytes(b"junk")
        refused = lora.post({"inputs": PROMPT, "adapters": "fading"})
        assert (refused.status_code, "deserializing header" in refused.text) == (424, True), refused.text
        assert [self.answer(lora, name) for name in ("mine", "last")] == alone

    @pytest.mark.parametrize("spoil", ["weights", "rank"])
    def test_one_that_would_spoil_every_answer_is_refused(
        self, lora: LiveServer, model: Path, hf_demo: Path, spoil: str
    ) -> None:
        from safetensors.torch import load_file, save_file

        directory = make_adapter(model / f"wrong_{spoil}", 7, hf_demo)
        weights, config = directory / "adapter_model.safetensors", directory / "adapter_config.json"
        tensors, values = load_file(weights), json.loads(config.read_text())
        if spoil == "weights":
            next(iter(tensors.values()))[0, 0] = float("nan")
        else:
            values["r"] = 8
        save_file(tensors, weights)
        config.write_text(json.dumps(values))
        alone = self.answer(lora, None)
        refused = register(lora, directory)
        assert refused.status_code == 424
        assert f"the engine could not load the adapter wrong_{spoil}: " in refused.text
        assert self.answer(lora, None) == alone


# -- OpenAI's routes ---------------------------------------------------------------------------------------------

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CHAT = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "max_tokens": 60}


def test_tools_are_called_where_they_must_be(server: LiveServer) -> None:
    body = {**CHAT, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = server.post(body, "/v1/chat/completions").json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("weather", "tool_calls")
    assert json.loads(call["function"]["arguments"]).keys() == {"city"}
    named = {**CHAT, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    events = server.post({**named, "stream": True}, "/v1/chat/completions").text.split("\n\n")
    deltas = [json.loads(event[6:])["choices"][0]["delta"] for event in events if event.startswith("data: {")]
    pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert len(pieces) > 2
    assert json.loads("".join(pieces)).keys() == {"city"}


def test_a_strict_tools_call_follows_its_schema_with_vllm(server: LiveServer) -> None:
    assert calls(ask(server, *REPEAT)) == [("weather", {"city": "Paris"})]
    ((name, arguments),) = calls(ask(server, *REPEAT, strict=True))
    assert (name, arguments["city"]) == ("weather", "Paris")
    assert arguments["unit"] in ("celsius", "kelvin")
    free, ruled = (ask(server, strict=strict)["message"] for strict in (False, True))
    assert free == ruled


def test_a_completion_has_alternatives_to_its_tokens(server: LiveServer) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 2, "logprobs": 3, "echo": True}
    (choice,) = server.post(body, "/v1/completions").json()["choices"]
    assert choice["text"] == "The capital of France is Paris."
    columns = choice["logprobs"]
    assert columns["tokens"] == ["The", " capital", " of", " France", " is", " Paris", "."]
    first, *prompt = columns["top_logprobs"][:5]
    assert first is None, "nothing comes before it"
    for token, logprob, tops in zip(columns["tokens"][1:], columns["token_logprobs"][1:], prompt, strict=False):
        assert len(tops) in (3, 4), "the three likeliest, and the prompt's own where it is none of them"
        assert tops[token] == logprob
    tops = columns["top_logprobs"][5]
    assert len(tops) == 3
    assert max(tops, key=lambda text: float(tops[text])) == " Paris"
    assert tops[" Paris"] == columns["token_logprobs"][5]


def test_a_schema_shapes_the_answer(server: LiveServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    (choice,) = server.post({**CHAT, "response_format": form}, "/v1/chat/completions").json()["choices"]
    assert json.loads(choice["message"]["content"]).keys() == {"city"}
    assert choice["finish_reason"] == "stop"
