"""`dspark data inspect`: what is in files of prompts, conversations or responses."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.core.errors import ConfigError, DataError, PromptError
from dspark.data.masks import mask_conversation
from dspark.data.packing import TrainingSequence
from dspark.data.prompts import Prompt, count_kinds, scan_prompts
from dspark.data.records import find_files, read_records
from dspark.data.responses import FORMAT, ResponseFile
from dspark.data.synthesis import likeness
from dspark.data.template import encode_messages, template_hash
from dspark.recipes.progress import Progress
from dspark.targets.source import read_tokenizer

_SHOWN = 1200
"""Characters of a shown text."""


@dataclass(frozen=True, slots=True)
class Sample:
    title: str
    runs: list[tuple[str, bool]]
    """Pieces of text, and whether they are trained on."""


@dataclass(frozen=True, slots=True)
class DataReport:
    samples: list[Sample]
    lines: list[str]
    """For people."""
    counts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Text:
    """One text of the data: a conversation, or an answer with its prompt."""

    domain: str
    line: int
    title: str
    question: str
    sequence: TrainingSequence
    """Nothing is supervised in a prompt without an answer."""
    prompt_tokens: int
    ended: bool = True


def inspect_data(
    paths: Sequence[Path],
    target: str | None,
    *,
    samples: int,
    thinking: bool | None,
    seed: int,
    progress: Progress,
) -> DataReport:
    """Reads everything and changes nothing. Masks are those that training uses.

    Raises DataError for what cannot be read at all; bad lines are counted.
    """
    if samples < 0:
        raise ConfigError(f"samples is {samples}; it must be at least 0")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0")
    tokenizer, name, vocab_size = read_tokenizer(target, say=progress.say)
    texts: list[_Text] = []
    bad: list[DataError] = []
    for file in find_files(paths):
        header = _response_header(file)
        if header is not None:
            texts += _responses(file, header, tokenizer, name, vocab_size, progress)
            continue
        prompts, wrong = scan_prompts(file)
        bad += wrong
        with progress.task(file.name, total=len(prompts)) as advance:
            for prompt in prompts:
                try:
                    texts += _conversation(prompt, tokenizer, thinking)
                except (DataError, PromptError) as error:
                    bad.append(DataError(f"{file}, line {prompt.line}: {error}"))
                advance(1, "prompts")
    rng = np.random.default_rng(seed)
    shown = sorted(rng.permutation(len(texts))[:samples].tolist())
    counts = _counts(texts, bad)
    return DataReport(
        [_sample(tokenizer, texts[index]) for index in shown], _lines(counts, bad), counts
    )


def _response_header(file: Path) -> dict[str, Any] | None:
    """Its first line, if that is a response file's."""
    if file.is_dir() or file.suffix == ".parquet":
        return None
    _, first = next(read_records(file), (0, None))
    return first if isinstance(first, dict) and first.get("format") == FORMAT else None


def _responses(
    file: Path,
    header: dict[str, Any],
    tokenizer: Any,
    name: str,
    vocab_size: int,
    progress: Progress,
) -> list[_Text]:
    responses = ResponseFile(
        file, target=name, template_hash=template_hash(tokenizer), vocab_size=vocab_size,
        thinking=header.get("thinking"), read_only=True,
    )  # fmt: skip
    questions: dict[bytes, str] = {}  # decoding takes longest, and samples share their prompt
    texts = []
    with progress.task(file.name, total=len(responses)) as advance:
        for response in responses.responses:
            ids = response.prompt_ids.tobytes()
            if ids not in questions:
                questions[ids] = tokenizer.decode(response.prompt_ids)
            text = _Text(
                response.file,
                response.line,
                f"{response.file}, line {response.line}, temperature {response.temperature:g}"
                + (f", turn {response.turn + 1}" if response.turn else ""),
                questions[ids],
                TrainingSequence(response.token_ids, response.supervised),
                len(response.prompt_ids),
                response.finish_reason == "stop",
            )
            texts.append(text)
            advance(1, "responses")
    return texts


def _conversation(prompt: Prompt, tokenizer: Any, thinking: bool | None) -> list[_Text]:
    title = f"{prompt.file}, line {prompt.line}" + ", validation" * prompt.is_validation
    if not any(prompt.answers):
        ids = encode_messages(tokenizer, prompt.conversation([None]), thinking=thinking)
        sequence = TrainingSequence(
            np.asarray(ids, dtype=np.int32), np.zeros(len(ids), dtype=np.bool_)
        )
        return [_Text(prompt.file, prompt.line, title, prompt.turns[0], sequence, len(ids))]
    masked = mask_conversation(tokenizer, prompt.conversation(prompt.answers), thinking=thinking)
    return [
        _Text(
            prompt.file,
            prompt.line,
            title,
            prompt.turns[0],
            TrainingSequence(text.token_ids, text.supervised),
            int(np.argmax(text.supervised)),
        )
        for text in masked
    ]


def _counts(texts: Sequence[_Text], bad: Sequence[DataError]) -> dict[str, Any]:
    by_domain: dict[str, list[_Text]] = defaultdict(list)
    for text in texts:
        by_domain[text.domain].append(text)
    questions = {(text.domain, text.line): likeness(text.question) for text in texts}
    alike = Counter(questions.values())
    return {
        "texts": len(texts),
        "bad_lines": len(bad),
        "repeated_prompts": sum(count - 1 for count in alike.values()),
        "domains": {name: _domain(own) for name, own in by_domain.items()},
    }


def _domain(texts: Sequence[_Text]) -> dict[str, Any]:
    trained = [int(text.sequence.supervised.sum()) for text in texts]
    return {
        "texts": len(texts),
        "prompt_tokens": _spread([text.prompt_tokens for text in texts]),
        "trained_tokens": _spread(trained),
        "trained_tokens_in_all": sum(trained),
        "cut_at_the_limit": sum(not text.ended for text in texts),
    }


def _spread(values: Sequence[int]) -> dict[str, int]:
    return {
        "median": int(np.median(values)),
        "p90": int(np.quantile(values, 0.9)),
        "most": max(values),
    }


def _lines(counts: dict[str, Any], bad: Sequence[DataError]) -> list[str]:
    lines = []
    for name, domain in counts["domains"].items():
        prompt, trained = domain["prompt_tokens"], domain["trained_tokens"]
        cut = domain["cut_at_the_limit"]
        lines.append(
            f"{name}: {domain['texts']} texts; prompts of {prompt['median']} tokens (median; "
            f"{prompt['most']} at most); trained on {trained['median']} tokens a text (median; "
            f"{trained['most']} at most), {domain['trained_tokens_in_all']:,} in all"
            + (f"; {cut} cut at the limit" if cut else "")
        )
    if repeated := counts["repeated_prompts"]:
        lines.append(f"{repeated} prompts are like one before (but for case and punctuation)")
    if bad:
        lines.append(f"{count_kinds([*bad])}; the first: {bad[0]}")
    return lines or ["no texts"]


def _sample(tokenizer: Any, text: _Text) -> Sample:
    """The text in runs of equal mask; a long one's middle is left out."""
    supervised = text.sequence.supervised
    edges = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(supervised)]
    runs = []
    for start, end in itertools.pairwise(edges):
        shown = tokenizer.decode(text.sequence.token_ids[start:end])
        if len(shown) > _SHOWN:
            shown = f"{shown[: _SHOWN // 2]} [...] {shown[-_SHOWN // 2 :]}"
        runs.append((shown, bool(supervised[start])))
    return Sample(text.title, runs)
