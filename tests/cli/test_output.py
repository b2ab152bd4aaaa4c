import io
import json

import pytest

from dspark.cli.output import Screen, print_error


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_the_exact_text_without_colours_or_wrapping() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    long = "word " * 60
    screen.token(long, "accepted")
    screen.token("[bold]\n", "corrected")
    screen.legend()
    assert stream.getvalue() == long + "[bold]\n"


def test_a_terminal_gets_colours_by_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    screen = Screen(stream)
    screen.token("one", "accepted")
    screen.token("two", "corrected")
    assert stream.getvalue() == "\x1b[32mone\x1b[0m\x1b[33mtwo\x1b[0m"


@pytest.mark.parametrize(
    "piece", ["\n", "a\n", "\n\n", " b", "c ", "\td", "word " * 60, "[red]x[/]"]
)
def test_a_terminal_keeps_every_character(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    Screen(stream).token(piece, "plain")
    assert stream.getvalue().expandtabs() == piece.expandtabs()


@pytest.mark.parametrize("before", ["", "mid-line", "a line\n"])
def test_json_is_the_last_line_and_compact(before: str) -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    screen.token(before, "plain")
    screen.json({"text": "ü\nb", "speedup": 1.5})
    last = stream.getvalue().splitlines()[-1]
    assert last == '{"text":"ü\\nb","speedup":1.5}'
    assert json.loads(last) == {"text": "ü\nb", "speedup": 1.5}
    assert stream.getvalue().startswith(before)


def test_json_refuses_what_is_no_json() -> None:
    with pytest.raises(ValueError):
        Screen(io.StringIO()).json({"speedup": float("nan")})


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("first\n  second")
    assert capsys.readouterr().err == "error: first second\n"
