"""Our server holds every rule, in each of its modes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from proof.conform.run import Plan, run
from proof.conform.server import Asking
from tests.app.server import serve
from tests.moving.conform.test_rules import LIFETIME, LIMITS
from tests.servers import options

ANY = (
    "option.echo_tokens_per_second=1000",
    "option.enable_lora=true",
    "option.enable_stateful_sessions=true",
    "option.max_model_len=5000",
)
MODES = {
    "rolling batch": ((), ("sagemaker", "lmi-0.28", "openai", "anthropic", "triton")),
    "async": (("option.lmi_version=0.38",), ("sagemaker", "lmi-0.38", "openai")),
    "tgi": (("option.tgi_compat=true", "option.tgi_metrics=true"), ("sagemaker", "tgi")),
}
"""Options, and the profiles that they are for."""


@pytest.mark.parametrize("mode", MODES)
def test_our_server_holds_every_rule(tmp_path: Path, mode: str) -> None:
    more, profiles = MODES[mode]
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (tmp_path / "adapter_model.safetensors").touch()
    limits = replace(LIMITS, payload=25_000_000)
    with serve("--engine", "echo", *options(*ANY, *more), env={"LMI_API_KEY": "a-key"}) as server:
        asking = Asking(server.url, key="a-key", adapter=f"sql={tmp_path}", limits=limits)
        results = run(Plan(asking, profiles), None, lambda result: None)
    assert [result for result in results if result.verdict == "failed"] == []
    left_out = {result.rule.id for result in results if result.verdict == "not asked"}
    assert left_out == {*LIFETIME, "limits.long-stream"}
