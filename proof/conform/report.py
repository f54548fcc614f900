"""Reports of results in Markdown and JSON, and comparisons of several reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from handler import __version__
from handler.core import text_files
from handler.core.errors import ConfigError
from proof.conform.dialects import GENERATING, PROFILES
from proof.conform.rule import RULES
from proof.conform.run import ConformPlan, Result

VERDICTS = ("passed", "failed", "not asked")


def document(plan: ConformPlan, results: Sequence[Result], title: str) -> dict[str, Any]:
    """Return the report as a JSON object."""
    return {
        "conform": __version__,
        "title": title,
        "url": plan.asking.url,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "profiles": list(plan.profiles),
        "origins": [
            {**origin._asdict(), "rules": len(_of_profile(origin.profile)), "asked": origin.profile in plan.profiles}
            for origin in plan.origins
        ],
        "counts": {verdict: sum(result.verdict == verdict for result in results) for verdict in VERDICTS},
        "results": [
            {
                "rule": result.rule.id,
                "profile": result.profile,
                "result": result.verdict,
                "sentence": result.rule.sentence,
                "source": result.rule.source._asdict(),
                **({"wanted": result.expected} if result.verdict == "failed" else {}),
                **({"why": result.expected} if result.verdict == "not asked" else {}),
                **({"documented": result.rule.differs} if result.verdict == "failed" and result.rule.differs else {}),
                **({"asked": result.request, "got": result.got} if result.request or result.got else {}),
                "seconds": round(result.seconds, 3),
            }
            for result in results
        ],
    }


def markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown: counts, failures with their requests and responses, and all rules."""
    results = report["results"]
    lines = [f"# Conformance of {_plain(report['title'])}", ""]
    lines += [f"Asked by lmi-handler {report['conform']} at {report['time']}.", ""]
    lines += ["| profile | passed | failed | not asked |", "|---|---|---|---|"]
    for profile in report["profiles"]:
        verdicts = [result["result"] for result in results if result["profile"] == profile]
        lines.append(f"| {profile} | {' | '.join(str(verdicts.count(verdict)) for verdict in VERDICTS)} |")
    lines += ["", *(f"* {_origin(origin)}" for origin in report["origins"])] if report["origins"] else []
    if failed := [result for result in results if result["result"] == "failed"]:
        lines += ["", "## Failed", *chain.from_iterable(map(_failure, failed))]
    lines += ["", "## Rules", "", "| rule | profile | requirement | result |", "|---|---|---|---|"]
    for result in results:
        reason = f": {_plain(result['why'])}" if result.get("why") else ""
        lines.append(f"| {result['rule']} | {result['profile']} | {result['sentence']} | {result['result']}{reason} |")
    return "\n".join(lines) + "\n"


def _of_profile(profile: str) -> list[str]:
    """Return the IDs of the rules of a profile."""
    return [rule.id for rule in RULES.values() if profile in rule.profiles]


def _origin(origin: Mapping[str, Any]) -> str:
    """Return a sentence about a contract that the clients of the server may rely on."""
    profile = origin["profile"]
    state = "asked here" if origin["asked"] else f"not asked: add `--profile {profile}`"
    return f"Clients of this server may rely on {profile} ({origin['because']}): {origin['rules']} rules, {state}."


def origin_lines(plan: ConformPlan) -> list[str]:
    """Return a line for a terminal for each contract of the server whose rules were not asked."""
    origins = document(plan, [], "")["origins"]
    return [_origin(origin) for origin in origins if not origin["asked"]]


def _failure(result: Mapping[str, Any]) -> list[str]:
    link = _link(result["source"]["title"], result["source"]["url"])
    lines = ["", f"**{result['rule']}** ({result['profile']}): {result['sentence']} {link}"]
    lines += ["", f"* wanted: {_plain(result['wanted'])}"]
    lines += [f"* {name}: `{_plain(result[name])}`" for name in ("asked", "got") if result.get(name)]
    return [*lines, f"* documented difference: {result['documented']}"] if result.get("documented") else lines


def line(result: Result) -> str:
    """Return a result as one line for a terminal."""
    reason = f"  {result.expected}" if result.expected else ""
    return _printable(f"{result.verdict:9}  {result.profile:9}  {result.rule.id}{reason}")


def total(results: Sequence[Result]) -> str:
    """Return the number of results with each verdict, on one line."""
    return ", ".join(f"{sum(result.verdict == verdict for result in results)} {verdict}" for verdict in VERDICTS)


def rules_table(profiles: Iterable[str] = PROFILES) -> str:
    """Return the rules of the profiles as a Markdown table, with links to their sources."""
    profile_names = set(profiles)
    lines = ["| rule, and its source | requirement | profiles |", "|---|---|---|"]
    for rule in RULES.values():
        if profile_names & set(rule.profiles):
            names = "all that generate text" if rule.profiles == GENERATING else ", ".join(rule.profiles)
            source = _link(rule.id, rule.source.url) + ("" if rule.source.url else f" ({rule.source.title})")
            lines.append(f"| {source} | {rule.sentence} | {names} |")
    return "\n".join(lines) + "\n"


def _link(text: str, url: str) -> str:
    return f"[{text}]({url})" if url else text


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read reports that were saved as JSON.

    Raises:
        ConfigError: a file cannot be read, or is not a report.
    """
    reports = []
    for path in paths:
        try:
            report = json.loads(text_files.read_text(path))
        except OSError as error:
            raise ConfigError(f"lmi conform: {path}: {error.strerror}") from None
        except ValueError as error:
            reason = "give reports written by --output FILE.json" if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"lmi conform: {path} is not JSON: {reason}") from None
        if not isinstance(report, dict) or not {"conform", "title", "results"} <= set(report):
            raise ConfigError(f"lmi conform: {path} is not a report: give reports written by --output FILE.json")
        reports.append(report)
    return reports


def compare(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown comparison of reports: their counts, and the rules that failed in at least one report."""
    titles = [_plain(report["title"]) for report in reports]
    changed = [
        {(result["profile"], result["rule"]): result["result"] for result in report["results"]} for report in reports
    ]
    profiles = [name for name in PROFILES if any(name == profile for results in changed for profile, _ in results)]
    lines = [f"| passed / asked | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for profile in profiles:
        cells = []
        for results in changed:
            verdicts = [verdict for (name, _), verdict in results.items() if name == profile]
            num_checked = sum(verdict != "not asked" for verdict in verdicts)
            cells.append(f"{verdicts.count('passed')} / {num_checked}" if verdicts else "")
        lines.append(f"| {profile} | {' | '.join(cells)} |")
    lines += ["", f"| failed somewhere | {' | '.join(titles)} |", f"|---{'|---' * len(titles)}|"]
    for profile in profiles:
        for rule in RULES:
            verdicts = [results.get((profile, rule), "") for results in changed]
            if "failed" in verdicts:
                lines.append(f"| {profile}: {rule} | {' | '.join(verdicts)} |")
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Escape foreign text, so that it cannot break a Markdown table."""
    return _printable(text).replace("|", "\\|").replace("`", "'")


def _printable(text: str) -> str:
    """Replace unprintable characters, and characters that UTF-8 cannot encode, with spaces."""
    return "".join(char if char.isprintable() else " " for char in text)
