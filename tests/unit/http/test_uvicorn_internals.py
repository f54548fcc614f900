"""The table of uvicorn's attributes that the server's protocol uses."""

from __future__ import annotations

import ast
import inspect

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from handler.http import protocol, uvicorn_internals
from handler.http.uvicorn_internals import ATTRIBUTES


def listed(owner: type) -> set[str]:
    return {name for cls, names in ATTRIBUTES if cls is owner for name in names.split()}


def used(variables: set[str]) -> set[str]:
    """Return the attributes that the protocol's module reads or sets of these variables."""
    nodes = ast.walk(ast.parse(inspect.getsource(protocol)))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) in variables}


def test_the_table_lists_what_the_protocol_uses_of_a_request() -> None:
    cycles = {"cycle", "self.cycle", "self._cycle", "self._current", "self._protocol._current"}
    assert used(cycles) <= listed(RequestResponseCycle)


def test_the_table_lists_what_the_protocol_uses_of_a_connection() -> None:
    (source,) = (
        node
        for node in ast.parse(inspect.getsource(protocol)).body
        if isinstance(node, ast.ClassDef) and node.name == "Protocol"
    )
    owners = {
        ast.unparse(n)[5:] for n in ast.walk(source) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    }
    own = {*vars(protocol.Protocol), "_turns", "_held", "_cycle_transport"} - listed(HttpToolsProtocol)
    assert owners - own <= listed(HttpToolsProtocol)


def test_an_attribute_that_uvicorn_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*uvicorn_internals.missing()]
    monkeypatch.setattr(uvicorn_internals, "ATTRIBUTES", ((HttpToolsProtocol, "parser _no_such"),))
    assert [*uvicorn_internals.missing()] == ["HttpToolsProtocol._no_such"]
