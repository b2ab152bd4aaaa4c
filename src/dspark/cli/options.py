"""Options that several commands share: one name, one meaning, one help text.

Values are checked by the classes that own them (`SamplingParams`, policies, loaders), so the Python
API refuses the same things in the same words. Ranges stand here only where no such class is made
before the model is loaded: a number that cannot be is told at once.
"""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str | None,
    typer.Option(
        help="Target model: a folder, a hub id or a GGUF file. Default: the embedded model.",
        show_default=False,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        help="Draft bundle: a folder; or lookup: n-gram matches in the text, which need no "
        "training. Default: the shipped one for the embedded target, none for another.",
        show_default=False,
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(
        help="Draft at most so many tokens a round. Default: the drafter's whole block; N with "
        "policy fixed:N; with early, async, marginal and global as many of it as pay.",
        show_default=False,
    ),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="How many draft tokens to verify: off, fixed:N, threshold:X, early, async, marginal "
        "or global. Default: what the bundle says, else its whole block.",
        show_default=False,
    ),
]
Verification = Annotated[
    str | None,
    typer.Option(
        help="Verification rule: rejection, or coupled (the default where a seed is given).",
        show_default=False,
    ),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy decoding.")]
TopK = Annotated[int, typer.Option(help="Sample among the k most likely tokens; 0 means all.")]
TopP = Annotated[
    float, typer.Option(help="Sample among the most likely tokens that reach this probability.")
]
MinP = Annotated[
    float, typer.Option(help="Drop tokens less likely than this share of the most likely one.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text. Default: drawn anew.", show_default=False
    ),
]
BaseSeed = Annotated[
    int,
    typer.Option(
        min=0, max=2**63 - 1,
        help="Every text's seed is derived from it, the file, line and sample.",
    ),
]  # fmt: skip
Samples = Annotated[int, typer.Option(min=1, help="Texts per prompt, each with its own seed.")]
TextsAtOnce = Annotated[int, typer.Option("--max-requests", help="Texts generated at once.")]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="End the text before this string. Repeatable.", show_default=False),
]
Choices = Annotated[int, typer.Option("--n", help="So many texts for the same prompt.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="Show each token's log-probability under the target, and so many alternatives.",
        show_default=False,
    ),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|JSON",
        help="The text must be JSON that fits this schema ({} is any JSON).",
        show_default=False,
    ),
]
Regex = Annotated[
    str | None, typer.Option(help="The text must match this expression.", show_default=False)
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="The text must follow this grammar, in Lark's notation.",
        show_default=False,
    ),
]  # fmt: skip
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted from the logits of tokens already generated.")
]
FrequencyPenalty = Annotated[float, typer.Option(help="The same for every time they were.")]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divides the logits of tokens in prompt and text; 1 is off.")
]
MaxNewTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.jsonl",
        help='Prompts, one {"turns": ["..."]} a line; a domain is the file\'s stem. '
        "Repeatable. Default: the shipped ones.",
        show_default=False,
    ),
]
TrainingPrompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="PATH",
        help="Prompts: a jsonl or parquet file (turns, prompt, messages or conversations), a "
        "saved dataset, or a folder of these. Repeatable.",
        show_default=False,
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave bad prompt lines out, and say how many.")
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="For chat templates that can switch thinking. Default: the template's own.",
        show_default=False,
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(help="At most so many answers a conversation. Default: all.", show_default=False),
]
Split = Annotated[
    str | None,
    typer.Option(
        help="validation (one prompt in ten, never trained on) or all. "
        "Default: validation for given files, all for the shipped ones.",
        show_default=False,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(help="Only the first so many prompts of each domain."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Packed CPU weights: fp32, bf16, fp16, int8 or q4. Default: what suits best.",
        show_default=False,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, or cuda, where weights are bf16 (default) or fp32. Not yet run on a GPU."
    ),
]
CudaGraphs = Annotated[
    bool | None,
    typer.Option(
        "--cuda-graphs/--no-cuda-graphs",
        help="Capture draft and verification in CUDA graphs. Default: where there is CUDA. Not yet "
        "run on a GPU.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads. Default: PyTorch's choice.", show_default=False)
]
ManyRequests = Annotated[
    bool,
    typer.Option(
        "--many-requests",
        help="Beside q4 or int8 weights: serve greedy and seeded requests with the bf16 copy of "
        "the weights. Slower for one at a time, 1.4 to 2.8 times as fast at 32 requests.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="End with one JSON document as the last line of the output.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
