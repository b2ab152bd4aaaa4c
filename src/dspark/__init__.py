"""DSpark: lossless speculative decoding for Hugging Face causal language models.

``LLM`` and ``SamplingParams`` are the public surface. They are imported on first use, so that the
numpy rooms (core, scheduling, data, evaluation) can be imported where torch is not installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "DSparkError",
    "Guided",
    "RequestOutput",
    "SamplingParams",
    "UserError",
    "__version__",
]

if TYPE_CHECKING:
    from dspark.core.errors import DSparkError, UserError
    from dspark.core.guided import Guided
    from dspark.core.sampling import SamplingParams
    from dspark.recipes.generation import RequestOutput
    from dspark.recipes.llm import LLM

_HOMES = {
    "LLM": "dspark.recipes.llm",
    "RequestOutput": "dspark.recipes.generation",
    "Guided": "dspark.core.guided",
    "SamplingParams": "dspark.core.sampling",
    "DSparkError": "dspark.core.errors",
    "UserError": "dspark.core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
