"""A dialect's errors: a new class of them needs no line in any dialect."""

from __future__ import annotations

import json

import pytest

from handler.core import errors
from handler.core.errors import GenerationFailed, InvalidParameter, InvalidPayload, Overloaded, ServingError, TooLong
from handler.core.values import Task
from handler.protocols import registry
from handler.protocols.kernel.errors import FRONT_END, ErrorFormat
from tests.unit.protocols.answers import DIALECTS

FORMATS: dict[str, ErrorFormat] = {"front end": FRONT_END, **{name: one.errors for name, one in DIALECTS.items()}}
STREAMS = {"tgi", "tgi_generate_stream"}  # whose clients read errors as events, under status 200


@pytest.mark.parametrize(
    "base", [ServingError, InvalidPayload, InvalidParameter, TooLong, GenerationFailed, Overloaded]
)
def test_a_new_class_of_errors_has_its_own_status_in_every_dialect(base: type[ServingError]) -> None:
    class Teapot(base):  # type: ignore[misc, valid-type]
        status = 418

    class Pot(Teapot):
        pass

    for name, form in FORMATS.items():
        for error in (Teapot("short and stout"), Pot("short and stout")):
            answer = form.whole(error)
            assert form.status(error) == 418, name
            assert answer.status == 418 or (answer.status == 200 and name in STREAMS), name
            assert b"stout" in answer.body or b"Model is overloaded" in answer.body, name
            assert json.loads(json.dumps(form.tail(error))), name


@pytest.mark.parametrize("name", FORMATS)
def test_an_error_without_a_status_of_its_own_has_that_of_the_class_above(name: str) -> None:
    class Wrong(InvalidPayload):
        pass

    assert FORMATS[name].status(Wrong("x")) == FORMATS[name].status(InvalidPayload("x"))


def test_every_route_and_path_has_errors() -> None:
    for path in ("/v1/nothing", "/v2/nothing", "/embed_all", "/v2/rerank/x", "/v1/messages/x", "/v1/chat/completions"):
        answer = registry.refuse_path(path, Task.EMBEDDING)
        assert answer is not None
        assert answer.status == errors.NotFound.status, path
