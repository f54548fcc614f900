"""A sampled field without its sampler changes nothing; one that greedy requests leave out is the flags'."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from handler.core.values import Nature, Sampling
from handler.engines.llamacpp.parameters import CAPABILITIES, Leg, completion

VALUES = {"top_k": 7, "typical_p": 0.5}
OTHER_NAMES = {"typical_p": "typ_p"}  # a sampler has another name than its field
WITHOUT_SAMPLER = {"seed", "temperature"}
HINTS = get_type_hints(Sampling, include_extras=True)
SAMPLED = [
    name
    for name, hint in HINTS.items()
    if get_origin(hint) is Annotated and Nature.SAMPLED in get_args(hint) and name in CAPABILITIES.supports
]


def sent(**fields: Any) -> dict[str, Any]:
    return completion(Sampling(**fields), Leg((1, 2), 8, 0), 64)


@pytest.mark.parametrize("name", [name for name in SAMPLED if name not in WITHOUT_SAMPLER])
def test_a_sampled_field_is_sent_with_its_sampler_and_greedy_requests_switch_it_off(name: str) -> None:
    neutral = sent(do_sample=True, temperature=0.5)
    drawn = sent(do_sample=True, temperature=0.5, **{name: VALUES.get(name, 0.25)})
    changed = [key for key in drawn if drawn[key] != neutral.get(key)]
    assert changed, f"{name} is not sent"
    for key in changed:
        assert OTHER_NAMES.get(key, key) in drawn["samplers"], f"llama-server ignores {key} without its sampler"
        assert key in sent(), f"greedy requests leave {key} to the server's flags"


def test_fields_are_sampled() -> None:
    assert set(SAMPLED) >= {"top_k", "top_p", "min_p", "typical_p", *WITHOUT_SAMPLER}
