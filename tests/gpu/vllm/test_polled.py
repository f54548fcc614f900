"""vLLM's own classes: its client without an output thread, and its arguments as options."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from handler.config.loader import read_config
from handler.config.options.engine_arguments import engine_arguments
from handler.core.errors import ConfigError
from handler.engines.base import Interrupted
from handler.engines.vllm.arguments import construct
from handler.engines.vllm.arguments import engine_arguments as keywords
from handler.engines.vllm.inline_client import inline_client, patch_sync_client
from handler.serving.engine import engine_spec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # vLLM's own

# -- vLLM's client without its output thread, against messages as its core sends them ----------------------------------


class Core(NamedTuple):
    """The other end of a client."""

    client: Any
    socket: Any
    dead: bytes

    def send(self, **fields: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackEncoder

        self.socket.send_multipart(MsgpackEncoder().encode(EngineCoreOutputs(**fields)))

    def answer(self, value: Any) -> None:
        """To the call that the client waits for."""
        from vllm.v1.engine import UtilityOutput, UtilityResult

        while not self.client.utility_results:
            pass
        (call_id,) = self.client.utility_results
        self.send(utility_output=UtilityOutput(call_id=call_id, result=UtilityResult(value)))


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    import zmq
    from vllm.v1.engine import EngineCoreOutputs, core_client
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.serial_utils import MsgpackDecoder

    with zmq.Context() as context, context.socket(zmq.PUSH) as ours:

        def connected(client: Any, asyncio_mode: bool, *of_the_core: Any) -> None:
            client.resources = core_client.BackgroundResources(ctx=context)
            client._finalizer = SimpleNamespace(detach=lambda: None)
            client.resources.output_socket = context.socket(zmq.PULL)
            client.resources.output_socket.bind("inproc://outputs")
            client.decoder, client.utility_results = MsgpackDecoder(EngineCoreOutputs), {}

        inline = inline_client(core_client)
        assert inline is not None
        monkeypatch.setattr(core_client.MPClient, "__init__", connected)
        monkeypatch.setattr(core_client.SyncMPClient, "_send_input", lambda *of_a_call: None)
        config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
        client = inline(config, None, False)
        ours.connect("inproc://outputs")
        yield Core(client, ours, EngineCoreProc.ENGINE_CORE_DEAD)
        client.shutdown()
        assert client._socket.closed


def test_the_client_of_this_vllm_is_replaced_while_engines_are_made() -> None:
    from vllm.v1.engine import core_client

    ordinary = core_client.SyncMPClient
    with patch_sync_client():
        assert core_client.SyncMPClient is not ordinary
        assert issubclass(core_client.SyncMPClient, ordinary)
    assert core_client.SyncMPClient is ordinary


@pytest.mark.parametrize("change", ["another attribute", "no function for utilities", "no queue"])
def test_another_client_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    from vllm.v1.engine import core_client

    def longer(self: Any) -> None:
        self.is_dp = self.outputs_queue = self.output_queue_thread = None
        self.resources.output_socket = self.resources.shutdown_path = self.new = None

    def other(self: Any) -> None:
        self.is_dp = None

    match change:
        case "another attribute":
            monkeypatch.setattr(core_client.SyncMPClient, "__init__", longer)
        case "no queue":
            monkeypatch.setattr(core_client.SyncMPClient, "__init__", other)
        case _:
            monkeypatch.delattr(core_client, "_process_utility_output")
    ordinary = core_client.SyncMPClient
    with caplog.at_level(logging.INFO, "handler.engine"), patch_sync_client():
        assert core_client.SyncMPClient is ordinary
    assert caplog.messages == ["unknown vLLM client: outputs are fetched in its own thread, which is a little slower"]


def test_outputs_come_in_order_also_those_that_came_during_a_call(core: Core) -> None:
    core.send(timestamp=1.0)
    core.send(timestamp=2.0)
    answering = threading.Thread(target=core.answer, args=(["generate"],))
    answering.start()
    assert core.client.call_utility("get_supported_tasks") == ["generate"]
    answering.join()
    core.send(timestamp=3.0)
    assert [core.client.get_output().timestamp for _ in range(3)] == [1.0, 2.0, 3.0]


def test_it_stops_waiting_when_it_is_interrupted(core: Core) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        core.client.interrupt_on(theirs.fileno())
        ours.send(b"?")
        with pytest.raises(Interrupted):
            core.client.get_output()
        core.send(timestamp=1.0)
        assert core.client.get_output().timestamp == 1.0  # first, though there are commands


def test_an_interruption_gets_its_turn_between_outputs_that_never_end(core: Core) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        core.client.interrupt_on(theirs.fileno())
        ours.send(b"?")
        for timestamp in (1.0, 2.0, 3.0):
            core.send(timestamp=timestamp)
        assert core.client.get_output().timestamp == 1.0
        with pytest.raises(Interrupted):
            core.client.get_output()
        theirs.recv(1)
        assert [core.client.get_output().timestamp for _ in range(2)] == [2.0, 3.0]


def test_scores_come_in_frames_of_their_own(core: Core) -> None:
    import numpy
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    scores = LogprobsLists(*(numpy.arange(1000.0 * column, 1000.0 * column + 1000).reshape(1, -1) for column in (1, 2)),
                           numpy.array([0]))  # fmt: skip
    core.send(outputs=[EngineCoreOutput("7", [5], new_logprobs=scores)], timestamp=1.0)
    (output,) = core.client.get_output().outputs
    assert output.new_logprobs.logprobs[0, -1] == 2999.0


def test_a_core_that_says_that_it_is_dead_is_an_error(core: Core) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    core.socket.send(core.dead)
    with pytest.raises(EngineDeadError):
        core.client.get_output()
    assert core.client.resources.engine_dead


# -- arguments ---------------------------------------------------------------------------------------------------------
# vLLM's own arguments as options: the installed class's names and types, and their way into vLLM's configuration.


def configured(model: Path, *options: str) -> Any:
    """Make vLLM's configuration of options."""
    import vllm

    given = ["option.llm_engine=vllm", "option.enforce_eager=true", *(f"option.{option}" for option in options)]
    config = replace(engine_spec(read_config(overrides=given, environ={}).checked()).config, model=model)
    made = construct(keywords(config, 1, cpu=True), vllm.EngineArgs)
    return vllm.EngineArgs(**made).create_engine_config()


