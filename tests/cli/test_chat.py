"""`dspark chat`: a conversation, its commands, and Ctrl-C."""

import io

import pytest

from dspark.cli import chat as module
from dspark.cli.chat import Session, talk
from dspark.cli.output import Screen
from dspark.core.sampling import SamplingParams
from dspark.recipes.llm import LLM

PARAMS = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(target_folder, bundle_folder):
    return LLM(str(target_folder), draft=bundle_folder, weights="fp32")


def converse(llm, monkeypatch, *lines, session=None):
    """Types the lines; an exception among them is raised instead. Returns session and output."""
    waiting = iter(lines)

    def read(_prompt=""):
        line = next(waiting, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(module, "input", read, raising=False)
    out = io.StringIO()
    session = session or Session(None)
    talk(llm, PARAMS, session, Screen(out))
    return session, out.getvalue()


def test_the_conversation_grows(llm, monkeypatch, capsys):
    session, out = converse(llm, monkeypatch, "Hello", "More", "", "/stats")
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    [first] = llm.chat("Hello", PARAMS)
    assert session.messages[1]["content"] == first.text and out.startswith(first.text)
    second = llm.start([llm.encode_messages(session.messages[:3])], PARAMS).run()[0]
    assert session.messages[3]["content"] == second.text
    assert "2 answers, 12 tokens" in capsys.readouterr().err


def test_commands(llm, monkeypatch, capsys):
    session = Session("Be brief.")
    converse(llm, monkeypatch, "/stats", "/help", "/nothing", "Hello", "/new", "/exit", "Never",
             session=session)  # fmt: skip
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    err = capsys.readouterr().err
    assert "nothing was answered" in err and "no command /nothing" in err and "/exit" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(llm, monkeypatch):
    forward, calls = llm.loaded.target.forward, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(llm.loaded.target, "forward", interrupted)
    session, out = converse(llm, monkeypatch, KeyboardInterrupt(), "Hello", "Again")
    assert "[stopped]" in out
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2
    assert 0 < session.tokens < 12 and session.answers == 2


def test_a_conversation_that_is_too_long_can_go_on(llm, monkeypatch, capsys):
    session, _ = converse(llm, monkeypatch, "a" * 300, "Hello")
    assert "256 tokens" in capsys.readouterr().err
    assert [m["role"] for m in session.messages] == ["user", "assistant"]
    assert session.messages[0]["content"] == "Hello"
