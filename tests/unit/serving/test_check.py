"""What `lmi serve --check` finds before anything is started: directories and chat templates of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from handler.serving.check import check
from handler.serving.engine import read_local
from handler.serving.start import _describe

DIRECTORIES = ("responses_store", "batches_store", "capture_requests", "sessions_path")


def problems(*options: str, engine: str = "echo") -> list[str]:
    reading = read_local(None, engine, None, ["option.enable_stateful_sessions=true", *options])
    return [problem.message for problem in check(reading)]


@pytest.mark.parametrize("option", DIRECTORIES)
@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none", "broken", "broken/below"])
def test_a_directory_that_cannot_be_used_is_told(option: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere" / "x")
    [message] = problems(f"option.{option}={tmp_path / path}")
    assert "in this directory: " in message
    assert "is not a writable directory" in message


@pytest.mark.parametrize("option", DIRECTORIES)
@pytest.mark.parametrize("path", ["here", "here/new/deep"])
def test_a_directory_that_can_be_used_is_left_as_it_is(option: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    assert problems(f"option.{option}={tmp_path / path}") == []
    assert [*tmp_path.rglob("*")] == [tmp_path / "here"]


def test_words_instead_of_directories_are_no_problem() -> None:
    assert problems("option.responses_store=memory", "option.batches_store=off") == []


def test_limits_that_contradict_each_other_and_a_secret_are_checked(tmp_path: Path) -> None:
    limits = ("option.capture_total_mb=1", "option.capture_file_mb=2")
    assert any("option.capture_file_mb" in told for told in problems(f"option.capture_requests={tmp_path}", *limits))
    [message] = problems("option.compaction_key_file=/proc/none")
    assert "option.compaction_key_file" in message


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{% if %}", "Expected an expression"),
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ messages | nowhere }}", "No filter named 'nowhere'"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", ""),
        ("{{ raise_exception('no') }}{{ strftime_now('%Y') }}{{ tools | tojson }}", ""),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_broken_chat_template_is_told(template: str, wrong: str, in_file: bool, tmp_path: Path) -> None:
    (path := tmp_path / "a.jinja").write_text(template)
    found = problems(f"option.chat_template={path if in_file else template}", f"option.echo_tokenizer={tmp_path}")
    found = [message for message in found if "chat_template" in message]
    assert [wrong in message for message in found] == [True] * bool(wrong)


@pytest.mark.parametrize(
    ("asked", "served", "told"), [(32768, 8192, True), (8192, 8192, False), (100, 100, False), (None, 8192, False)]
)
def test_a_context_above_the_models_is_told(asked: int | None, served: int, told: bool) -> None:
    model: Any = mock.MagicMock()
    model.config.max_model_len, model.info.max_total_tokens, model.replicas = asked, served, []
    assert ("option.max_model_len=32768" in _describe(model)) is told
    assert f"{served} tokens" in _describe(model)
