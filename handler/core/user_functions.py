"""The functions of a user's code that serve requests: AWS's variables for their names, and `handle` of model.py.

`imports` lists what such code imports, without running it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from enum import Enum

HANDLERS = "write functions with @input_formatter and @output_formatter (from handler.formatters) in model.py"
MIDDLEWARE = "write a function with @input_formatter or @output_formatter (from handler.formatters) in model.py"
PING = "omit it: /ping returns 200 while the engine can serve requests, otherwise 503"
THROTTLE = "use SERVING_JOB_QUEUE_SIZE, which limits the waiting requests; further requests get 503, 429 or 529"

SCRIPT = "CUSTOM_SCRIPT_FILENAME"
VARIABLES = {
    "invoke": "CUSTOM_FASTAPI_INVOCATION_HANDLER",
    "ping": "CUSTOM_FASTAPI_PING_HANDLER",
    "throttle": "CUSTOM_FASTAPI_MIDDLEWARE_THROTTLE",
    "pre_post_process": "CUSTOM_FASTAPI_MIDDLEWARE_PRE_POST_PROCESS",
    "pre": "CUSTOM_PRE_PROCESS",
    "post": "CUSTOM_POST_PROCESS",
}
"""Maps the purpose of a user's function to the environment variable that names the function."""

INSTEAD = {
    SCRIPT: "name the file model.py",
    VARIABLES["invoke"]: HANDLERS,
    VARIABLES["ping"]: PING,
    VARIABLES["throttle"]: THROTTLE,
    **dict.fromkeys((VARIABLES["pre_post_process"], VARIABLES["pre"], VARIABLES["post"]), MIDDLEWARE),
}
"""What a user should do instead of setting each of these variables."""


class Role(Enum):
    """Role of the function `handle` of a model.py in an embedded server."""

    NONE = "not called"
    ALONE = "answers the requests on its routes; no engine is loaded"
    ENTRY = "answers the requests on its routes, and uses the engine by calling LMI's handler"
    FIRST = "is called first; requests for which it returns None go to the engine"


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the module and the name of each import. The name is "" if the module itself is imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)
