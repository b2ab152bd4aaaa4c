"""The model card that lies in a bundle as README.md: only what was measured."""

from pathlib import Path
from typing import Any

from dspark.checkpoints.native import CARD, read_bundle
from dspark.drafters.build import drafter_name
from dspark.drafters.config import DraftConfig, DSparkConfig
from dspark.recipes.evaluate import Evaluation


def add_evaluation(bundle_folder: Path, evaluation: Evaluation) -> None:
    """Writes the bundle's card anew, with what decoding measured."""
    bundle = read_bundle(bundle_folder)
    assert bundle.info is not None
    card = model_card(bundle.info.target, bundle.config, bundle.info.training, evaluation)
    partial = bundle_folder / f"{CARD}.partial"
    partial.write_text(card, encoding="utf-8")
    partial.replace(bundle_folder / CARD)


def model_card(
    target: str,
    config: DraftConfig,
    training: dict[str, Any],
    evaluation: Evaluation | None = None,
) -> str:
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

* {training["response_tokens"]:,} tokens in {training["responses"]:,} answers
  {training["response_origin"]}, to the prompts of: {", ".join(training["prompt_files"])}
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

{_decoded(evaluation)}
"""


def _decoded(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "Run `dspark eval` for accepted lengths of real decoding."
    rows = "\n".join(
        f"| {name} | {result.acceptance.accepted_length:.3f} | "
        + ("-" if result.ci95 is None else "{:.3f} to {:.3f}".format(*result.ci95))
        + f" | {result.prompts} |"
        for name, result in evaluation.domains.items()
    )
    return f"""## Measured by decoding held-out prompts

Temperature {evaluation.sampling.temperature:g}, rule `{evaluation.verification}`, policy
`{evaluation.policy}`, at most {evaluation.sampling.max_new_tokens} tokens:

| domain | accepted length | 95% interval | prompts |
|---|---|---|---|
{rows}"""
