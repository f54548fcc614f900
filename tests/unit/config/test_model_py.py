"""What the `handle` of a model.py is, by its text and the configuration; nothing of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from handler.config.loader import Reading, read_server_config
from handler.config.user_files import describe_model_py
from handler.core.values import Role
from handler.serving.check import check
from handler.serving.engine import downloads_of

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


def test_an_image_may_name_an_engine_that_a_handle_needs_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPTION_LLM_ENGINE", "vllm")
    assert reading(tmp_path, PLAIN).config.handle_role is Role.ALONE
    assert reading(tmp_path, PLAIN, engine="echo").config.handle_role is Role.FIRST
    monkeypatch.setenv("SM_VLLM_MODEL", "org/model")
    monkeypatch.delenv("OPTION_LLM_ENGINE")
    assert reading(tmp_path, PLAIN).config.handle_role is Role.NONE


def test_where_it_answers_alone_options_are_its_own_and_no_engine_is_checked(tmp_path: Path) -> None:
    options = "option.model_id=s3://bucket/x/\noption.dtype=int3\noption.tgi_compt=1\noption.height=5\nbatch_size=2\n"
    found = reading(tmp_path, PLAIN, options)
    assert not check(found, handlers=True)
    assert (found.engine, found.config.model_id, found.config.batch_size) == ("echo", None, 2)
    assert found.config.settings["option.tgi_compt"] == "1"
    assert downloads_of(found.config, found.engine) == {"option.model_id": "s3://bucket/x/"}
    (warning,) = found.config.warnings
    assert warning.startswith("no engine is loaded: the function handle of model.py answers alone")
    wrong = reading(tmp_path, PLAIN, "option.predict_timeout=soon\nbatch_size=none\n")
    assert [one.name for one in check(wrong, handlers=True)] == ["option.predict_timeout", "batch_size"]


def test_an_entry_point_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    found = reading(tmp_path, None, "option.entryPoint=model.py\n")
    assert [one.message for one in found.problems] == ["option.entryPoint=model.py: there is no such file"]


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (PLAIN, "", "handle answers alone: no engine is loaded"),
        (f"@input_formatter\ndef read(i):\n    pass\n{PLAIN}", "",
         "handle answers alone: no engine is loaded; input_formatter read (not called beside handle)"),
        (f"@a.output_formatter\ndef write(i):\n    pass\n{PLAIN}", VLLM,
         "handle is tried first; what it answers with None goes to the engine; output_formatter write"),
        (PLAIN, "option.entryPoint=handler.entry\n",
         "handle is not called: option.entryPoint=handler.entry does not call it"),
        (THEIRS, "", "no handle, no formatter"),
    ],
)  # fmt: skip
def test_the_check_says_what_is_called(text: str, options: str, wanted: str, tmp_path: Path) -> None:
    found = describe_model_py(tmp_path / "model.py", reading(tmp_path, text, options).config)
    assert found == f"{tmp_path}/model.py: {wanted}"
