"""What a hostile answer does to a terminal: nothing."""

from __future__ import annotations

import io

import pytest

from deploy.cli.main import main
from deploy.cli.views import for_terminal
from tests.deploy.aws.client.double import Double, says

HOSTILE = "a\x1b]0;title\x07\x9b2J\r\x7f\u202eb\n\tc"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_control_characters_are_seen_on_a_terminal() -> None:
    assert for_terminal(HOSTILE, Terminal()) == "a␛]0;title␇\ufffd2J␍\ufffd\ufffdb\n\tc"


def test_elsewhere_an_answer_is_as_it_came() -> None:
    assert for_terminal(HOSTILE, io.StringIO()) == HOSTILE


def test_what_cannot_be_printed_is_replaced() -> None:
    assert for_terminal("a\ud83db") == "a?b"
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    assert for_terminal("é日", latin) == "é?"


def test_half_a_character_in_an_answer(aws: Double, capsys: pytest.CaptureFixture[str]) -> None:
    aws.answers = [says({"generated_text": "a\ud83d"})]
    assert main(["invoke", "e", "x"]) == 0
    assert '"a?"' in capsys.readouterr().out
