"""SageMaker's secure mode: what each control forbids, named, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from handler.config.loader import read_config
from handler.core.errors import ConfigError
from handler.serving import secure_mode
from handler.serving.check import check
from handler.serving.user_code import model_formatters
from tests.checkpoints.gguf_header import byte_level, write_header
from tests.user_files import write_adapter

SCRIPTS, REQUIREMENTS = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS", "DISALLOW_REQUIREMENTS_TXT"
REMOTE, PICKLE, TEMPLATE = "DISALLOW_TRUST_REMOTE_CODE", "DISALLOW_PICKLE_FILES", "DISALLOW_CHAT_TEMPLATE"
ALL = (SCRIPTS, REQUIREMENTS, REMOTE, PICKLE, TEMPLATE)


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def turn_on(*controls: str, **more: str) -> None:
        monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "true")
        monkeypatch.setenv("SAGEMAKER_SECURITY_CONTROLS", ", ".join(controls))
        monkeypatch.setenv("SAGEMAKER_UNTRUSTED_CHANNELS", str(tmp_path))
        for name, value in more.items():
            monkeypatch.setenv(name, value)

    return turn_on


def refusals(directory: Path, *options: str, engine: str = "echo") -> list[str]:
    """What `lmi serve` refuses a directory for, at --check and when its code would run."""
    (directory / "serving.properties").write_text("\n".join([f"option.llm_engine={engine}", *options]))
    reading = read_config(properties=directory / "serving.properties")
    problems = check(reading, handlers=True)
    messages = {problem.message for problem in problems if problem.name in ALL}
    error: ConfigError | None = None
    try:
        model_formatters(reading.config, directory, handlers=True)
    except ConfigError as refusal:
        error = refusal
    at_start = set() if error is None else {problem.message for problem in error.problems if problem.name in ALL}
    assert messages <= at_start
    assert bool(at_start) <= bool(problems), "--check says that there is no problem"
    return sorted(at_start)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def with_gguf(directory: Path) -> None:
    (directory / "a").mkdir()
    write_header(directory / "a" / "model.gguf", byte_level(**{"tokenizer.chat_template": "{{ x }}"}))


FORBIDDEN: dict[str, list[tuple[Callable[[Path], object], tuple[str, ...], str]]] = {
    SCRIPTS: [
        (lambda d: write(d / "model.py", "raise SystemExit('it ran')"), (), "model.py"),
        (lambda d: None, ("option.entryPoint=mine.py",), "option.entryPoint=mine.py"),
        (lambda d: write(d / "parser.py"), ("option.tool_parser_plugin=parser.py",), "option.tool_parser_plugin"),
        (lambda d: None, ("option.enable_lora=true", "option.adapters_code=true"), "option.adapters_code=true"),
        (
            lambda d: write(write_adapter(d / "adapters" / "a") / "model.py", "x = 1"),
            ("option.enable_lora=true",),
            "adapters/a/model.py",
        ),
    ],
    REQUIREMENTS: [
        (lambda d: write(d / "requirements.txt", "x"), (), "requirements.txt"),
        (lambda d: write(d / "requirements.txt", "x"), ("option.install_requirements=false",), "requirements.txt"),
    ],
    REMOTE: [
        (lambda d: None, ("option.trust_remote_code=true",), "option.trust_remote_code=true"),
        (lambda d: None, ("option.trust_remote_code=True",), "option.trust_remote_code=true"),
    ],
    PICKLE: [
        *(
            (lambda d, n=name: write(d / "deep" / n), (), name)
            for name in ("a.bin", "b.PT", "c.pth", "d.ckpt", "e.Pkl")
        ),
        (lambda d: write_adapter(d / "adapters" / "a", weights="adapter_model.bin"), (), "adapter_model.bin"),
    ],
    TEMPLATE: [
        (lambda d: write(d / "tokenizer_config.json", json.dumps({"chat_template": "x"})), (), "tokenizer_config.json"),
        (lambda d: write(d / "a" / "chat_template.jinja", "x"), (), "chat_template.jinja"),
        (lambda d: write(d / "additional_chat_templates" / "tools.jinja", "x"), (), "tools.jinja"),
        (lambda d: write(d / "chat_template.json", json.dumps({"chat_template": "x"})), (), "chat_template.json"),
        (lambda d: None, ("option.echo_tokenizer=demo", "option.chat_template={{ x }}"), "option.chat_template"),
        (with_gguf, (), "model.gguf"),
    ],
}


@pytest.mark.parametrize(
    ("control", "number"), [(control, number) for control, rows in FORBIDDEN.items() for number in range(len(rows))]
)
def test_a_control_forbids_by_name_what_it_is_for(
    control: str, number: int, tmp_path: Path, secure: Callable[..., None]
) -> None:
    """The control alone, and no other control."""
    prepare, options, named = FORBIDDEN[control][number]
    prepare(tmp_path)
    if number or control != SCRIPTS:  # that file would run
        secure(*(other for other in ALL if other not in (control, SCRIPTS)))
        assert refusals(tmp_path, *options) == []
    secure(control)
    (message,) = {*refusals(tmp_path, *options)}
    assert named in message
    assert message.endswith(f": {control} (SAGEMAKER_SECURITY_CONTROLS) forbids it")


def test_a_plain_model_passes_all_controls(tmp_path: Path, secure: Callable[..., None]) -> None:
    write(tmp_path / "model.safetensors")
    write(tmp_path / "tokenizer_config.json", "{}")
    write_header(tmp_path / "model.gguf", byte_level())
    write_adapter(tmp_path / "adapters" / "a")
    secure(*ALL)
    assert refusals(tmp_path, "option.enable_lora=true", "option.trust_remote_code=false") == []
    assert refusals(tmp_path, "option.entryPoint=djl_python.huggingface") == []
    write(tmp_path / "openvino_model.bin")
    (message,) = {*refusals(tmp_path)}
    assert "openvino_model.bin" in message
    write(tmp_path / "openvino_model.xml")
    assert {*refusals(tmp_path)} == {message}, "another engine may unpickle it"
    config = read_config(overrides=["option.llm_engine=openvino", f"option.model_id={tmp_path}"]).config
    secure_mode.check_secure_mode(config, tmp_path, [])


def test_code_runs_where_secure_mode_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "model.py", f"open({str(tmp_path / 'ran')!r}, 'w').close()\nfrom handler.formatters import *\n")
    monkeypatch.setenv("SAGEMAKER_SECURITY_CONTROLS", ",".join(ALL))
    monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "false")
    assert refusals(tmp_path) == []
    (tmp_path / "ran").unlink()
    monkeypatch.setenv("SAGEMAKER_SECURE_MODE", "TRUE")
    assert refusals(tmp_path) != []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", [True, 1, 2, "true", "yes", "On", " 1 ", "t", [0], {"a": 0}])
def test_no_spelling_of_an_engine_s_argument_runs_code(
    value: object, tmp_path: Path, secure: Callable[..., None]
) -> None:
    arguments = json.dumps({"trust_remote_code": value})
    options = ["option.llm_engine=vllm", f"option.model_id={tmp_path}"]
    config = read_config(overrides=[*options, f"option.engine_args={arguments}"]).config
    secure(REMOTE)
    with pytest.raises(ConfigError, match=f"option.trust_remote_code=true: {REMOTE}"):
        secure_mode.check_secure_mode(config, tmp_path, [])
    for off in (False, 0, None, "false", "Off", ""):
        given = f"option.engine_args={json.dumps({'trust_remote_code': off})}"
        config = read_config(overrides=[*options, given]).config
        secure_mode.check_secure_mode(config, tmp_path, [])


@pytest.mark.parametrize(
    ("controls", "channels", "message"),
    [
        ("", "", "SAGEMAKER_SECURE_MODE=true needs SAGEMAKER_SECURITY_CONTROLS, which is not set"),
        ("DISALLOW_TELNET", "", "does not know the control 'DISALLOW_TELNET', and so cannot honor it"),
        (PICKLE, "/absent/channel", "SAGEMAKER_UNTRUSTED_CHANNELS: /absent/channel is not a directory"),
    ],
)
def test_what_cannot_be_honored_is_refused(
    controls: str, channels: str, message: str, secure: Callable[..., None], tmp_path: Path
) -> None:
    secure(controls, SAGEMAKER_UNTRUSTED_CHANNELS=channels)
    with pytest.raises(ConfigError, match=message):
        secure_mode.check_secure_mode(read_config(overrides=["option.llm_engine=echo"]).config, tmp_path, [])


def test_without_channels_the_model_s_directories_are_searched(tmp_path: Path, secure: Callable[..., None]) -> None:
    secure(PICKLE, SAGEMAKER_UNTRUSTED_CHANNELS="", SAGEMAKER_MODEL_PATH=str(tmp_path / "ml"))
    assert refusals(tmp_path) == []
    for place in ("here", "ml"):
        file = write(tmp_path / place / "x.pt")
        (message,) = {*refusals(tmp_path, f"option.model_id={tmp_path / 'here'}")}
        assert str(file) in message
        file.unlink()


@pytest.mark.parametrize(
    ("control", "file"), [(SCRIPTS, "model.py"), (REQUIREMENTS, "requirements.txt"), (PICKLE, "adapter_model.bin")]
)
def test_an_adapter_that_a_client_registers_is_checked_too(
    control: str, file: str, tmp_path: Path, secure: Callable[..., None]
) -> None:
    path = write_adapter(tmp_path / "a")
    write(path / file)
    secure(*(other for other in ALL if other != control))
    assert not secure_mode.adapter_problem(path)
    secure(control)
    problem = secure_mode.adapter_problem(path)
    assert problem.endswith(f"{file}: {control} (SAGEMAKER_SECURITY_CONTROLS) forbids it")
