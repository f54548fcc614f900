"""Which clients of vLLM are replaced, on modules with the shape of `vllm.v1.engine.core_client`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from handler.engines.vllm.inline_client import inline_client


def known() -> Any:
    """Return a module whose client sets the attributes of vLLM 0.32's."""

    class MPClient:
        def __init__(self) -> None:
            self.decoder = self.resources = self.utility_results = self.ctx = SimpleNamespace()

    class SyncMPClient(MPClient):
        def __init__(self) -> None:
            super().__init__()
            self.is_dp = self.outputs_queue = self.output_queue_thread = None
            self.resources.output_socket = self.resources.shutdown_path = None

        def _send_input(self) -> None: ...

    module: Any = ModuleType("core_client")
    module.SyncMPClient, module.MPClient = SyncMPClient, MPClient
    module.BackgroundResources = SimpleNamespace(validate_alive=None)
    module._process_utility_output, module.zmq = None, SimpleNamespace(Poller=None)
    return module


def _more_attributes(module: Any) -> None:
    before = module.SyncMPClient.__init__

    def longer(self: Any) -> None:
        before(self)
        self.new = None

    module.SyncMPClient.__init__ = longer


def _fewer_in_the_base(module: Any) -> None:
    def shorter(self: Any) -> None:
        self.decoder = self.resources = None

    module.MPClient.__init__ = shorter


def _compiled(module: Any) -> None:
    module.MPClient.__init__ = dict.__init__


def test_a_known_client_is_replaced_also_where_its_constructor_is_wrapped() -> None:
    module = known()
    client = inline_client(module)
    assert client is not None
    assert issubclass(client, module.SyncMPClient)
    constructor = module.SyncMPClient.__init__
    module.SyncMPClient.__init__ = functools.wraps(constructor)(lambda self: constructor(self))
    assert inline_client(module) is not None


@pytest.mark.parametrize(
    "change",
    [
        _more_attributes,
        _fewer_in_the_base,
        _compiled,
        lambda module: delattr(module, "_process_utility_output"),
        lambda module: delattr(module, "SyncMPClient"),
        lambda module: delattr(module.zmq, "Poller"),
        lambda module: delattr(module.SyncMPClient, "_send_input"),
        lambda module: delattr(module.BackgroundResources, "validate_alive"),
    ],
)
def test_an_unknown_client_stays(change: Callable[[Any], None]) -> None:
    module = known()
    change(module)
    assert inline_client(module) is None
