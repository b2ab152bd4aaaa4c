"""Imports point one way (docs/architecture.md, "Rooms"), and the numpy rooms need no torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dspark

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "dspark"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "scheduling": {"core"},
    "calibration": {"core"},
    "data": {"core"},
    "nn": {"core"},
    "targets": {"core", "nn"},
    "drafters": {"core", "nn"},
    "checkpoints": {"core", "nn", "drafters"},
    "training": {"core", "nn", "drafters", "data"},
    "engine": {"core", "nn", "drafters", "scheduling", "calibration"},
    "evaluation": {"core", "data", "calibration"},
    "server": {"core", "engine"},
    "cli": {"core", "recipes"},
}
MAY_IMPORT["recipes"] = set(MAY_IMPORT) - {"cli"}
NUMPY_ROOMS = ("core", "scheduling", "calibration", "data", "evaluation")


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def rooms_imported(source: str, package: str) -> set[str]:
    """Rooms that a file of the given package imports, inside functions and type checks too.

    A name that the package itself lends (`from dspark import LLM`) counts as the room it lives in,
    and so does a module named in a string, as for `import_module`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"dspark(\.\w+)+", node.value) else []
        else:
            continue
        names = [dspark._HOMES.get(name.removeprefix("dspark."), name) for name in names]
        found |= {name.split(".")[1] for name in names if name.startswith("dspark.")}
    return found & set(MAY_IMPORT)


def test_the_reader_of_imports_sees_every_form() -> None:
    source = "import dspark.engine.step\nfrom dspark import nn\ndef f():\n    from ..data import x"
    assert rooms_imported(source, "dspark.core") == {"engine", "nn", "data"}
    assert rooms_imported("from dspark import LLM, __version__", "dspark.core") == {"recipes"}
    assert rooms_imported("import_module('dspark.cli.main')", "dspark.core") == {"cli"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_obey_the_table(room: str) -> None:
    for file in files_of(room):
        package = ".".join(file.parent.relative_to(PACKAGE.parent).parts)
        forbidden = rooms_imported(file.read_text(), package) - MAY_IMPORT[room] - {room}
        assert not forbidden, f"{file.relative_to(ROOT)} may not import {sorted(forbidden)}"


def test_every_folder_of_code_is_in_the_table() -> None:
    folders = {file.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*/*.py")}
    assert folders == set(MAY_IMPORT)


def test_the_documented_table_is_this_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (\w+) \| \w* ?\| ([^|]+) \|", page, flags=re.MULTILINE)
    documented = {
        room: MAY_IMPORT["recipes"]
        if allowed == "all but cli"
        else set(re.findall(r"\w+", allowed))
        for room, allowed in rows
        if room != "room"
    }
    assert documented == MAY_IMPORT


@pytest.mark.parametrize("room", NUMPY_ROOMS)
def test_numpy_rooms_import_without_torch(room: str) -> None:
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in files_of(room)
    ]
    script = (
        "import importlib, sys\n"
        "sys.modules.update(torch=None, transformers=None)  # importing either now fails\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
