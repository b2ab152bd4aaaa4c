import hashlib
import json
from pathlib import Path

import pytest

from dspark.core.errors import DataError
from dspark.data.prompts import Prompt, is_validation, read_prompts


def _file(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_all_forms_of_a_line(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "dropped"},
        {"role": "user", "content": "two"},
    ]
    path = _file(
        tmp_path,
        "mixed.jsonl",
        '{"turns": ["a\u2028b", "c"]}',
        "",
        '{"prompt": "d"}',
        json.dumps({"messages": messages}),
    )
    assert read_prompts(path) == [
        Prompt("mixed", 1, ("a\u2028b", "c")),
        Prompt("mixed", 3, ("d",)),
        Prompt("mixed", 4, ("one", "two"), "Be brief."),
    ]


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    _file(tmp_path, "b.jsonl", '{"prompt": "2"}')
    _file(tmp_path, "a.jsonl", '{"prompt": "1"}')
    _file(tmp_path, "readme.txt", "not prompts")
    assert [p.file for p in read_prompts(tmp_path)] == ["a", "b"]


def test_split_is_sha256_of_the_first_turn_modulo_10() -> None:
    texts = [f"prompt {i} é" for i in range(400)]
    chosen = [t for t in texts if is_validation(t)]
    assert chosen == [
        t for t in texts if int(hashlib.sha256(t.encode("utf-8")).hexdigest(), 16) % 10 == 0
    ]
    assert 20 <= len(chosen) <= 60
    assert Prompt("f", 1, (chosen[0], "whatever")).is_validation


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', "line 2: not JSON"),
        ('{"text": "a"}', 'line 2: expected "turns", "prompt" or "messages"'),
        ('["a"]', "line 2: expected"),
        ('{"turns": []}', "line 2: every turn must be text"),
        ('{"turns": ["  "]}', "line 2: every turn must be text"),
        ('{"prompt": 3}', "line 2: every turn must be text"),
        ('{"messages": [{"role": "user"}]}', "line 2: every message needs"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: every turn"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = _file(tmp_path, "bad.jsonl", '{"prompt": "fine"}', line)
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no prompt file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"holds no \.jsonl"):
        read_prompts(tmp_path)
    empty = _file(tmp_path, "empty.jsonl", "")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(empty)
    (tmp_path / "other").mkdir()
    one = _file(tmp_path, "x.jsonl", '{"prompt": "1"}')
    two = _file(tmp_path / "other", "x.jsonl", '{"prompt": "2"}')
    with pytest.raises(DataError, match="same name"):
        read_prompts(one, two)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(latin)
