from typing import Any

import pytest

from dspark.core.errors import ConfigError
from tests.drafters.tiny import tiny_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"block_size": 2.0}, "block_size is 2.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"mask_token_id": 61}, "mask_token_id is 61; it must be below 61"),
        ({"target_layer_ids": ()}, "must name a layer"),
        ({"target_layer_ids": (1, 5)}, "target_layer_ids has 5; ids of 5 layers go from -1 to 4"),
        ({"target_layer_ids": (-2,)}, "target_layer_ids has -2"),
        ({"target_layer_ids": (1, 1)}, "repeats a layer"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_head_type": "lstm"}, "no markov_head_type 'lstm'; there are vanilla, gated, rnn"),
        ({"markov_rank": 0}, "needs a Markov head"),
        ({"enable_confidence_head": "yes"}, "enable_confidence_head is 'yes'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
    ],
)
def test_bad_values_are_refused_with_their_limit(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        tiny_config(**changes)
    assert "\n" not in str(error.value)


def test_dflash_is_a_config_without_heads() -> None:
    config = tiny_config(markov_rank=0, enable_confidence_head=False)
    assert not config.has_markov_confidence
    assert config.feature_size == 3 * 24
