"""A user's handlers: the role of LMI's `handle`, and the variables of AWS's vLLM image with what to write instead."""

from __future__ import annotations

from enum import Enum

HANDLERS = "write @input_formatter and @output_formatter functions of handler.formatters in model.py"
MIDDLEWARE = "write an @input_formatter (before) or an @output_formatter (after) of handler.formatters in model.py"
PING = "leave it out: /ping answers 200 while the engine can serve, else 503"
THROTTLE = "SERVING_JOB_QUEUE_SIZE limits the requests that wait, and those beyond get 503"

SCRIPT = "CUSTOM_SCRIPT_FILENAME"
VARIABLES = {
    "invoke": "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "ping": "CUSTOM_FASTAPI_PING_HANDLER",
    "throttle": "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "pre_post_process": "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "pre": "CUSTOM_PRE_PROCESS",
    "post": "CUSTOM_POST_PROCESS",
}
"""What each variable names."""

INSTEAD = {
    SCRIPT: "name the file model.py",
    VARIABLES["invoke"]: HANDLERS,
    VARIABLES["ping"]: PING,
    VARIABLES["throttle"]: THROTTLE,
    **dict.fromkeys((VARIABLES["pre_post_process"], VARIABLES["pre"], VARIABLES["post"]), MIDDLEWARE),
}
"""What to write in place of each variable."""


class Role(Enum):
    """What the function `handle` of a model.py is to an embedded server."""

    NONE = "not called"
    ALONE = "answers alone: no engine is loaded"
    ENTRY = "answers, by the engine where it calls LMI's handler"
    FIRST = "is tried first; what it answers with None goes to the engine"
