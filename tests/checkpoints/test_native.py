import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dspark.checkpoints.native as native
from dspark.checkpoints.bundle import Bundle, BundleInfo
from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.native import read_bundle, write_bundle
from dspark.core.errors import CheckpointError
from dspark.drafters.serving import DSparkDrafter
from tests.checkpoints.folders import deepspec_config, deepspec_tensors, write_folder
from tests.drafters.tiny import (
    Served,
    features,
    sampled,
    tiny_binding,
    tiny_config,
    tiny_model,
    uniform_noise,
)

CONFIG = tiny_config()
INFO = BundleInfo(
    target="tiny",
    embedding_hash="e" * 64,
    target_revision="r1",
    chat_template_hash="c" * 64,
    candidates=16,
    training={"positions": 1000, "command": "dspark train"},
)


def write(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "config": CONFIG,
        "info": INFO,
        "tensors": tiny_model(CONFIG).state_dict() if tensors is None else tensors,
        "card": "# A card\n",
    }
    write_bundle(folder, **arguments | changes)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_round_trip_is_bit_equal_and_so_are_the_logits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model(CONFIG)
    stored = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    bundle = read_bundle(write(tmp_path / "a" / "b", dtype=dtype))
    again = read_bundle(write(tmp_path / "c", bundle.tensors, dtype=None))
    for read in (bundle, again):
        assert read.config == CONFIG
        assert read.info == INFO
        assert read.candidates == 16
        assert read.tensors.keys() == stored.keys()
        for name, tensor in stored.items():
            assert read.tensors[name].dtype == dtype
            assert torch.equal(read.tensors[name], tensor), name
    a, b = ((tmp_path / at / "model.safetensors").read_bytes() for at in ("a/b", "c"))
    assert a == b

    model.load_state_dict({name: tensor.float() for name, tensor in stored.items()})
    blocks = []
    for drafter in (DSparkDrafter(m, tiny_binding(CONFIG)) for m in (model, again.model())):
        served = Served.of(drafter)
        table = served.admit(features(CONFIG, 6))
        blocks.append(
            drafter.draft(
                torch.tensor([5]), torch.tensor([6]), [table], served.store, texts=[[5] * 7],
                sampling=sampled(1.0), noise=uniform_noise,
            )
        )  # fmt: skip
    assert torch.equal(blocks[0].probs_RKC, blocks[1].probs_RKC)
    assert torch.equal(blocks[0].confidence_RK, blocks[1].confidence_RK)


def test_the_folder_holds_what_the_format_says(tmp_path: Path) -> None:
    folder = write(tmp_path / "b")
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    keys = json.loads((folder / "config.json").read_text())
    assert keys["architectures"] == ["Qwen3DSparkModel"]
    assert keys["dtype"] == "float16"
    assert keys["target_layer_ids"] == [-1, 1, 3]
    assert keys["dspark"] == asdict(INFO)
    assert keys["dspark"]["slot_convention"] == "anchor-first"
    assert (folder / "README.md").read_text() == "# A card\n"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_draft_vocabulary_round_trip_and_its_faults(tmp_path: Path) -> None:
    ids = torch.tensor([1, 5, 60])
    folder = write(tmp_path / "b", draft_token_ids=ids)
    bundle = read_bundle(folder)
    assert bundle.draft_token_ids is not None and torch.equal(bundle.draft_token_ids, ids)
    assert bundle.info is not None and bundle.info.draft_vocabulary == 3
    assert bundle.tensors["markov_head.markov_w2.weight"].shape == (61, 6)

    for bad in ([5, 1], [1, 1], [1, 61], [-1, 3], []):
        bad_ids = torch.tensor(bad, dtype=torch.int64)
        with pytest.raises(CheckpointError, match="ascending int64 ids below 61"):
            write(tmp_path / "never", draft_token_ids=bad_ids)
        save_file({"draft_token_ids": bad_ids}, folder / "draft_tokens.safetensors")
        with pytest.raises(CheckpointError, match="ascending int64 ids below 61"):
            read_bundle(folder)
    save_file({"draft_token_ids": ids[:2]}, folder / "draft_tokens.safetensors")
    with pytest.raises(CheckpointError, match=r"has 2 ids, config\.json says 3"):
        read_bundle(folder)
    save_file({"ids": ids}, folder / "draft_tokens.safetensors")
    with pytest.raises(CheckpointError, match="must hold exactly draft_token_ids"):
        read_bundle(folder)
    (folder / "draft_tokens.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no draft_tokens\.safetensors"):
        read_bundle(folder)


