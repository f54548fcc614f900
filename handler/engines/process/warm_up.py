"""An engine's first request, made before anybody waits for one."""

from __future__ import annotations

from handler.core.values import Sampling
from handler.engines.base import Engine

_KEY = 0  # the hosts' keys begin at 1
_PLAIN = Sampling(max_new_tokens=2, ignore_eos=True)


def warm_up(engine: Engine, id: int, sampling: Sampling = _PLAIN) -> None:
    """The first step compiles and allocates: have that done, and what does not work shown, now.

    Args:
        id: any token, of which the prompt is made.
        sampling: of the request.

    Raises:
        RuntimeError: the request failed; or what `add` and `step` raise.
    """
    engine.add(_KEY, [id], sampling)
    ended = False
    while not ended:
        for output in engine.step().others:
            if output.error is not None:
                raise RuntimeError(f"its first request failed: {output.error}")
            ended = ended or output.finish is not None
