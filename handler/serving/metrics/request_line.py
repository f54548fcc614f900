"""The line that each request writes to the log when it has ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from handler.serving.metrics.tracing import RequestRecord

log = logging.getLogger("handler.request")

_LINE = "id=%s outcome=%s prompt_tokens=%d tokens=%d first_token_s=%.3f seconds=%.3f%s%s"


def log_request(request: RequestRecord, ignored: Sequence[str]) -> None:
    """Log a request that has ended. The caller has checked that the log is enabled for INFO.

    Args:
        ignored: names of the parameters that were ignored. The client chooses them, so the line has a part of them.
    """
    names = [name[:64] for name in ignored[:32]]
    fields: dict[str, Any] = {
        "request_id": request.id,
        "outcome": request.outcome,
        "prompt_tokens": request.num_prompt_tokens,
        "tokens": request.num_tokens,
        "first_token_s": round(request.first, 3),
        "seconds": round(request.total, 3),
    }
    ignores = f" ignored={','.join(names)!r}" if names else ""
    error = f" error={request.error!r}" if request.error else ""
    arguments = (*fields.values(), ignores, error)
    if names:
        fields["ignored"] = names
    if request.error:
        fields["error"] = request.error
    # Unlike `log.info`, this does not walk the stack to find the caller, which would cost as much as the rest.
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, _LINE, arguments, None, extra={"fields": fields}))
