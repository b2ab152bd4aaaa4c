"""Folders in DeepSpec's layout: loaded as they are, or refused with the reason."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from dspark.checkpoints.deepspec import from_deepspec, to_deepspec
from dspark.checkpoints.fit import check_fit
from dspark.checkpoints.lint import expected_shapes
from dspark.checkpoints.native import read_bundle
from dspark.core.errors import CheckpointError
from dspark.drafters.config import DraftConfig, DSparkConfig, Eagle3Config
from tests.checkpoints.folders import D, V, deepspec_config, deepspec_tensors, write_folder
from tests.drafters.tiny import tiny_binding, tiny_chain_config, tiny_config


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize("dflash", [False, True])
def test_loads_with_and_without_the_targets_tables(
    tmp_path: Path, dflash: bool, tables: bool
) -> None:
    tensors = deepspec_tensors(dflash=dflash, tables=tables)
    bundle = read_bundle(write_folder(tmp_path / "b", tensors, deepspec_config(dflash=dflash)))
    assert bundle.info is None
    assert bundle.config.rope_theta == 1e6
    assert bundle.config.target_layer_ids == (0, 1, 3)
    assert set(bundle.target_copies) == (
        {"embed_tokens.weight", "lm_head.weight"} if tables else set()
    )
    state = bundle.model().state_dict()
    assert state.keys() == tensors.keys() - bundle.target_copies.keys()
    for name, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, tensors[name].float())
        assert torch.equal(bundle.tensors[name], tensors[name])


def test_shapes_of_the_released_qwen3_4b_drafters() -> None:
    """64 and 60 tensors; bytes as measured on the released files, their headers taken off."""
    config = {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 5,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "num_target_layers": 36, "target_layer_ids": (1, 9, 17, 25, 33),
        "mask_token_id": 151669, "block_size": 7,
    }  # fmt: skip
    dspark = expected_shapes(DSparkConfig(**config, markov_rank=256))
    dflash = expected_shapes(DSparkConfig(**config, markov_rank=0, enable_confidence_head=False))
    tables = 2 * 151936 * 2560

    def stored_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
        return 2 * (tables + sum(torch.Size(shape).numel() for shape in shapes.values()))

    assert (len(dspark) + 2, len(dflash) + 2) == (64, 60)
    assert stored_bytes(dspark) == 2_786_267_138
    assert stored_bytes(dflash) == 2_630_679_040


def test_missing_extra_and_misshaped_tensors_are_all_listed(tmp_path: Path) -> None:
    tensors = deepspec_tensors()
    del tensors["layers.1.mlp.up_proj.weight"], tensors["norm.weight"]
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["fc.weight"] = torch.zeros(D, D)
    tensors["embed_tokens.weight"] = torch.zeros(V + 3, D)
    folder = write_folder(tmp_path / "b", tensors, deepspec_config())
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    for words in (
        "missing layers.1.mlp.up_proj.weight [40, 24]",
        "missing norm.weight [24]",
        "extra layers.0.self_attn.q_proj.bias [32]",
        "fc.weight is [24, 24], must be [24, 72]",
        "embed_tokens.weight is [64, 24], must be [61, 24]",
    ):
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma4DSparkModel", "Gemma 4"),
        ("Gemma4Eagle3Model", "Gemma 4"),
        ("LlamaForCausalLMEagle3", "reduced vocabulary"),
        ("DSparkDraftModel", "SpecForge"),
        ("DSparkSpeculator", "speculators"),
        ("LlamaForCausalLM", "no drafter of that name"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    folder = write_folder(tmp_path / "b", deepspec_tensors(), deepspec_config(architectures=[name]))
    with pytest.raises(CheckpointError, match=f"architecture {name} is not .*{reason}"):
        read_bundle(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": None}, "architecture none"),
        ({"markov_rnak": 6}, "unknown key 'markov_rnak': did you mean 'markov_rank'"),
        ({"partial_rotary_factor": 0.25}, "unknown key 'partial_rotary_factor'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        (
            {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
            "rope_type 'default' with partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is None"),
        ({"rope_parameters": [1]}, "must be an object"),
        ({"markov_head_type": "lstm"}, "no markov_head_type 'lstm'"),
        ({"target_layer_ids": "1,9"}, "target_layer_ids must name a layer"),
        ({"hidden_size": "24"}, "hidden_size is '24'"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = write_folder(tmp_path / "b", deepspec_tensors(), deepspec_config(**changes))
    with pytest.raises(CheckpointError) as error:
        read_bundle(folder)
    assert words in str(error.value)
    assert str(folder / "config.json") in str(error.value)


def eagle3_folder(folder: Path, **changes: Any) -> Path:
    """As DeepSpec writes it, by the names and shapes of its files."""
    keys = deepspec_config(architectures=["Qwen3Eagle3Model"], num_hidden_layers=36)
    for key in list(keys):
        if key.startswith(("markov", "confidence", "enable", "block", "mask", "num_anchors")):
            del keys[key]
    keys |= {
        "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
        "target_model_name_or_path": "Qwen/Qwen3-4B",
    }  # fmt: skip
    wide = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 3 * D), "norm.weight": (D,),
        "embed_tokens.weight": (V, D), "lm_head.weight": (V, D),
        **{f"layers.0.{n}.weight": (D,)
           for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"layers.0.self_attn.{n}.weight": (rows, 2 * D) for n, rows in wide.items()},
        "layers.0.self_attn.o_proj.weight": (D, 32),
        "layers.0.self_attn.q_norm.weight": (8,), "layers.0.self_attn.k_norm.weight": (8,),
        "layers.0.mlp.gate_proj.weight": (40, D), "layers.0.mlp.up_proj.weight": (40, D),
        "layers.0.mlp.down_proj.weight": (D, 40),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    return write_folder(folder, tensors, keys | changes)


def test_eagle3_loads_as_released(tmp_path: Path) -> None:
    bundle = read_bundle(eagle3_folder(tmp_path / "b"))
    assert isinstance(bundle.config, Eagle3Config)
    assert (bundle.config.block_size, bundle.config.num_hidden_layers) == (7, 1)
    state = bundle.model().state_dict()
    assert state.keys() == bundle.tensors.keys() and len(state) == 14
    for name, value in state.items():
        assert torch.equal(value, bundle.tensors[name].float())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_num_hidden_layers": 2}, "Eagle3 with 2 layers is not supported"),
        ({"ttt_length": 0}, "block_size is 0"),
        ({"step_loss_decay": 1.5}, "step_loss_decay is 1.5"),
        ({"markov_rank": 4}, "unknown key 'markov_rank'"),
    ],
)
def test_eagle3_configs_are_checked(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_bundle(eagle3_folder(tmp_path / "b", **changes))


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    keys = deepspec_config()
    del keys["block_size"], keys["rms_norm_eps"], keys["markov_rank"]
    folder = write_folder(tmp_path / "b", deepspec_tensors(), keys)
    with pytest.raises(
        CheckpointError, match="missing keys: block_size, markov_rank, rms_norm_eps"
    ):
        read_bundle(folder)


def test_older_rope_keys_are_read() -> None:
    keys = deepspec_config(rope_theta=5000.0, rope_scaling=None)
    del keys["rope_parameters"]
    assert from_deepspec(keys).rope_theta == 5000.0


def test_every_key_that_transformers_writes_for_a_qwen3_target_is_known() -> None:
    inherited = Qwen3Config(num_hidden_layers=2).to_dict()
    assert from_deepspec(inherited | deepspec_config()) == from_deepspec(deepspec_config())


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        tiny_config(confidence_head_with_markov=False),
        tiny_config(markov_head_type="gated"),
        tiny_config(markov_head_type="rnn"),
        tiny_config(markov_rank=0, enable_confidence_head=False),
        tiny_config(rope_theta=123.5, num_anchors=9),
        tiny_chain_config("eagle3", step_loss_decay=0.7, block_size=5),
        tiny_chain_config("mtp", rope_theta=99.0),
    ],
)
def test_config_survives_the_way_there_and_back(config: DraftConfig) -> None:
    assert from_deepspec(to_deepspec(config, "float16")) == config


def test_copies_of_another_targets_tables_are_refused(tmp_path: Path) -> None:
    config = from_deepspec(deepspec_config())
    binding = tiny_binding(config)
    tensors = deepspec_tensors(tables=False)
    tensors["embed_tokens.weight"] = binding.embedding_VD.to(torch.bfloat16)
    tensors["lm_head.weight"] = binding.lm_head_VD.to(torch.bfloat16)
    folder = write_folder(tmp_path / "b", tensors, deepspec_config())
    check_fit(read_bundle(folder), binding)  # bf16 rounding is no difference

    for name in ("embed_tokens.weight", "lm_head.weight"):
        other = tensors | {name: torch.randn(V, D)}
        save_file(other, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"its copy of {name} is 1..% off"):
            check_fit(read_bundle(folder), binding)
