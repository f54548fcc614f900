"""`python -m deploy`, and where `lmi deploy` comes in."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None, prog: str = "python -m deploy") -> int:
    """The extra that it needs may not be installed: say so."""
    try:
        from deploy.cli import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "deploy":
            raise
        print(f"{prog}: needs {error.name}: pip install 'lmi-handler[deploy]'", file=sys.stderr)
        return 2
    return run(argv, prog)


if __name__ == "__main__":
    raise SystemExit(main())
