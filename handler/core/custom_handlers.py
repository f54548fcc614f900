"""Variables that name the handlers and middleware of AWS's vLLM image, and what to write where nothing calls them."""

from __future__ import annotations

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
