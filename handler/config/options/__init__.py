"""Table of all options, from one file a group: common, engines, OpenVINO, vLLM, TensorRT-LLM, OpenAI's API, foreign names."""

from __future__ import annotations

from handler.config.options.foreign import ENVIRONMENT, FOREIGN, JAVA, SERVER_ENVIRONMENT
from handler.config.options.option import Option, declared
from handler.config.options.tables import ECHO, GPU, GUIDED, MEDIA, OPENVINO, REMOTE, TRTLLM, VLLM, Options

__all__ = ["COMMON", "ENVIRONMENT", "KNOWN", "OPTIONS", "SERVER_ENVIRONMENT", "Option"]

COMMON = declared(Options)

OPTIONS = (*COMMON, *ECHO, *GUIDED, *MEDIA, *GPU, *OPENVINO, *VLLM, *TRTLLM, *REMOTE, *JAVA, *FOREIGN)

KNOWN: dict[str, list[Option]] = {}
"""Options by name and alias; two engines may have different options of one name."""

for _option in OPTIONS:
    for _name in (_option.key, *_option.aliases):
        KNOWN.setdefault(_name, []).append(_option)
