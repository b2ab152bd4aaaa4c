import pytest

from dspark.core.errors import ConfigError
from dspark.core.guided import Guided


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Guided.regex(""), "regex is empty"),
        (lambda: Guided.grammar("  \n"), "grammar is empty"),
        (lambda: Guided.json_schema("{nope"), "json_schema is not JSON"),
        (lambda: Guided.json_schema("[1]"), "it must be a JSON object"),
        (lambda: Guided.json_schema({"a": object()}), "json_schema is not JSON"),
        (lambda: Guided.regex("a" * 300_000), "the limit is 262,144"),
        (lambda: Guided("xml", "a"), "guided kind is 'xml'"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_schema_is_text_or_a_dictionary():
    assert Guided.json_schema('{"type": "array"}') == Guided.json_schema({"type": "array"})
