"""What to write in place of the handlers and middleware that AWS's vLLM image runs."""

from __future__ import annotations

HANDLERS = "write @input_formatter and @output_formatter functions of handler.formatters in model.py"
MIDDLEWARE = "write an @input_formatter (before) or an @output_formatter (after) of handler.formatters in model.py"
PING = "leave it out: /ping answers 200 while the engine can serve, else 503"
THROTTLE = "SERVING_JOB_QUEUE_SIZE limits the requests that wait, and those beyond get 503"
