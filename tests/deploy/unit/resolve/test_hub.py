"""Models that nobody listed: their files on a hub, and the headers of safetensors files."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.data import table
from deploy.errors import SpecError
from deploy.resolve.model.files import Directory, Hub, HubError, hub_to_ask
from deploy.resolve.model.quantization import Contents, contents
from deploy.resolve.model.shape import read_shape, shape_from_table, shape_in_directory
from deploy.resolve.resolver import find_size, resolve
from deploy.spec import Spec
from tests.deploy.cases import LLAMA_CONFIG
from tests.deploy.doubles.hub import HubDouble, Tensors, safetensors_header, serving, write_safetensors
from tests.deploy.unit.resolve.test_model_shape import gguf

# -- models that nobody listed: their size by their files on a hub, which a double on loopback plays -------------------


GIVEN: dict[str, Any] = {
    "name": "mine",
    "role": "arn:aws:iam::111122223333:role/endpoint",
    "image": {"repository": "lmi", "tag": "1-cu130"},
    "model": {"id": "me/mine"},
    "options": {"llm_engine": "vllm"},
}


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    with serving() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield found


def spec(model: str = "me/mine", **options: Any) -> Spec:
    return Spec.model_validate(GIVEN | {"model": {"id": model}, "options": GIVEN["options"] | options})


def file(tensors: Tensors) -> tuple[bytes, int]:
    return safetensors_header(tensors)


LLAMA = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
         "torch_dtype": "bfloat16"}  # fmt: skip
FIRST: Tensors = {
    "model.embed_tokens.weight": ("BF16", (1000, 256)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (512, 256)),
}
SECOND: Tensors = {"model.layers.1.mlp.up_proj.weight": ("BF16", (512, 256)), "lm_head.weight": ("BF16", (1000, 256))}


def test_a_models_size_is_that_of_its_headers(double: HubDouble) -> None:
    weights = {"model-1.safetensors": file(FIRST), "model-2.safetensors": file(SECOND)}
    double.add("me/mine", LLAMA, **weights)
    found = find_size(spec(), hub=Hub())
    assert found.shape is not None
    assert (found.shape.parameters, found.shape.stored) == (774_144, 1_548_288)
    assert (found.shape.layers, found.shape.kv_heads, found.shape.context) == (2, 2, 4096)
    assert (found.source, found.notes) == ("its files on 127.0.0.1", ())


def test_only_the_headers_are_fetched(double: HubDouble) -> None:
    """A checkpoint of 1.5 GB, of which 128 KiB a file are read."""
    big: Tensors = {f"model.layers.{number}.w": ("BF16", (64, 1024, 1024)) for number in range(12)}
    double.add("me/mine", LLAMA | {"num_hidden_layers": 12}, **{"model.safetensors": file(big)})
    shape = find_size(spec(), hub=Hub()).shape
    assert shape is not None
    assert shape.stored == 12 * 64 * 2**21
    assert double.sent < 200_000


@pytest.mark.parametrize(
    "name",
    ["openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3.2", "Qwen/Qwen3-Next-80B-A3B-Instruct", "google/gemma-4-31B-it"],
)
def test_a_familys_config_makes_the_same_cache_listed_or_not(double: HubDouble, name: str) -> None:
    row = next(row for row in table("models")["models"] if name in row["names"])
    double.add("me/mine", {"architectures": ["X"], **row["config"]})
    found, known = find_size(spec(), hub=Hub()).shape, shape_from_table(name)
    assert found is not None
    assert known is not None
    assert found.model_dump(exclude={"parameters"}) == known.model_dump(exclude={"parameters"})


def test_the_hub_is_asked_once_for_a_plan_with_pools(double: HubDouble) -> None:
    double.add("me/mine", LLAMA, **{"model.safetensors": file(FIRST)})
    given = GIVEN | {"instance": {"pools": [{"type": "ml.g6e.xlarge"}, {"type": "ml.g6e.2xlarge"}]}}
    resolve(Spec.model_validate(given), "us-east-1", hub=Hub())
    assert sum(path.startswith("/api/") for path, _ in double.asked) == 1


def test_a_gguf_file_of_a_repository(double: HubDouble) -> None:
    double.models["me/mine"] = double.add(
        "me/mine", LLAMA, **{"a-Q4_K_M.gguf": (gguf(), 10_000), "b.gguf": (gguf(), 5)}
    )
    found = find_size(spec("me/mine/a-Q4_K_M.gguf"), hub=Hub()).shape
    assert found is not None
    assert (found.parameters, found.stored) == (52, len(gguf()) + 10_000)


def test_a_gated_model_is_named_and_the_table_counts(double: HubDouble) -> None:
    double.add("meta-llama/Llama-3.1-8B", LLAMA_CONFIG).gated = True
    found = find_size(spec("meta-llama/Llama-3.1-8B"), hub=Hub())
    assert found.shape == shape_from_table("meta-llama/Llama-3.1-8B")
    assert found.source == "table of known models"
    assert found.notes == (
        "The model's size could not be read from the hub: meta-llama/Llama-3.1-8B on 127.0.0.1 is gated (status 401); "
        "set HF_TOKEN.",
    )


def test_a_token_opens_it_and_goes_to_the_hub_alone(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", double.token)
    with serving() as store:
        store.add("me/mine", LLAMA, **{"model.safetensors": file(FIRST)})
        model = double.add("me/mine", LLAMA, **{"model.safetensors": file(FIRST)})
        model.gated, model.elsewhere = True, store.url
        assert find_size(spec(), hub=Hub()).shape is not None
        assert {token for _, token in double.asked} == {"Bearer hf_good"}
        assert {token for _, token in store.asked} == {None}


def test_a_wrong_token(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    double.add("me/mine", LLAMA).gated = True
    (note,) = find_size(spec(), hub=Hub()).notes
    assert note.endswith("is gated (status 401); accept the model's licence with the token's account.")
    assert "hf_bad" not in note


def test_a_model_that_is_not_there(double: HubDouble) -> None:
    found = find_size(spec("me/none"), hub=Hub())
    assert found.shape is None
    assert found.notes == (
        "The model's size could not be read from the hub: me/none on 127.0.0.1 is gated, private, or missing "
        "(status 401); set HF_TOKEN.",
    )


def test_a_revision(double: HubDouble) -> None:
    double.add("me/mine", LLAMA)
    (note,) = find_size(spec(revision="v2"), hub=Hub()).notes
    assert "(status 401)" in note
    assert double.asked[0][0] == "/api/models/me/mine/revision/v2"


def test_a_hub_that_cannot_be_reached_is_one_line_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        found = find_size(spec("Qwen/Qwen3-8B"), hub=Hub())
    assert found.shape == shape_from_table("Qwen/Qwen3-8B")
    assert len(found.notes) == 1
    assert found.notes[0].startswith(
        "The model's size could not be read from the hub: 127.0.0.1 cannot be reached: URLError: "
    )
    assert "\n" not in found.notes[0]


def test_a_hub_that_does_not_answer_is_given_up(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.resolve.model.files._SECONDS", 0.2)
    double.add("me/mine", LLAMA)
    double.delay = 1.0
    start = time.monotonic()
    (note,) = find_size(spec(), hub=Hub()).notes
    assert "127.0.0.1 cannot be reached" in note
    assert time.monotonic() - start < 30


def test_all_requests_for_a_model_have_one_time(double: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.resolve.model.files._IN_ALL", 0.3)
    double.add("me/mine", LLAMA, **{f"model-{number}.safetensors": file(FIRST) for number in range(100)})
    double.delay = 0.1
    (note,) = find_size(spec(), hub=Hub()).notes
    assert "took more than 0 s" in note or "cannot be reached" in note
    assert len(double.asked) < 60


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((503, b"<html>busy</html>"), "127.0.0.1 responded with status 503"),
        ((404, b""), r"127.0.0.1 has no me/mine \(status 404\)"),
        ((200, b"<html>"), "the model's list of files is not JSON"),
        ((200, b"[" * 100_000), "the model's list of files is nested too deep"),
        ((200, b" " * (17 << 20)), "has more than 16777216 bytes"),
        ((200, b'{"siblings": 7}'), ""),
        (
            (200, b'{"siblings": [7, {}, {"rfilename": 3}, {"rfilename": "config.json", "size": "big"}]}'),
            "config.json is not JSON",
        ),
    ],
)
def test_a_hub_that_answers_nonsense(double: HubDouble, answer: tuple[int, bytes], said: str) -> None:
    double.answers["/api/models/me/mine/revision/main"] = answer
    found = find_size(spec(), hub=Hub())
    assert found.shape is None
    assert [bool(re.search(said, note)) for note in found.notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"{", r"The model's size could not be read from its files on the hub: the model's config.json is not JSON"),
        (json.dumps(LLAMA | {"num_hidden_layers": -1}).encode(), "num_hidden_layers: -1 is not a whole number"),
        (json.dumps(LLAMA | {"vocab_size": 10**300}).encode(), "is not a whole number from 0 to 100000000"),
        (b'{"a": ' * 100_000, "is nested too deep"),
    ],
)
def test_a_config_that_lies_leaves_the_table(double: HubDouble, config: bytes, said: str) -> None:
    double.add("Qwen/Qwen3-8B", config)
    found = find_size(spec("Qwen/Qwen3-8B"), hub=Hub())
    assert found.shape == shape_from_table("Qwen/Qwen3-8B")
    assert len(found.notes) == 1
    assert said in found.notes[0]


def test_a_config_of_100_megabytes_is_not_fetched(double: HubDouble) -> None:
    double.models["me/mine"] = double.add("me/mine", LLAMA)
    double.models["me/mine"].files = {"config.json": (b"{", 100_000_000)}
    (note,) = find_size(spec(), hub=Hub()).notes
    assert "config.json has 100 MB, but at most 17 MB are supported" in note
    assert double.sent == 0


def test_a_header_that_lies_leaves_the_files_sizes(double: HubDouble) -> None:
    double.add("me/mine", LLAMA, **{"model.safetensors": (b"\xff" * 8, 2000)})
    found = find_size(spec(), hub=Hub())
    assert found.shape is not None
    assert found.shape.stored == 2008
    assert "model.safetensors says that its header has 18446744073709551615 bytes" in found.notes[0]


def test_a_hub_without_ranges(double: HubDouble) -> None:
    """It sends a file from its beginning, of which no more than was asked is read; a later piece is refused."""
    long: Tensors = {f"model.layers.{number}.weight": ("BF16", (2,)) for number in range(4000)}
    double.add("me/mine", LLAMA, **{"model.safetensors": (safetensors_header(long)[0], 0)})
    double.ranges = False
    with pytest.raises(HubError, match="does not support range requests"):
        read_shape(Hub().files("me/mine"))


def test_what_plan_says(double: HubDouble) -> None:
    double.add("me/mine", LLAMA, **{"model.safetensors": (b"\xff" * 8, 2000)})
    warnings = resolve(spec(), "us-east-1", hub=Hub()).decision.warnings
    assert sum("estimated from the files' sizes" in warning for warning in warnings) == 1


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline_the_hub_is_not_asked(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert hub_to_ask() is None


def test_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc/passwd")
    with pytest.raises(SpecError, match="HF_ENDPOINT: file:///etc/passwd is not an http or https URL"):
        hub_to_ask()


# -- weights counted by the headers of safetensors files, and headers that lie -----------------------------------------


NAME = "model.safetensors"


def counted(path: Path, tensors: Tensors, bits: int | None = None) -> Contents:
    write_safetensors(path / NAME, tensors)
    return contents(Directory(path), [NAME], bits)


def test_weights_of_16_bits(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", (100, 8)), "model.layers.4.mlp.up_proj.weight": ("BF16", (8, 32))}
    assert counted(tmp_path, tensors) == Contents(1056, 2112, 5)


@pytest.mark.parametrize(
    ("tensors", "bits", "weights"),
    [
        ({"a.qweight": ("I32", (16, 8)), "a.qzeros": ("I32", (1, 1)), "a.scales": ("F16", (1, 8)),
          "a.g_idx": ("I32", (128,))}, 4, 1024),  # AWQ and GPTQ: eight in each number
        ({"a.qweight": ("I32", (16, 8))}, 8, 512),
        ({"a.weight_packed": ("I32", (64, 16)), "a.weight_scale": ("BF16", (64, 4)), "a.weight_shape": ("I32", (2,))},
         4, 8192),  # compressed-tensors
        ({"experts.gate_up_proj_blocks": ("U8", (2, 64, 1, 16)), "experts.gate_up_proj_scales": ("U8", (2, 64, 1))},
         4, 4096),  # gpt-oss
        ({"a.weight": ("F8_E4M3", (256, 256)), "a.weight_scale_inv": ("F32", (2, 2))}, 8, 65536),  # DeepSeek
        ({"a.weight": ("U8", (8, 16)), "a.weight_scale": ("F8_E4M3", (8, 2)), "a.weight_scale_2": ("F32", ()),
          "a.input_scale": ("F32", ())}, 4, 256),  # NVFP4
        ({"a.weight": ("U8", (128, 1)), "a.weight.absmax": ("U8", (4,)), "a.weight.quant_map": ("F32", (16,)),
          "a.weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}, 4, 256),  # bitsandbytes
    ],
    ids=["awq", "gptq-8", "int4", "mxfp4", "fp8", "nvfp4", "nf4"],
)  # fmt: skip
def test_packed_weights_are_counted_singly(tmp_path: Path, tensors: Tensors, bits: int, weights: int) -> None:
    found = counted(tmp_path, tensors, bits)
    assert found.parameters == weights
    assert found.stored == safetensors_header(tensors)[1]


def test_layers_of_encoders_and_drafts_are_none_of_the_models(tmp_path: Path) -> None:
    tensors = {f"{place}.layers.{number}.weight": ("BF16", (1,)) for place, number in
               (("model", 3), ("model.visual", 26), ("audio_tower", 40), ("mtp", 9))}  # fmt: skip
    assert counted(tmp_path, tensors).layers == 4


def lie(**changes: Any) -> bytes:
    said = {"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8], **changes}}
    content = json.dumps(said).encode()
    return struct.pack("<Q", len(content)) + content + b"0" * 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no header, but the file has 0 bytes"),
        (b"0" * 1600, r"says that its header has \d{19} bytes, but the file has 1600 bytes"),
        (struct.pack("<Q", 2**63), "says that its header has 9223372036854775808 bytes"),
        (struct.pack("<Q", 0) + b"{}", "says that its header has 0 bytes"),
        (struct.pack("<Q", 4) + b"{{{{", "the header is not valid JSON: JSONDecodeError"),
        (struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc", "the header is not valid JSON: "),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "the header is not valid JSON: RecursionError"),
        (struct.pack("<Q", 2) + b"[]", "the header is not a JSON object"),
        (struct.pack("<Q", 7) + b'{"a":1}', "'a' is not an object"),
        (lie(shape=[2, 3]), "tensor 'a' has 6 elements, but 8 bytes"),
        (lie(shape=[2, -2]), "'a' has no valid shape"),
        (lie(shape=[2**60]), "'a' has no valid shape"),
        (lie(shape=[1] * 1000), "'a' has no valid shape"),
        (lie(data_offsets=[0, 2**40]), "is outside of the file"),
        (lie(data_offsets=[8, 0]), "is outside of the file"),
        (lie(data_offsets="all"), "'a' has no valid shape"),
    ],
    ids=range(16),
)
def test_headers_that_lie(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(SpecError, match=said):
        contents(Directory(tmp_path), [NAME])


def test_a_header_of_many_megabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000))
        file.truncate(95_000_000)
    with pytest.raises(SpecError, match="the header has 90000000 bytes, but at most 25000000 bytes are supported"):
        contents(Directory(tmp_path), [NAME])


def test_headers_of_hundreds_of_files_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="257 safetensors files"):
        contents(Directory(tmp_path), [str(number) for number in range(257)])


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    tensors = {f"model.layers.{number}.weight": ("BF16", (2,)) for number in range(4000)}
    assert len(safetensors_header(tensors)[0]) > 200_000
    assert counted(tmp_path, tensors) == Contents(8000, 16000, 4000)


def test_a_header_that_lies_leaves_the_files_sizes_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / NAME).write_bytes(b"0" * 1600)
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert (shape.stored, shape.parameters) == (1600, 800)
    assert len(notes) == 1
    assert notes[0].startswith(
        "The number of weights is estimated from the files' sizes: model.safetensors says that its header has "
    )


@pytest.mark.parametrize(("said", "held", "counts"), [(4, 32, 32), (60, 32, 60), (32, 32, 32), (31, 32, 32)])
def test_a_config_that_lies_about_its_layers(tmp_path: Path, said: int, held: int, counts: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_hidden_layers": said}))
    write_safetensors(
        tmp_path / NAME, {f"model.layers.{number}.mlp.up_proj.weight": ("BF16", (2,)) for number in range(held)}
    )
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert shape.layers == counts
    told = [f"config.json says {said} layers, but the files contain {held}. The larger number is used."]
    assert notes == (told if said != held else [])


def test_a_layer_that_predicts_further_tokens_is_no_lie(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"num_nextn_predict_layers": 1}))
    write_safetensors(
        tmp_path / NAME, {f"model.layers.{number}.mlp.up_proj.weight": ("BF16", (2,)) for number in range(33)}
    )
    notes: list[str] = []
    shape = shape_in_directory(tmp_path, notes)
    assert shape is not None
    assert (shape.layers, notes) == (32, [])
