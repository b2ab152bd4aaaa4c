import hashlib
import json
import sys
from pathlib import Path

import pytest

from dspark.core.errors import DataError, MissingExtraError
from dspark.data.prompts import Prompt, is_validation, read_prompts


def _file(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_all_forms_of_a_line(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "said"},
        {"role": "user", "content": "two"},
    ]
    share_gpt = [{"from": "human", "value": "three"}, {"from": "gpt", "value": "said"}]
    path = _file(
        tmp_path,
        "mixed.jsonl",
        '{"turns": ["a\u2028b", "c"]}',
        "",
        '{"prompt": "d"}',
        json.dumps({"messages": messages}),
        json.dumps({"conversations": share_gpt, "id": 7}),
    )
    assert read_prompts(path) == [
        Prompt("mixed", 1, ("a\u2028b", "c")),
        Prompt("mixed", 3, ("d",)),
        Prompt("mixed", 4, ("one", "two"), "Be brief.", ("said", None)),
        Prompt("mixed", 5, ("three",), None, ("said",)),
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
        ('{"text": "a"}', 'line 2: expected "turns", "prompt", "messages"'),
        ('["a"]', "line 2: expected"),
        ('{"turns": []}', "line 2: every conversation must begin"),
        ('{"conversations": [{"from": "ape", "value": "x"}]}', "line 2: unknown role 'ape'"),
        ('{"conversations": [{"from": "human"}]}', "line 2: every message needs a from"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
            "line 2: a system message may only come first",
        ),
        (
            '{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}]}',
            r"line 2: every turn must be text and not empty \(an assistant's",
        ),
        ('{"prompt": "\\ud800"}', "line 2: not valid Unicode"),
        ("[" * 100_000, "line 2: not JSON that can be read"),
        ('{"turns": ["  "]}', "line 2: every turn must be text"),
        ('{"prompt": 3}', "line 2: every turn must be text"),
        ('{"messages": [{"role": "user"}]}', "line 2: every message needs"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "line 2: every conversation must begin",
        ),
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


def test_bad_lines_are_counted_and_left_out_only_when_told(tmp_path: Path) -> None:
    path = _file(tmp_path, "bad.jsonl", "{", '{"prompt": "a"}', '{"x": 1}', "}", '{"prompt": "b"}')
    with pytest.raises(DataError, match=r"line 1: not JSON .*3 bad lines: 2 not JSON, 1 expected"):
        read_prompts(path)
    said: list[str] = []
    kept = read_prompts(path, skip_bad=True, say=said.append)
    assert [(p.line, p.turns) for p in kept] == [(2, ("a",)), (5, ("b",))]
    assert len(said) == 1 and "3 bad lines" in said[0] and "line 1" in said[0]
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(_file(tmp_path, "all.jsonl", "{"), skip_bad=True)


def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [
        {"messages": [{"role": "user", "content": "one"}], "prompt": None},
        {"messages": None, "prompt": "two"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    expected = [Prompt("table", 1, ("one",)), Prompt("table", 2, ("two",))]
    assert read_prompts(tmp_path / "table.parquet") == expected
    whole = (tmp_path / "table.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"torn\.parquet: not a parquet file"):
        read_prompts(tmp_path / "torn.parquet")
    (tmp_path / "torn.parquet").unlink()

    datasets = pytest.importorskip("datasets")
    (tmp_path / "sets").mkdir()
    datasets.Dataset.from_list([{"prompt": "three"}]).save_to_disk(str(tmp_path / "sets" / "saved"))
    assert read_prompts(tmp_path / "sets") == [Prompt("saved", 1, ("three",))]
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "four"}])})
    split.save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(DataError, match=r"several splits; name one: .*train"):
        read_prompts(tmp_path / "dict")


def test_an_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r"dspark\[datasets\]"):
        read_prompts(tmp_path / "a.parquet")


def test_a_conversation_as_far_as_it_got() -> None:
    prompt = Prompt("chat", 1, ("a", "b", "c"), "Be brief.", ("x", None, "z"))
    assert [m["content"] for m in prompt.conversation(prompt.answers)] == [
        "Be brief.", "a", "x", "b", "c", "z"
    ]  # fmt: skip
    roles = [m["role"] for m in prompt.conversation(("mine", None))]
    assert roles == ["system", "user", "assistant", "user"]
