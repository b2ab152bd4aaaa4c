"""What is promised to someone who installs: pins, package data, a README that tells the truth."""

import ast
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dspark
from dspark.cli.main import COMMANDS, build_app, run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "dspark"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
SHIPPED_BUNDLE_LIMIT = 40 * 2**20


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in parsed}


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return [req for req in map(Requirement, listed) if req.name != "dspark"]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda req: req.name)
def test_the_pinned_version_is_in_the_declared_range(requirement: Requirement) -> None:
    assert requirement.specifier, "every dependency has a range"
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_one_version_number() -> None:
    assert PROJECT["project"]["version"] == dspark.__version__


def test_every_data_file_is_shipped_and_the_bundle_is_small() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["dspark"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    data = {
        path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}
    }
    assert data <= shipped
    bundles = [path for path in shipped if PACKAGE / "bundles" in path.parents]
    assert sum(path.stat().st_size for path in bundles) <= SHIPPED_BUNDLE_LIMIT


@pytest.mark.parametrize("domain", ["math", "code", "chat"])
def test_ten_prompts_a_domain(domain: str) -> None:
    lines = (PACKAGE / "prompts" / f"{domain}.jsonl").read_text().splitlines()
    turns = [json.loads(line)["turns"] for line in lines]
    assert len({turn for [turn] in turns if turn.strip()}) == 10


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def shell_lines(program: str) -> list[list[str]]:
    lines = [line for block in code_blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command for command in commands if command[: len(program.split())] == program.split()]


@pytest.mark.parametrize("command", shell_lines("dspark"), ids=" ".join)
def test_readme_command_lines_parse(command: list[str]) -> None:
    def deaf(function: Any) -> Any:
        """The same command line, no work."""
        if isinstance(function, Mapping):
            return {name: deaf(own) for name, own in function.items()}

        @functools.wraps(function)
        def nothing(**_: Any) -> None:
            return None

        return nothing

    app = build_app({name: deaf(function) for name, function in COMMANDS.items()})
    with pytest.raises(SystemExit) as exit_:
        run(app, command[1:])
    assert exit_.value.code == 0


def test_readme_names_every_command() -> None:
    assert set(COMMANDS) <= {command[1] for command in shell_lines("dspark")}


def test_readme_scripts_and_links_exist() -> None:
    scripts = [command[1] for command in shell_lines("bash")]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert scripts and links
    missing = [name for name in [*scripts, *links] if not (ROOT / name.split("#")[0]).exists()]
    assert not missing


def test_readme_python_imports_public_names() -> None:
    trees = [ast.parse(block) for block in code_blocks("python")]
    imports = [
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.name for node in imports if node.module == "dspark" for alias in node.names}
    assert names and names <= set(dspark.__all__)


def test_docs_links_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link.split("#")[0]).exists(), (
                f"{page.name}: {link}"
            )


def test_paper_map_names_what_exists() -> None:
    page = (ROOT / "docs" / "paper-map.md").read_text()
    code = re.findall(r"`([a-z_/]+\.py)(?:: (\w+))?`", page)
    missing = []
    for path, name in code:
        file = ROOT / path if path.startswith(("tests/", "benchmarks/")) else PACKAGE / path
        text = file.read_text() if file.exists() else ""
        if not text or (name and not re.search(rf"^(?:def|class) {name}\b", text, re.MULTILINE)):
            missing.append(f"{path}: {name}" if name else path)
    assert len(code) > 40 and not missing
