"""What a drafter is trained on: the target's own answers, or those that conversations came with."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.core.errors import DataError
from dspark.data.masks import mask_conversation
from dspark.data.packing import TrainingSequence
from dspark.data.prompts import Prompt
from dspark.data.responses import Response
from dspark.data.template import extends


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    train: list[TrainingSequence]
    held_out: list[TrainingSequence]
    """Of validation prompts."""
    origin: str
    """Who wrote the answers, for the card: "... tokens in ... answers" + origin."""
    answers: int
    """To training prompts."""
    files: tuple[str, ...]

    def __post_init__(self) -> None:
        """DataError where the split leaves one side empty."""
        if not (self.train and self.held_out):
            raise DataError(
                f"{len(self.train)} training and {len(self.held_out)} validation responses; both "
                f"are needed: give more prompts (one in ten is validation), without --no-generate"
            )

    @property
    def supervised_tokens(self) -> int:
        return sum(int(sequence.supervised.sum()) for sequence in self.train)


def from_responses(prompts: Sequence[Prompt], responses: Iterable[Response]) -> TrainingData:
    """Raises DataError for responses without their prompts, and for a side without any."""
    prompts_by_place = {(p.file, p.line): p for p in prompts}
    sides: dict[bool, list[Response]] = {False: [], True: []}
    for response in responses:
        prompt = prompts_by_place.get((response.file, response.line))
        if prompt is None:
            raise DataError(
                f"the response to {response.file}, line {response.line} has no prompt in the given "
                f"files; give the prompts it was written for"
            )
        sides[prompt.is_validation].append(response)
    train, held_out = sides[False], sides[True]
    temperatures = sorted({r.temperature for r in train}, reverse=True)
    return TrainingData(
        train=_conversations(train),
        held_out=_conversations(held_out),
        origin="that the target itself wrote (temperature "
        + " and ".join(f"{temperature:g}" for temperature in temperatures)
        + ")",
        answers=len(train),
        files=tuple(sorted({r.file for r in train})),
    )


def _conversations(responses: Sequence[Response]) -> list[TrainingSequence]:
    """Answers of one conversation share a sequence where the later text goes on from the earlier
    one; some templates (Qwen3's, which drops past thoughts) write it anew."""
    sequences: list[TrainingSequence] = []
    last: dict[tuple[str, int, int], int] = {}
    for response in sorted(responses, key=lambda r: r.turn):
        sequence = TrainingSequence(response.token_ids, response.supervised)
        place = last.get(response.key[:3])
        if place is not None and extends(sequence.token_ids, sequences[place].token_ids):
            earlier = sequences[place].supervised
            sequence.supervised[: len(earlier)] |= earlier
            sequences[place] = sequence
        else:
            last[response.key[:3]] = len(sequences)
            sequences.append(sequence)
    return sequences


def from_conversations(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    thinking: bool | None,
    max_tokens: int,
    say: Callable[[str], None],
) -> TrainingData:
    """The answers that the conversations came with, however many turns they have.

    They are off-policy: a drafter learns to guess them, and the target may say something else.
    Texts are cut after `max_tokens`, which is said; so is what has no answer or is refused by the
    template.
    """
    sides: dict[bool, list[TrainingSequence]] = {False: [], True: []}
    left_out: Counter[str] = Counter()
    files = set()
    answers = 0
    for prompt in prompts:
        if not any(prompt.answers):
            left_out["without an answer"] += 1
            continue
        try:
            texts = mask_conversation(
                tokenizer, prompt.conversation(prompt.answers), thinking=thinking
            )
        except DataError:
            left_out["refused by the template"] += 1
            continue
        for text in texts:
            left_out["cut"] += len(text.token_ids) > max_tokens
            sequence = TrainingSequence(text.token_ids[:max_tokens], text.supervised[:max_tokens])
            if sequence.supervised.any():
                sides[prompt.is_validation].append(sequence)
        if not prompt.is_validation:
            files.add(prompt.file)
            answers += sum(answer is not None for answer in prompt.answers)
    cut = left_out.pop("cut", 0)
    for kind, count in left_out.items():
        say(f"{count} of {len(prompts)} conversations are {kind} and left out")
    if cut:
        say(f"{cut} texts are cut after {max_tokens} tokens")
    return TrainingData(
        train=sides[False],
        held_out=sides[True],
        origin="that the files came with, written by others (off-policy)",
        answers=answers,
        files=tuple(sorted(files)),
    )
