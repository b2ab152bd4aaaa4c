"""Tiny folders that stand for a real target and a real draft bundle."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Tiny products are many times slower on several threads than on one. Before torch is imported, and
# for the processes that tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from transformers import AutoTokenizer

from dspark.data.template import template_hash
from dspark.targets.load import LoadedTarget, load_target
from tests.recipes.tiny import write_draft, write_talker, write_target

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte tokenizer and a chat template."""
    folder = write_target(tmp_path_factory.mktemp("targets") / "tiny-llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(target_folder: Path) -> Any:
    """One token a byte: the text of most random tokens is broken UTF-8."""
    return AutoTokenizer.from_pretrained(target_folder)


@pytest.fixture(scope="session")
def loaded_target(target_folder: Path) -> LoadedTarget:
    return load_target(str(target_folder), weights="fp32", template_hash=template_hash)


@pytest.fixture(scope="session")
def talker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose every token is text."""
    return write_talker(tmp_path_factory.mktemp("targets") / "talker")


@pytest.fixture(scope="session")
def talker(talker_folder: Path) -> LoadedTarget:
    return load_target(str(talker_folder), weights="fp32", template_hash=template_hash)


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> Path:
    """An untrained draft bundle that fits `target_folder`."""
    return write_draft(tmp_path_factory.mktemp("bundles") / "tiny", target_folder)


@pytest.fixture(autouse=True, scope="session")
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, as on a terminal: a shell's background jobs start with it ignored, and so
    would every process that a test starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
