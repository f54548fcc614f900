"""The report as one JSON document, of which the table and the page are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handler.replay.findings import CLASSES, Class
from handler.replay.noise import Noise
from handler.replay.summary import SIDES, TIMES, Summary

_PERCENTILES = (50, 90, 99)


def document(run: Mapping[str, Any], summary: Summary, noise: Noise, allowed: Mapping[Class, float]) -> dict[str, Any]:
    compared = summary.num_compared
    return {
        "run": dict(run),
        "compared": compared,
        "classes": {
            cls.value: {
                "requests": summary.classes[cls],
                "percent": round(100 * summary.classes[cls] / compared, 4) if compared else 0.0,
                "allowed_percent": None if cls is Class.EQUAL else allowed.get(cls, 0.0),
            }
            for cls in CLASSES
        },
        "beyond": [cls.value for cls in summary.beyond(allowed)],
        "findings": {cls.value: dict(summary.names[cls].most_common()) for cls in CLASSES if summary.names[cls]},
        "unreadable": {
            "count": summary.num_unreadable,
            "first": [{"place": one.place, "reason": one.reason} for one in summary.unreadable],
        },
        "throttled": dict(summary.throttled),
        "volatile": dict(summary.volatile),
        "asked_again": noise.asked,
        "times_ms": {
            side: {
                name: {f"p{percent}": _ms(summary.times[side][name].percentile(percent)) for percent in _PERCENTILES}
                for name in TIMES
            }
            for side in SIDES
        },
        "examples": {cls.value: summary.examples[cls] for cls in CLASSES if cls in summary.examples},
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
