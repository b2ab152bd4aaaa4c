"""Which answers a file of responses lacks, turn by turn.

Every answer of a conversation is the target's own, and later ones are to a text that holds the
earlier ones, so an answer can only be asked for when those before it are there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from dspark.core.random import derive_seed
from dspark.data.conversation import Message
from dspark.data.prompts import Prompt
from dspark.data.responses import Response, ResponseFile, ResponseKey


@dataclass(frozen=True, slots=True)
class Question:
    """An answer to be written: to turn `len(answers)` of a prompt."""

    prompt: Prompt
    sample: int
    turns: int
    """So many turns of the prompt are asked in all."""
    answers: tuple[str, ...] = ()

    @property
    def turn(self) -> int:
        return len(self.answers)

    @property
    def key(self) -> ResponseKey:
        return self.prompt.file, self.prompt.line, self.sample, self.turn

    @property
    def left(self) -> int:
        """Answers to write, this one and those after it."""
        return self.turns - self.turn

    @property
    def messages(self) -> list[Message]:
        return self.prompt.conversation((*self.answers, None))

    def seed(self, base: int) -> int:
        """Of (base, file, line, sample), and of the turn after the first."""
        return derive_seed(base, *(self.key if self.turn else self.key[:3]))

    def then(self, answer: str) -> "Question | None":
        """The question after this answer; None after the last one, or one that says nothing."""
        if self.left == 1 or not answer.strip():
            return None
        return Question(self.prompt, self.sample, self.turns, (*self.answers, answer))


def open_questions(
    prompts: Iterable[Prompt],
    done: ResponseFile | Mapping[ResponseKey, Response],
    *,
    samples: int,
    turns: int | None,
    text_of: Callable[[Response], str],
) -> Iterator[Question]:
    """The first missing answer of every (prompt, sample).

    turns: at most so many a conversation; None is all.
    """
    for prompt in prompts:
        asked = len(prompt.turns) if turns is None else min(turns, len(prompt.turns))
        for sample in range(samples):
            question: Question | None = Question(prompt, sample, asked)
            while question is not None and question.key in done:
                question = question.then(text_of(done[question.key]))
            if question is not None:
                yield question
