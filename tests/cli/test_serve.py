"""`dspark serve`: its settings file. The server itself is tested in tests/server."""

import socket

import pytest

from dspark.cli.main import build_app, run
from dspark.cli.serve import serve


@pytest.fixture
def settings(monkeypatch):
    """What the command hands on, without loading or serving anything."""
    seen = {}
    import dspark.recipes.llm as llm
    import dspark.recipes.serve as recipe

    monkeypatch.setattr(llm, "LLM", lambda target, **given: seen.update(given, target=target))

    def fake(load, config, engine, _say):
        load()
        seen.update(config=config, engine=engine)

    monkeypatch.setattr(recipe, "serve", fake)
    return seen


def start(*args):
    with pytest.raises(SystemExit) as exit_:
        run(build_app({"serve": serve, "other": lambda: None}), ["serve", *args])
    return exit_.value.code


def test_a_file_gives_defaults_and_flags_win(settings, tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('port = 9\nmax-requests = 3\nlog-prompts = true\npolicy = "off"\n')
    assert start("--config", str(file), "--port", "10") == 0
    assert settings["config"].port == 10 and settings["config"].log_prompts is True
    assert settings["engine"].max_requests == 3 and settings["policy"] == "off"
    assert settings["recalibrate"] is False
    assert settings["draft_length"] is None
    file.write_text("recalibrate = true\nreceive-timeout = 5\ndraft-length = 3\n")
    assert start("--config", str(file)) == 0
    assert settings["recalibrate"] is True and settings["config"].receive_timeout == 5
    assert settings["draft_length"] == 3
    assert start("--draft-length", "2") == 0 and settings["draft_length"] == 2
    assert start() == 0
    assert settings["config"].port == 8000 and settings["config"].host == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 9", "did you mean 'port'"),
        ("max_requests = 3", "did you mean 'max-requests'"),
        ('config = "x"', "unknown key 'config'"),
        ("port = [9]", "must be one value"),
        ("port =", "cannot be read as a TOML file"),
        ('port = "many"', "port"),
        ("port = 99999", "must be in [0, 65535]"),
        ("max-requests = 0", "at least 1"),
    ],
)
def test_a_bad_file_is_refused(settings, tmp_path, capsys, text, said):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    assert start("--config", str(file)) == 2
    assert said in capsys.readouterr().err
    assert not settings


def test_a_missing_file(settings, tmp_path, capsys):
    assert start("--config", str(tmp_path / "none.toml")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_extra_is_named(settings, monkeypatch, capsys):
    import dspark.recipes.serve as recipe

    monkeypatch.setattr(recipe, "_PACKAGES", ("no_such_package",))
    assert start() == 2
    assert "pip install 'dspark[serve]'" in capsys.readouterr().err


def test_a_bundle_that_is_broken(target_folder, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    models = ["--target", str(target_folder), "--draft", str(tmp_path), "--weights", "fp32"]
    assert start(*models, "--port", "0") == 2
    assert "config.json" in capsys.readouterr().err


def test_a_port_that_is_taken(target_folder, bundle_folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        models = ["--target", str(target_folder), "--draft", str(bundle_folder)]
        assert start(*models, "--weights", "fp32", "--port", port) == 2
    assert f"port {port}" in capsys.readouterr().err
