"""Which of the things that a failed run made are to go."""

from __future__ import annotations

from deploy.deployer.apply import leftovers
from deploy.resources.resource import Resource
from tests.deploy.doubles.deployments import COMPONENTS, PLAIN, wanted_of


def keys(resources: tuple[Resource, ...]) -> list[str]:
    return [one.key for one in resources]


def test_without_an_endpoint_everything_that_was_made_goes_last_made_first() -> None:
    wanted = wanted_of(PLAIN)
    made = keys(wanted[:4])
    assert keys(leftovers(wanted, made, (), wanted[4].key, serves=False)) == made[::-1]


def test_what_was_there_before_stays() -> None:
    wanted = wanted_of(PLAIN)
    assert keys(leftovers(wanted, [wanted[1].key], (), wanted[4].key, serves=False)) == [wanted[1].key]


def test_an_update_that_failed_takes_its_new_versions_with_it() -> None:
    model, config, alarm, _, endpoint, *_ = wanted = wanted_of(PLAIN)
    made = [model.key, config.key, alarm.key]
    assert keys(leftovers(wanted, made, (), endpoint.key, serves=True)) == [config.key, model.key]


def test_a_failed_component_goes_and_not_what_another_one_uses() -> None:
    wanted = wanted_of(COMPONENTS)
    made, finished = keys(wanted), ["endpoint/llama", "inference-component/base"]
    gone = keys(leftovers(wanted, made, finished, "inference-component/second", serves=True))
    assert gone == ["inference-component/second"]
    alone = keys(leftovers(wanted, made, finished[:1], "inference-component/base", serves=True))
    assert alone == ["inference-component/base", wanted[0].key]


def test_a_policy_that_was_refused_takes_nothing_with_it() -> None:
    wanted = wanted_of(PLAIN)
    failed = wanted[-1].key
    assert failed.startswith("scaling-policy/")
    assert leftovers(wanted, keys(wanted[:-1]), ["endpoint/llama"], failed, serves=True) == ()
