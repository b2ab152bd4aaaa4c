"""Several processes of torchrun meet the same error: one tells it."""

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dspark.cli import ranks
from dspark.core.errors import ConfigError
from tests.cli.test_main import outcome, raising


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """As torchrun has it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_an_error_is_told_once(store: TCPStore, capsys: pytest.CaptureFixture[str]) -> None:
    for _rank in range(3):
        assert outcome(raising(ConfigError("steps is 0")), "--debug") == 2
    err = capsys.readouterr().err
    assert err.count("error: steps is 0") == err.count("Traceback") == 1
    assert outcome(raising(ConfigError("steps is -1"))) == 2, "another error is another line"
    assert capsys.readouterr().err == "error: steps is -1\n"


def test_a_restart_tells_again(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks.told_by_another("x") for _ in range(2)] == [False, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not ranks.told_by_another("x")


def test_without_a_store_everyone_tells(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "_PATIENCE", timedelta(milliseconds=100))
    monkeypatch.setenv("MASTER_PORT", "1")
    assert [ranks.told_by_another("x") for _ in range(2)] == [False, False]
    monkeypatch.delenv("MASTER_PORT")
    assert not ranks.told_by_another("x")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert [ranks.told_by_another("x") for _ in range(2)] == [False, False]
