"""Checks the rules one after another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from handler.core.errors import ConfigError
from proof.conform import rules
from proof.conform.origin import Origin, origins
from proof.conform.rule import RULES, Failed, NotAsked, Rule
from proof.conform.rules.hosting import watch_start
from proof.conform.server import Asking, Lifetime, Server

__all__ = ["ConformPlan", "Result", "rules", "run"]

_RULE = 300.0
"""The time limit of one rule, in seconds. `--slow` multiplies it by ten."""

_UNREADABLE = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that a check may raise for a response with a wrong structure, such as a list instead of an object."""


Verdict: TypeAlias = Literal["passed", "failed", "not asked"]


@dataclass(frozen=True)
class ConformPlan:
    """The arguments of `lmi conform`.

    Attributes:
        only: the IDs of rules or groups to check. If it is empty, all rules of the profiles are checked.
        left_out: the IDs of rules or groups to skip.
        ready: the time limit for the server to become ready, in seconds.
        origins: the contracts on which the clients of the server may rely. The run adds them.
    """

    asking: Asking
    profiles: Sequence[str]
    only: Sequence[str] = ()
    left_out: Sequence[str] = ()
    ready: float = 600.0
    origins: list[Origin] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Result:
    """The result of one rule in one profile.

    Attributes:
        expected: the expected response if the rule failed, or the reason if the rule was not checked.
        request, got: the request and the response of a failed rule.
    """

    rule: Rule
    profile: str
    verdict: Verdict
    expected: str = ""
    request: str = ""
    got: str = ""
    seconds: float = field(default=0.0, compare=False)


def run(plan: ConformPlan, lifetime: Lifetime | None, tell: Callable[[Result], object]) -> list[Result]:
    """Check all rules of the plan.

    Args:
        tell: a function that is called with each result as soon as it is known.

    Raises:
        ConfigError: the server does not respond or could not be started.
    """
    return asyncio.run(_run(plan, lifetime, tell))


def rules_of(plan: ConformPlan) -> list[tuple[Rule, str]]:
    """Return the rules of the plan, each with its profile. Rules that stop the server come last."""
    pairs = [
        (rule, profile)
        for profile in plan.profiles
        for rule in RULES.values()
        if profile in rule.profiles and (not plan.only or selects(rule, plan.only))
    ]
    return sorted(pairs, key=lambda pair: pair[0].last)


def selects(rule: Rule, names: Sequence[str]) -> bool:
    """Return whether `names` contains the ID or the group of a rule."""
    return any(name in (rule.id, rule.id.partition(".")[0]) for name in names)


async def _run(plan: ConformPlan, lifetime: Lifetime | None, tell: Callable[[Result], object]) -> list[Result]:
    servers = {profile: Server(plan.asking, profile, lifetime) for profile in plan.profiles}
    first = next(iter(servers.values()))
    results = []
    try:
        if lifetime is not None:
            await _begin(first, plan.ready)
        if (response := await first.get("/")).failure and not response.status:
            raise ConfigError(f"lmi conform: no server responds at {plan.asking.url}: {response.got}")
        await first.check_key()
        with contextlib.suppress(*_UNREADABLE, OSError, asyncio.TimeoutError, NotAsked, Failed):
            plan.origins.extend(await origins(first))
        for rule, profile in rules_of(plan):
            result = await _ask(rule, servers[profile], plan)
            results.append(result)
            tell(result)
    finally:
        if lifetime is not None:
            await lifetime.kill()
    return results


async def _begin(server: Server, seconds: float) -> None:
    if server.lifetime is not None and server.lifetime.ours and (await server.get("/ping")).status:
        raise ConfigError(f"lmi conform: a server already responds at {server.asking.url}; stop it, or omit --command")
    await watch_start(server, seconds)


async def _ask(rule: Rule, server: Server, plan: ConformPlan) -> Result:
    start = time.monotonic()
    server.last = None

    def result(verdict: Verdict, expected: str = "", request: str = "", got: str = "") -> Result:
        return Result(rule, server.profile, verdict, expected, request, got, time.monotonic() - start)

    if selects(rule, plan.left_out):
        return result("not asked", "skipped by --skip")
    limit = _RULE * (10 if plan.asking.slow else 1)
    check = asyncio.ensure_future(rule.check(server))
    try:
        done, _ = await asyncio.wait([check], timeout=limit)
        if not done:
            return result("not asked", f"the check did not end within {limit:g} s")
        check.result()
    except NotAsked as reason:
        return result("not asked", str(reason))
    except Failed as failed:
        if failed.late:
            return result(
                "not asked", f"no response within {plan.asking.limits.response:g} s (--timeout)", failed.request
            )
        return result("failed", failed.expected, failed.request, failed.got)
    except asyncio.TimeoutError:
        return result("not asked", f"no connection within {plan.asking.limits.response:g} s (--timeout)")
    except OSError as error:
        return result("failed", "a connection", "", str(error))
    except _UNREADABLE as error:
        broken = Failed(f"a response in the API's format ({type(error).__name__}: {error})", server.last)
        return result("failed", broken.expected, broken.request, broken.got)
    finally:
        check.cancel()
        await asyncio.wait([check])
    return result("passed")
