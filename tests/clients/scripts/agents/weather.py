"""The tool of all agents."""

from __future__ import annotations


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The city's name.
    """
    if city == "Atlantis":
        raise LookupError("no such city: Atlantis")
    return f"{len(city)} °C in {city}"
