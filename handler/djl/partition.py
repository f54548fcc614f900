"""Stand in for the conversion that DJL Serving 0.28 runs before Python when `option.rolling_batch=trtllm`.

Java calls it as /opt/djl/partition/trt_llm_partition.py, gives up when it fails, and then hands the directory that it
names to the handler as `option.model_id`. So that directory becomes the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_path", required=True, help="what option.model_id says")
    parser.add_argument("--trt_llm_model_repo", required=True, type=Path, help="the directory that Java hands over")
    arguments, _ = parser.parse_known_args(argv)  # the others are about a conversion
    model = Path(arguments.model_path)
    if not model.is_dir():
        print(f"ERROR option.model_id={arguments.model_path} is not a directory")  # Java looks for the first word
        return 1
    repo: Path = arguments.trt_llm_model_repo
    repo.parent.mkdir(parents=True, exist_ok=True)
    repo.unlink(missing_ok=True)  # one that leads nowhere any more; Java asks only where it finds none
    repo.symlink_to(model.resolve(), target_is_directory=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
