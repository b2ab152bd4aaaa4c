"""An older bundle stays until the new one is there, whatever comes between."""

import sys
from pathlib import Path

import pytest

from dspark.checkpoints import native


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_interrupted_between_the_renames(tmp_path, monkeypatch, error):
    old, new = tmp_path / "bundle", tmp_path / "staging"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / "config.json").write_text(text)

    def interrupted(self: Path, target: Path) -> None:
        raise error

    monkeypatch.setattr(native, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error):
        native._swap(new, old)
    assert (old / "config.json").read_text() == "old"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["bundle", "staging"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges folders in one step")
def test_there_is_no_moment_without_a_bundle(tmp_path, monkeypatch):
    old, new = tmp_path / "bundle", tmp_path / "staging"
    for folder, text in ((old, "old"), (new, "new")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    monkeypatch.delattr(Path, "replace")
    monkeypatch.delattr(Path, "rename")
    native._swap(new, old)
    assert (old / "config.json").read_text() == "new"
