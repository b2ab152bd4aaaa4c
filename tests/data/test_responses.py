import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.core.errors import DataError, DSparkError
from dspark.data.responses import Response, ResponseFile


def _response(line: int, sample: int = 0, *, tokens: int = 40, top: int = 50000) -> Response:
    rng = np.random.default_rng(line * 10 + sample)
    return Response(
        file="gsm8k",
        line=line,
        sample=sample,
        temperature=1.0,
        seed=2**62 + line,
        finish_reason="stop",
        prompt_ids=rng.integers(0, top, 17).astype(np.int32),
        response_ids=rng.integers(0, top, tokens).astype(np.int32),
    )


def _open(path: Path, **changes: Any) -> ResponseFile:
    return ResponseFile(
        path, **{"target": "t", "template_hash": "h", "vocab_size": 50000, **changes}
    )


def _same(a: Response, b: Response) -> bool:
    plain = ("file", "line", "sample", "temperature", "seed", "finish_reason")
    return (
        all(getattr(a, n) == getattr(b, n) for n in plain)
        and np.array_equal(a.prompt_ids, b.prompt_ids)
        and np.array_equal(a.response_ids, b.response_ids)
    )


@pytest.mark.parametrize("vocab_size", [50000, 200000])
def test_reads_back_what_was_written(tmp_path: Path, vocab_size: int) -> None:
    path = tmp_path / "deep" / "responses.jsonl"
    written = [_response(line, sample, top=vocab_size) for line in (1, 2) for sample in (0, 1)]
    file = _open(path, vocab_size=vocab_size)
    assert file.append(written[:3]) == 3
    assert file.append(written) == 1, "what is there already is not written again"
    again = _open(path, vocab_size=vocab_size)
    assert all(_same(a, b) for a, b in zip(again.responses, written, strict=True))
    assert written[0].key in again and ("gsm8k", 9, 0, 0) not in again and len(again) == 4
    assert again[written[1].key].line == 1
    assert again.responses[0].prompt_ids.dtype == np.int32


def test_response_marks_its_own_tokens() -> None:
    response = _response(1, tokens=3)
    assert len(response.token_ids) == 20
    assert response.supervised.tolist() == [False] * 17 + [True] * 3


def test_torn_tail_is_dropped_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    _open(path).append([_response(1)])
    whole = path.read_bytes()
    _open(path).append([_response(2)])
    both = path.read_bytes()
    for cut in range(len(whole), len(both), 37):
        path.write_bytes(both[:cut])
        file = _open(path)
        assert len(file) == 1 and path.read_bytes() == whole
    file.append([_response(2)])
    assert path.read_bytes() == both
    for cut in (0, 5):  # not even the header got out
        path.write_bytes(both[:cut])
        assert len(_open(path)) == 0
        assert _open(path).append([_response(1)]) == 1


def test_small_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    _open(path).append([_response(line, tokens=200) for line in range(1, 21)])
    assert path.stat().st_size / 20 < 217 * 2 * 4 / 3 + 220


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    _open(path).append([_response(1), _response(2)])
    lines = path.read_text().splitlines()
    broken = {
        "not JSON": [lines[0], lines[1][:50], lines[2]],
        "bit": [lines[0], lines[1].replace('"crc":', '"crc":1'), lines[2]],
        "field": [lines[0], lines[1].replace('"seed"', '"sead"'), lines[2]],
    }
    for content in broken.values():
        path.write_text("\n".join(content) + "\n")
        with pytest.raises(DataError, match="line 2: not a response"):
            _open(path)
    path.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(DataError, match=r"line 4:.*twice"):
        _open(path)


def test_another_target_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    _open(path).append([_response(1)])
    for change in ({"target": "u"}, {"template_hash": None}, {"vocab_size": 4}, {"thinking": True}):
        with pytest.raises(DataError, match="was written with"):
            _open(path, **change)
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="not a response file"):
        _open(path)


def test_a_header_alone_is_nobodys(tmp_path: Path) -> None:
    """As a run leaves it that failed before its first response."""
    path = tmp_path / "r.jsonl"
    _open(path)
    left = path.read_bytes()
    assert len(_open(path, target="u", read_only=True)) == 0 and path.read_bytes() == left
    _open(path, target="u").append([_response(1)])
    with pytest.raises(DataError, match="was written with target u, not t"):
        _open(path)
    assert len(_open(path, target="u")) == 1


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    file = _open(tmp_path / "r.jsonl", vocab_size=100)
    with pytest.raises(DataError, match=r"token ids must be in \[0, 100\)"):
        file.append([_response(1)])
    assert len(_open(tmp_path / "r.jsonl", vocab_size=100)) == 0


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes went half-way out when the disk was full."""
    path = tmp_path / "r.jsonl"
    file = _open(path)
    file.append([_response(1)])
    before = path.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DSparkError, match=r"No space left.* 1 responses written before"):
            file.append([_response(2)])
    assert path.read_bytes() == before and len(file) == 1
    assert file.append([_response(2)]) == 1, "what failed is not taken for done"
    assert len(_open(path)) == 2
