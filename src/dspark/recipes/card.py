"""The model card that lies in a bundle as README.md: only what was measured."""

from typing import Any

from dspark.drafters.config import DSparkConfig


def model_card(target: str, config: DSparkConfig, training: dict[str, Any]) -> str:
    validation = training["validation"]
    acceptance = ", ".join(f"{value:.3f}" for value in validation["conditional_acceptance"])
    return f"""# DSpark drafter for {target}

A DSpark draft bundle (DeepSpec's tensor names; slot 0 is the anchor): {config.num_hidden_layers}
layers, block of {config.block_size}, Markov rank {config.markov_rank}, tapped layers
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
