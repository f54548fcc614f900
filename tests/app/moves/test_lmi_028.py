"""A move from LMI 0.28's rolling batch: serving.properties, adapters, and a client with boto3.

The old answers are those of djl_python 0.28's own handler and vLLM rolling batch, on a double of vLLM 0.4.2's engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.adapter_files import write_adapter
from tests.app.moves.exchanges import Ask, Reason, by_boto3, check_documented, compare, endpoint
from tests.app.server import serve

PROPERTIES = """\
engine=Python
option.model_id={model}
option.rolling_batch=vllm
option.tensor_parallel_degree=1
option.max_rolling_batch_size=16
option.dtype=fp16
option.max_model_len=1024
option.enable_lora=true
option.max_loras=2
"""

PROMPT = 'one two "three" four five six'
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}], "max_tokens": 5}


def prompt(*, stream: bool = False, **parameters: object) -> Ask:
    body: dict[str, object] = {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, **parameters}}
    return Ask({**body, "stream": True} if stream else body)


ASKED = {
    "plain": prompt(),
    "without parameters": Ask({"inputs": PROMPT}),
    "sampled": prompt(do_sample=True, temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=7),
    "details": prompt(details=True),
    "details, prompt's tokens": prompt(details=True, decoder_input_details=True),
    "full text": prompt(return_full_text=True),
    "stop": prompt(details=True, stop_sequences=[" three", '"three']),
    "stream": prompt(stream=True),
    "stream, details": prompt(stream=True, details=True),
    "stream, prompt's tokens": prompt(stream=True, details=True, decoder_input_details=True),
    "stream, full text": prompt(stream=True, return_full_text=True),
    "stream by a parameter": prompt(output_formatter="jsonlines"),
    "stream as json": prompt(stream=True, output_formatter="json"),
    "sse by a parameter": prompt(stream=True, output_formatter="sse"),
    "adapter": Ask({"inputs": PROMPT, "parameters": {"max_new_tokens": 5}, "adapters": "french"}),
    "adapter, stream": Ask(
        {"inputs": PROMPT, "parameters": {"max_new_tokens": 5}, "adapters": ["french"], "stream": True}
    ),
    "chat": Ask(CHAT),
    "chat, stream": Ask({**CHAT, "stream": True}),
    "chat, logprobs": Ask({**CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0}),
    "chat, logprobs, stream": Ask({**CHAT, "logprobs": True, "top_logprobs": 1, "temperature": 0, "stream": True}),
    "chat, sampled": Ask({**CHAT, "temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["xyz"]}),
    "not JSON": Ask('{"inputs": '),
    "bad parameter": prompt(seed="abc"),
    "bad parameter, details": prompt(seed="abc", details=True),
    "bad parameter, stream": prompt(seed="abc", stream=True),
    "unknown adapter": Ask({"inputs": PROMPT, "adapters": "nobody"}),
    "bad chat": Ask({"messages": "hello"}),
}
BY_OPTION = {name: ASKED[name] for name in ("plain", "details", "stream", "stream, details", "chat", "chat, stream")}

_PAGE = "migrating/README.md"
_FAILED = (
    "status: 200 -> 424",
    "content-type: .* -> None",  # boto3 does not tell it of an error
    r".*\.(code|error): absent -> (number|string)",
    r".*\.details\.(generated_tokens|inputs|tokens): .* -> null",
)
REASONS = [
    Reason(_PAGE, "a failed request", _FAILED, "(not|bad|unknown).*"),
    Reason(_PAGE, "`return_full_text` of a prompt with quotes", ("(text|glue|documents): .*",), "full text"),
    Reason(_PAGE, "log-probabilities of a streamed chat", (r".*\.logprobs: list -> object",), "chat, logprobs, stream"),
]
AS_TGI = Reason(
    _PAGE,
    "`option.tgi_compat=true`: fields",
    (r".*\.(index|special|seed|prefill|input_length|details|generated_text): absent -> .*",),
    "plain|details|stream.*",
)
ENGINE_LACKS = {name for name in ASKED if "prompt's tokens" in name}
"""What the engine echo refuses, as it computes nothing of a prompt."""


def user(directory: Path, model: object, *more: str) -> str:
    (directory / "serving.properties").write_text(
        PROPERTIES.format(model=model) + "".join(f"{line}\n" for line in more)
    )
    for name in ("french", "german"):
        write_adapter(directory / "adapters" / name)
    return str(directory)


@pytest.mark.parametrize(
    ("name", "option", "asked", "reasons"),
    [
        ("lmi_0.28", (), {name: ask for name, ask in ASKED.items() if name not in ENGINE_LACKS}, REASONS),
        ("lmi_0.28_sse", ("option.output_formatter=sse",), BY_OPTION, []),
        ("lmi_0.28_tgi", ("option.tgi_compat=true",), BY_OPTION, [AS_TGI]),
    ],
)
def test_the_client_finds_the_shapes_that_it_had(
    name: str, option: tuple[str, ...], asked: Mapping[str, Ask], reasons: list[Reason], tmp_path: Path
) -> None:
    with serve(user(tmp_path, "some/model", *option), "--engine", "echo") as server, endpoint(server) as runtime:
        used = compare(name, {each: by_boto3(runtime, ask) for each, ask in asked.items()}, reasons)
    check_documented(reasons, used)
    assert "WARNING" not in server.log


@pytest.mark.model
def test_so_does_one_of_a_model(demo_model: Path, tmp_path: Path) -> None:
    """On OpenVINO, without what is vLLM's alone: its name, its precision, adapters, which the demo model has not."""
    user(tmp_path, demo_model)
    properties = tmp_path / "serving.properties"
    lines = properties.read_text().splitlines()
    properties.write_text("\n".join(line for line in lines if not re.search("lora|=vllm|dtype", line)))
    asked = {name: ask for name, ask in ASKED.items() if not name.startswith("adapter")}
    with serve(str(tmp_path), "--engine", "openvino") as server, endpoint(server) as runtime:
        used = compare("lmi_0.28", {each: by_boto3(runtime, ask) for each, ask in asked.items()}, REASONS)
    check_documented(REASONS, used)
