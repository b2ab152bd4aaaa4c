"""Files that grow by lines: what was torn is cut, what is somebody else's is left alone."""

import pytest

from dspark.core.errors import DataError
from dspark.data.lines import cut_torn_line, whole_lines
from dspark.data.responses import ResponseFile
from dspark.data.synthesis import SynthesisFile

BEGIN = b'{"a": '


@pytest.mark.parametrize(
    ("data", "lines", "left"),
    [
        (b"", [], b""),
        (b'{"a', [], b""),
        (b'{"a": 1}\n{"a": 2}\n', [b'{"a": 1}', b'{"a": 2}'], b'{"a": 1}\n{"a": 2}\n'),
        (b'{"a": 1}\n{"a": 2', [b'{"a": 1}'], b'{"a": 1}\n'),
        (b'{"a": 1}\n{"a": 2}', [b'{"a": 1}', b'{"a": 2}'], b'{"a": 1}\n{"a": 2}\n'),
    ],
)
def test_a_torn_last_line_is_cut_and_one_that_only_lacks_its_end_is_not(
    data, lines, left, tmp_path
):
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    assert whole_lines(path, begin=BEGIN) == lines
    assert path.read_bytes() == data, "reading changes nothing"
    cut_torn_line(path)
    assert path.read_bytes() == left


PROMPTS = [
    b'{"turns": ["my only prompt"]}',
    b'{"prompt": "my only prompt"}',
    b'{"prompt": "one"}\n{"prompt": "two"}',
    b"my only prompt",
    b'{"format": "something else"}',
]


@pytest.mark.parametrize("data", PROMPTS)
def test_a_file_of_the_users_named_by_mistake_keeps_every_byte(data, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match="not a response file"):
        ResponseFile(path, target="t", template_hash=None, vocab_size=99)
    with pytest.raises(DataError, match=r"something else|not a synthesised prompt"):
        SynthesisFile(path, target="t", seed=0)
    assert path.read_bytes() == data
