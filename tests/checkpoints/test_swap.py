"""An older bundle stays until the new one is there, whatever comes between."""

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

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error):
        native._swap(new, old)
    assert (old / "config.json").read_text() == "old"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["bundle", "staging"]
