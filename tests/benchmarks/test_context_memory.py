"""benchmarks/context_cost.py and benchmarks/memory.py on a tiny target."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.recipes.tiny import write_all

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("context_cost", "memory", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write_all(tmp_path)
    return [
        "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"),
        "--weights", "fp32",
    ]  # fmt: skip


def test_context_cost(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import context_cost

    own = ["--length", "5", "--length", "40", "--max-new-tokens", "6", "--repeats", "2"]
    result = context_cost.main([*options, *own])
    assert [*result["context"]] == [5, 40]
    assert all(row["dspark_ms"] > row["draft_ms"] > 0 for row in result["context"].values())
    assert "first token" in capsys.readouterr().out


def test_memory(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import memory

    result = memory.main(
        [*options, "--seconds", "2", "--longest", "40", "--cache-tokens", "256", "--every", "0.5",
         "--concurrency", "6", "--max-new-tokens", "16"]
    )  # fmt: skip
    assert result["pages_in_use"] == 0 and result["requests"] > 3
    assert "preemptions" in capsys.readouterr().out
