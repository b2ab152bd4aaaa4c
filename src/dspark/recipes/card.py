"""The model card that lies in a bundle as README.md: only what was measured."""

from typing import Any

from dspark.drafters.build import drafter_name
from dspark.drafters.config import DraftConfig, DSparkConfig


def model_card(target: str, config: DraftConfig, training: dict[str, Any]) -> str:
    validation = training["validation"]
    acceptance = ", ".join(f"{value:.3f}" for value in validation["conditional_acceptance"])
    name = drafter_name(config)
    head = ""
    if isinstance(config, DSparkConfig) and config.markov_rank:
        head = f" {config.markov_head_type} head of rank {config.markov_rank},"
    return f"""# {name} drafter for {target}

A draft bundle of dspark (DeepSpec's tensor names; slot 0 follows the anchor): {name},
{config.num_hidden_layers} layers, block of {config.block_size},{head} tapped layers
{list(config.target_layer_ids)}. Embedding and LM head are the target's and are not stored.

## Training

* {training["response_tokens"]:,} tokens in {training["responses"]:,} responses that the target
  itself wrote (temperatures 0 and 1) to the prompts of: {", ".join(training["prompt_files"])}
* {training["steps"]:,} steps, {training["positions"]:,} drafted positions, {training["seconds"]:,}
  seconds
* command: `{training["command"]}`

The validation prompts (sha256 of the first user turn is 0 modulo 10) were never trained on, but
they come from the same files: these numbers are **in-distribution**.

## Measured on held-out responses, analytically

Accepted length 1 + sum of prefix products of the acceptance 1 - TV, averaged over both temperatures
of the text, draft and target at temperature 1, teacher-forced:

* accepted length {validation["accepted_length"]:.3f}
* conditional acceptance by position: {acceptance}

Run `dspark eval` for accepted lengths of real decoding.
"""
