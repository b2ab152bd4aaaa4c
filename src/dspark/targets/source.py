"""Where a target comes from: a folder, a hub id, a GGUF file or nothing (the embedded model).

Nothing here imports torch before weights have to be converted, so that looking at data starts fast.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dspark.core.errors import MissingExtraError, TargetError
from dspark.targets.embedded import NAME as EMBEDDED_NAME
from dspark.targets.embedded import embedded_gguf

logger = logging.getLogger(__name__)

Say = Callable[[str], None]


def read_tokenizer(
    source: str | None, *, trust_remote_code: bool = False, say: Say = logger.info
) -> tuple[Any, str, int]:
    """A target's tokenizer, name and vocabulary size, without its weights."""
    name, source = locate(source, say)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and the hub client share no base class
        raise TargetError(f"cannot load the target {name}: {first_line(error)}") from error
    return tokenizer, name, int(config.get_text_config().vocab_size)


def target_name(source: str | None) -> str:
    """What `load_target` will call it, without looking at it."""
    if source is None:
        return EMBEDDED_NAME
    path = Path(source).expanduser()
    if source.endswith(".gguf"):
        return path.stem
    return path.resolve().name if path.exists() else source


def locate(source: str | None, say: Say) -> tuple[str, str]:
    """A name for it, and the folder or hub id to load."""
    name = target_name(source)
    if source is None:
        return name, str(_converted_gguf(embedded_gguf(), say))
    if source.endswith(".gguf"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise TargetError(f"there is no GGUF file {source}")
        return name, str(_converted_gguf(path, say))
    if Path(source).exists() or source.startswith((".", "/", "~")):
        folder = Path(source).expanduser()
        if not folder.exists():
            raise TargetError(f"there is no model folder {source}")
        if not (folder / "config.json").is_file():
            raise TargetError(f"{folder.resolve()} is no model folder: it has no config.json")
        return name, str(folder)
    return name, source


@contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' bar for every file it reads; a line of ours has said what happens."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _converted_gguf(path: Path, say: Say) -> Path:
    """The folder of safetensors that this GGUF was converted to; converts it the first time.

    The cache key is the file's content, so a replaced file is converted again.
    """
    folder = cache_folder() / "targets" / f"{path.stem}-{_file_hash(path)[:16]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        import accelerate  # noqa: F401  (transformers needs both to read a GGUF)
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(str(error.name), "gguf") from error
    from transformers import AutoModelForCausalLM

    say(f"converting {path.name} to safetensors, this once ...")
    try:
        with without_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), gguf_file=path.name, dtype="float32"
            )
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # the gguf reader raises whatever a broken file leads it to
        raise TargetError(f"cannot read the GGUF file {path.name}: {first_line(error)}") from error
    # The weights are dequantised now; the entry that says otherwise would make saving refuse.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with without_bars():
            model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _record_source(scratch, path)
        scratch.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # else another process was first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _record_source(folder: Path, path: Path) -> None:
    (folder / "source.json").write_text(json.dumps({"gguf": path.name, "sha256": _file_hash(path)}))


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    if "DSPARK_CACHE" in os.environ:
        return Path(os.environ["DSPARK_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dspark"
