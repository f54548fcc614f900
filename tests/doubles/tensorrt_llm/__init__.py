"""A double of TensorRT-LLM's Python API: its names and its manners, with a tiny model behind them and no GPU.

It follows the Python source of TensorRT-LLM 1.0 to 1.3 (github.com/NVIDIA/TensorRT-LLM: llmapi/, executor/).
It is as strict as the real one. Where that hangs or goes wrong silently, it fails loudly: `_manners.misuse`.
TLLM_DOUBLE names the faults that it shows: `_manners`.
"""

from tensorrt_llm._double.api import MANNERS, MISUSES
from tensorrt_llm.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams

__version__ = MANNERS.version
__all__ = ["LLM", "MANNERS", "MISUSES", "SamplingParams", "__version__"]
