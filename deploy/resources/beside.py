"""Say what capture, a shadow and a reservation cost and mean, before the user confirms."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.resolve.decision import Decision
from deploy.spec import Spec
from deploy.spec.sections import Capture

_REQUESTS, _KB = 1_000_000, 10.0  # an example: requests, and kB of a request's body and its answer
_SHARE = {"both": 1.0, "input": 0.5, "output": 0.5}
_STORED = 0.023  # US dollars of a GB in S3 (Standard, us-east-1) for a month; September 2026


def beside_warnings(spec: Spec, decision: Decision) -> Iterator[str]:
    """Yield a sentence for each."""
    if spec.capture is not None:
        yield _capture(spec.capture)
    if spec.shadow is not None and decision.shadow is not None:
        several = "instances" if spec.shadow.count > 1 else "instance"
        yield (
            f"shadow: {spec.shadow.count} more {several} of {decision.shadow.instance_type}, paid for as long as the "
            f"endpoint exists; {spec.shadow.percent} % of the requests are copied to it, and its answers are discarded"
            f"{'' if spec.capture is not None else ' (capture keeps them)'}"
        )
    if spec.reservation is not None:
        yield (
            f"reservation: instances come only from {spec.reservation.rpartition('/')[2]}, which is paid in advance; "
            "when it ends they end, and none start beyond it"
        )


def _capture(capture: Capture) -> str:
    gigabytes = _REQUESTS * _KB * _SHARE[capture.content] * capture.percent / 100 / 1e6
    return (
        f"capture: S3 charges for the files in {capture.output} until they are deleted: of a million requests of "
        f"{_KB:g} kB with their answers about {gigabytes:.2g} GB (${gigabytes * _STORED:.2g} a month in us-east-1), "
        "and for each file written; they hold whatever clients send"
    )
