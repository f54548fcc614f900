"""Entry point of `python -m deploy` and `lmi deploy`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from handler.core.package import install
from handler.core.terminal import escaping

_EXTRA = ("aiohttp", "boto3", "botocore", "pydantic", "rich", "yaml")


@escaping()
def main(argv: Sequence[str] | None = None, prog: str = "python -m deploy") -> int:
    """Run the command line. If a package from the extra `deploy` is missing, print how to install it."""
    try:
        from deploy.cli.main import main as run

        return run(argv, prog)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"{prog}: needs {missing}: {install('lmi-handler[deploy]')}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