def test_rewriting_replaces_the_bundle_and_drops_its_calibration(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", draft_token_ids=torch.tensor([1, 2]))
    (folder / "calibration.json").write_text("{}")
    write(folder, card="# New\n")
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert (folder / "README.md").read_text() == "# New\n"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, existing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "b"
    if existing:
        write(folder, card="# Old\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full_disk(tensors: dict[str, Tensor], path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(native, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write(folder)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == (["b"] if existing else [])


def test_a_folder_with_anything_else_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which no bundle has"):
        write(tmp_path)
    with pytest.raises(CheckpointError, match="it is a file"):
        write(tmp_path / "thesis.tex")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_tensors_that_do_not_fit_or_are_not_finite_are_not_written(tmp_path: Path) -> None:
    state = tiny_model(CONFIG).state_dict()
    with pytest.raises(CheckpointError, match=r"missing fc\.weight"):
        write(tmp_path / "b", {name: state[name] for name in state if name != "fc.weight"})
    state["norm.weight"][3] = 70000.0
    with pytest.raises(CheckpointError, match=r"norm\.weight has 1 NaN or infinite values"):
        write(tmp_path / "b", state)  # beyond float16
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "b", state, dtype=torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_found_at_load(tmp_path: Path, value: float) -> None:
    tensors = deepspec_tensors()
    tensors["layers.1.mlp.up_proj.weight"][2, 1] = value
    tensors["embed_tokens.weight"][0] = value
    folder = write_folder(tmp_path / "b", tensors, deepspec_config())
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    assert "layers.1.mlp.up_proj.weight has 1 NaN or infinite values of 960" in str(error.value)
    assert "embed_tokens.weight has 24 NaN or infinite values" in str(error.value)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    tensors = deepspec_tensors()
    tensors["norm.weight"] = torch.ones(24, dtype=torch.int8)
    folder = write_folder(tmp_path / "b", tensors, deepspec_config())
    with pytest.raises(CheckpointError, match=r"norm\.weight is torch\.int8"):
        read_bundle(folder)


def broken(folder: Path, how: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    match how:
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "header":
            weights.write_bytes(weights.read_bytes()[:40])
        case "empty":
            weights.write_bytes(b"")
        case "no weights":
            weights.unlink()
        case "no config":
            config.unlink()
        case "config not json":
            config.write_text('{"architectures": [')
        case "config not text":
            config.write_bytes(b"\xff\xfe\x00")
        case "config a list":
            config.write_text("[]")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "model.safetensors: truncated or not safetensors"),
        ("header", "model.safetensors: truncated or not safetensors"),
        ("empty", "model.safetensors: truncated or not safetensors"),
        ("no weights", "no model.safetensors"),
        ("no config", "cannot read config.json (No such file or directory)"),
        ("config not json", "config.json: not valid JSON"),
        ("config not text", "config.json: not valid JSON"),
        ("config a list", "config.json: must hold a JSON object"),
    ],
)
def test_broken_folders_are_one_line_errors(tmp_path: Path, how: str, words: str) -> None:
    folder = write(tmp_path / "b")
    broken(folder, how)
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    assert words in str(error.value)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_bundle(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slot_convention": "anchor-last"}, "slot convention 'anchor-last'"),
        ({"format_version": 2}, "bundle format 2; this version reads format 1"),
        (
            {"candidate": 3},
            "unknown key 'candidate' in the dspark block; did you mean 'candidates'",
        ),
        ({"candidates": -1}, "dspark.candidates is -1"),
        ({"candidates": True}, "dspark.candidates is True"),
        ({"target": 5}, "dspark.target is 5"),
        ({"embedding_hash": None}, "dspark.embedding_hash is None"),
        ({"chat_template_hash": 1}, "dspark.chat_template_hash is 1"),
        ({"training": "long"}, "dspark.training is 'long'"),
        ({"slot_convention": ...}, "the dspark block has no slot_convention"),
    ],
)
def test_bad_dspark_blocks_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write(tmp_path / "b")
    keys = json.loads((folder / "config.json").read_text())
    keys["dspark"] = {k: v for k, v in (keys["dspark"] | changes).items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    assert words in str(error.value)


def bundle(tmp_path: Path) -> Bundle:
    return read_bundle(write(tmp_path / "b"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"embedding_VD": torch.zeros(61, 32)}, "hidden size is 24, the target has 32"),
        ({"embedding_VD": torch.zeros(64, 24)}, "vocabulary is 61, the target has 64"),
        ({"num_target_layers": 30}, "number of target layers is 5, the target has 30"),
        ({"num_target_layers": 3}, "it taps layers [3]; the target's go from -1 to 2"),
        ({"embedding_hash": "f" * 64}, "with embedding hash eeeeeeeeeeee, the target's is ffff"),
        ({"chat_template_hash": "d" * 64}, "template hash cccccccccccc, the target's is dddd"),
        ({"chat_template_hash": None}, "template hash cccccccccccc, the target's is none"),
    ],
)
def test_drafters_of_other_targets_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError) as error:
        check_fit(bundle(tmp_path), tiny_binding(CONFIG, **changes))
    assert words in str(error.value)
    assert "does not fit the target tiny" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_misfit_is_listed_and_a_fit_passes(tmp_path: Path) -> None:
    check_fit(bundle(tmp_path), tiny_binding(CONFIG))
    with pytest.raises(CheckpointError) as error:
        check_fit(bundle(tmp_path), tiny_binding(CONFIG, num_target_layers=3, embedding_hash="f"))
    assert str(error.value).count(";") >= 2


def test_stored_weights_are_what_the_file_says(tmp_path: Path) -> None:
    """Another reader of safetensors sees DeepSpec's names and no table of the target."""
    names = load_file(write(tmp_path / "b") / "model.safetensors").keys()
    assert names == deepspec_tensors(tables=False).keys()


def test_training_a_loaded_model_does_not_write_into_the_bundle(tmp_path: Path) -> None:
    loaded = read_bundle(write(tmp_path / "b", dtype=torch.float32))
    model = loaded.model()
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model.norm.weight.add_(1.0)
    assert torch.equal(loaded.tensors["norm.weight"], tiny_model(CONFIG).norm.weight)
