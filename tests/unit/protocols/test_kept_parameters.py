"""What `read_all` keeps of parameters changes no answer: others get what they would get first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from handler.core.errors import InvalidParameter
from handler.protocols.kernel import parameters
from handler.protocols.kernel.dialect import ServerContext
from handler.protocols.kernel.parameters import LMI, ParsedParameters, read_all


def read(context: ServerContext, **given: Any) -> ParsedParameters:
    return read_all(given, context, defaults={"max_new_tokens": 30}, table=LMI)


def test_the_same_numbers_are_read_once() -> None:
    context = ServerContext("echo")
    first = read(context, max_new_tokens=5, temperature=0.5)
    assert read(context, max_new_tokens=5, temperature=0.5) is first
    assert (first.sampling.max_new_tokens, first.sampling.temperature) == (5, 0.5)
    assert first.names == {"max_new_tokens": "parameters.max_new_tokens", "temperature": "parameters.temperature"}
    assert read(context, max_new_tokens=5, top_p=0.5).sampling.top_p == 0.5


@pytest.mark.parametrize("wrong", [True, 1.0])
def test_equal_values_of_other_types_are_refused_all_the_same(wrong: Any) -> None:
    context = ServerContext("echo")
    assert read(context, max_new_tokens=1).sampling.max_new_tokens == 1
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="must be an integer"):
            read(context, max_new_tokens=wrong)


def test_another_table_default_or_limit_counts() -> None:
    context = ServerContext("echo")
    read(context, top_k=5)
    assert read_all({"top_k": 5}, context, defaults={"max_new_tokens": 9}, table=LMI).sampling.max_new_tokens == 9
    longest = read_all({"top_k": 5}, context, defaults={"max_new_tokens": 30}, table=LMI, most_new_tokens=8)
    assert longest.sampling.max_new_tokens == 8
    other = parameters.Table(LMI.parameters, "p.")
    assert read_all({"top_k": 5}, context, defaults={}, table=other).names == {"top_k": "p.top_k"}


def test_a_context_made_of_another_has_its_own() -> None:
    context = ServerContext("echo")
    read(context, top_k=5)
    without = replace(context, unsupported={"min_p": "it lacks it"})
    read(context, min_p=0.5, do_sample=True)
    with pytest.raises(InvalidParameter, match="lacks"):
        read(without, min_p=0.5, do_sample=True)


def test_texts_are_not_kept() -> None:
    context = ServerContext("echo")
    assert read(context, stop=["a"]).sampling.stop == ("a",)
    assert not context.parsed


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_MOST_PARSED", 4)
    context = ServerContext("echo")
    for number in range(1, 20):
        assert read(context, max_new_tokens=number).sampling.max_new_tokens == number
        assert len(context.parsed) <= 4
