"""`lmi`, where the echo engine has a model's tokenizer: python bench/echo_tokenizer.py DIRECTORY serve --engine echo"""

from __future__ import annotations

import sys
from pathlib import Path

from handler import cli
from handler.engines import echo
from handler.engines.huggingface.tokenizer import HfTokenizer


def main() -> int:
    directory = Path(sys.argv[1])
    setattr(echo, "load_tokenizer", lambda config: HfTokenizer(directory))  # noqa: B010
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
