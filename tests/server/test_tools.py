"""Tool calls in a text that comes piece by piece."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from dspark.server.tools import ToolCalls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>"}}\n</tool_call>'


def parse(pieces):
    parser = ToolCalls()
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(content for content, _ in parts), [c for _, calls in parts for c in calls]


@given(st.lists(st.integers(0, len(CALL) + 8), max_size=6))
def test_pieces_change_nothing(cuts):
    text = f"Yes: {CALL} ok"
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    content, [call] = parse([text[a:b] for a, b in itertools.pairwise(edges)])
    assert content == "Yes:  ok"
    assert call["function"]["name"] == "add" and call["index"] == 0 and call["type"] == "function"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "<tool_call>"}


def test_two_calls_and_a_missing_end():
    content, calls = parse([CALL, '<tool_call>{"name": "now"}'])
    assert content == "" and [call["index"] for call in calls] == [0, 1]
    assert calls[1]["function"] == {"name": "now", "arguments": "{}"}
    assert calls[0]["id"] != calls[1]["id"]


def test_what_is_no_call_stays_text():
    for text in (
        "<tool_call>no json</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>[[1]]</tool_call>",
        "a < b <tool",
        "<tool_call>",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ):
        assert parse([text]) == (text, [])
        assert parse(text[:200]) == (text[:200], [])
