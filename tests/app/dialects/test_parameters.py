"""Parameters over HTTP, in each dialect: one that the engine has, one that it lacks, one that is ignored.

All of them, for all engines, are in tests/unit/protocols/test_parameters.py.
"""

from __future__ import annotations

import pytest

from tests.one_test import in_one_test
from tests.parameter_matrix import TGI_VALUES, check, check_chat, check_tgi
from tests.servers import LiveServer

UNMET = {"adapter_id", "lora_task_id"}
"""What the echo server would serve, if it were started with option.enable_lora=true."""


@in_one_test("name", ["seed", "guided_json", "adapter_id", "input_ids", "random_seed", "lora_task_id"])
def test_echo(echo_server: LiveServer, name: str) -> None:
    check(echo_server, "echo", name, unmet=UNMET)


@pytest.mark.parametrize("name", ["top_p", "top_logprobs", "user"])
def test_chat_on_echo(echo_server: LiveServer, name: str) -> None:
    check_chat(echo_server, "echo", name)


@pytest.mark.parametrize("name", ["top_p", "grammar", "watermark"])
def test_tgi_on_echo(echo_server: LiveServer, name: str) -> None:
    check_tgi(echo_server, "echo", name, unmet=UNMET & TGI_VALUES.keys())