def test_the_names_are_those_of_the_installed_class() -> None:
    import vllm

    found = engine_arguments("vllm")
    names = {field.name for field in fields(vllm.EngineArgs) if not field.name.startswith("_")}
    assert names == set(found.arguments)
    assert found.source == f"vLLM {vllm.__version__.partition('+')[0]}"


def test_an_argument_reaches_vllm(hf_demo: Path) -> None:
    found = configured(
        hf_demo,
        "seed=7",
        "scheduling_policy=priority",
        "kv_events_config={\"enable_kv_cache_events\": false, \"publisher\": \"null\"}",
        "compilation_config={\"cudagraph_capture_sizes\": [1, 2]}",
        "hf_overrides={\"max_position_embeddings\": 4096}",
        "long_prefill_token_threshold=64",
        "additional_config={\"a\": 1}",
        "engine_args={\"max_num_seqs\": 9}",
    )  # fmt: skip
    assert (found.model_config.seed, found.scheduler_config.max_num_seqs) == (7, 9)
    assert found.scheduler_config.policy == "priority"
    assert found.scheduler_config.long_prefill_token_threshold == 64
    assert found.kv_events_config.publisher == "null"
    assert found.model_config.hf_config.max_position_embeddings == 4096
    assert found.additional_config == {"a": 1}


def test_a_wrong_object_is_refused_by_name(hf_demo: Path) -> None:
    with pytest.raises(ConfigError, match=r"^option\.kv_transfer_config: kv_conector: Unexpected keyword argument$"):
        configured(hf_demo, 'kv_transfer_config={"kv_conector": "x"}')
