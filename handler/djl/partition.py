"""Replacement for the conversion that DJL Serving 0.28 runs before Python if `option.rolling_batch=trtllm`.

Java runs this file as /opt/djl/partition/trt_llm_partition.py, and gives up if it fails. Java then passes the directory
`--trt_llm_model_repo` to the handler as `option.model_id`, so this program creates that directory as a link to the
model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="the value of option.model_id")
    parser.add_argument("--trt_llm_model_repo", required=True, type=Path, help="the directory that Java passes")
    arguments, _ = parser.parse_known_args(argv)  # the other arguments are for a conversion
    model = Path(arguments.model_path)
    if not model.is_dir():
        print(f"ERROR option.model_id={arguments.model_path} is not a directory")  # Java looks for the first word
        return 1
    repo: Path = arguments.trt_llm_model_repo
    repo.parent.mkdir(parents=True, exist_ok=True)
    repo.unlink(missing_ok=True)  # a dangling link, as Java runs this only if the directory does not exist
    repo.symlink_to(model.resolve(), target_is_directory=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
