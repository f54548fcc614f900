"""A double of TensorRT-LLM's Python API: its names and its manners, with a tiny model behind them and no GPU.

Strict where the real one is (contract trtllm.md, sections 0.2, 2, 3, 10 and 11), and loud where the real one hangs or
goes wrong in silence: see `_manners.misuse`. What it shall do wrong is said by TLLM_DOUBLE: see `_manners`.
"""

from tensorrt_llm._double.manners import MANNERS, MISUSES
from tensorrt_llm.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = MANNERS.version
__all__ = ["LLM", "MANNERS", "MISUSES", "SamplingParams", "__version__"]
