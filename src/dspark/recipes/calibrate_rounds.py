"""Rounds for `dspark calibrate`: whole blocks verified, kept by text, split in halves."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark.calibration.arrays import FloatArray
from dspark.calibration.samples import Rounds
from dspark.core.records import RoundRecord
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job
from dspark.recipes.round_file import RoundFile, RoundRow, TextKey
from dspark.scheduling.policies import FixedLength


def collect(
    llm: LLM,
    jobs: Sequence[Job],
    block_size: int,
    file: RoundFile | None,
    progress: Progress,
) -> dict[TextKey, tuple[RoundRow, ...]]:
    """Every text's rounds with the whole block verified; texts that `file` has are not written
    again, and finished ones go there at once."""
    kept = {} if file is None else file.texts
    keys = [(job.domain, job.line, job.sample) for job in jobs]
    texts = {key: kept[key] for key in keys if key in kept}
    missing = [(key, job) for key, job in zip(keys, jobs, strict=True) if key not in texts]
    if texts:
        progress.say(f"{len(texts)} of {len(jobs)} texts were there already")
    if not missing:
        return texts
    config = EngineConfig.for_requests(
        (len(job.prompt) + job.params.max_new_tokens for _, job in missing),
        max_requests=llm.max_requests,
        row_exact=False,  # many texts are measured: which batch rounded which row is no bias
    )
    engine = Engine(llm.loaded.target, llm.drafter, FixedLength(block_size), config)
    for _, job in missing:
        engine.add(job.prompt, job.params)
    open_texts: dict[int, list[RoundRecord]] = {index: [] for index in range(len(missing))}
    with progress.task("texts", total=len(missing)) as advance:
        while not engine.idle:
            events = engine.step()
            for step in engine.records:
                for record in step.rounds:
                    open_texts[record.request].append(record)
            engine.records.clear()  # a long run would keep millions
            for event in events:
                if event.finished is not None:
                    key, rounds = missing[event.request][0], open_texts.pop(event.request)
                    texts[key] = tuple(
                        (r.accepted, r.judged, r.confidence, r.entropy)
                        for r in rounds
                        if r.confidence
                    )
                    if file is not None:
                        file.append(key, texts[key])
                    advance(1, key[0])
    return texts


def split_halves(
    texts: Mapping[TextKey, tuple[RoundRow, ...]], block_size: int
) -> tuple[Rounds, Rounds]:
    """Rounds to fit on and rounds to report on: every other prompt, with all its samples."""
    everything = rounds_of(texts, block_size)
    odd = everything.prompts_N % 2 == 1
    return everything.select(~odd), everything.select(odd)


def rounds_of(texts: Mapping[TextKey, tuple[RoundRow, ...]], block_size: int) -> Rounds:
    """All rounds of these texts; prompts are numbered by file and line."""
    prompts = sorted({(file, line) for file, line, _ in texts})
    number = {prompt: index for index, prompt in enumerate(prompts)}
    rows = [(number[key[:2]], row) for key in sorted(texts) for row in texts[key]]

    def columns(place: int) -> FloatArray:
        values = np.array([row[place] for _, row in rows], dtype=np.float32)
        return values.reshape(-1, block_size).astype(np.float64)

    return Rounds(
        columns(2),
        columns(3),
        np.array([r[0] for _, r in rows], dtype=np.int64),
        np.array([r[1] for _, r in rows], dtype=np.int64),
        np.array([prompt for prompt, _ in rows], dtype=np.int64),
    )


def data_sha256(settings: dict[str, Any], texts: Mapping[TextKey, tuple[RoundRow, ...]]) -> str:
    """Of the rounds, and of how they came about."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for key in sorted(texts):
        rows = [
            [a, j, *(np.asarray(x, dtype=np.float32).tolist() for x in evidence)]
            for a, j, *evidence in texts[key]
        ]
        digest.update(json.dumps([*key, rows]).encode())
    return digest.hexdigest()
