"""`dspark data synthesize`: prompts from nothing but the target."""

from dataclasses import dataclass
from pathlib import Path

from dspark.core.errors import ConfigError, DataError
from dspark.core.random import derive_seed
from dspark.core.sampling import SamplingParams
from dspark.data.synthesis import SynthesisFile, UserPrefix, clean_turn, user_prefix
from dspark.engine.engine import Engine
from dspark.recipes.progress import Progress
from dspark.recipes.regenerate import answering_engine
from dspark.targets.load import LoadedTarget

_TRIES_FOR_NOTHING = 8
"""Rounds without a usable turn after which there will be none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthesizeConfig:
    count: int = 1000
    temperature: float = 1.0
    top_p: float = 0.95
    """A little less than all: a first token from the tail leads nowhere."""
    max_new_tokens: int = 128
    """Longer turns are dropped: their ends are not known."""
    max_requests: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "max_new_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        # ConfigError for one outside its range.
        SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


def synthesize(
    loaded: LoadedTarget, path: Path, config: SynthesizeConfig, progress: Progress
) -> SynthesisFile:
    """Writes user turns to `path` until it holds `config.count`, no two alike; may be stopped and
    run again.

    Try number i is seeded by (config.seed, i) and kept or dropped in the order of tries, so the
    file depends on target, seed and settings alone (but for the rounding of the target's forward).

    Raises DataError where the target writes nothing usable.
    """
    prefix = user_prefix(loaded.tokenizer)
    file = SynthesisFile(path, target=loaded.name, seed=config.seed)
    if len(file) >= config.count:
        return file
    engine = answering_engine(loaded, config.max_requests, page_size=256, stop_strings=True)
    fruitless = dropped = 0
    with progress.task("prompts", total=config.count - len(file)) as advance:
        while len(file) < config.count:
            tries = range(file.tries, file.tries + config.max_requests)
            added = file.append(_write_turns(engine, loaded, prefix, tries, config), config.count)
            file.tries = tries.stop
            dropped += len(tries) - added
            fruitless = 0 if added else fruitless + 1
            if fruitless == _TRIES_FOR_NOTHING:
                raise DataError(
                    f"the target wrote {len(file)} usable user turns, and none in its last "
                    f"{fruitless * len(tries)} tries; give prompts (--prompts), or ask for fewer"
                )
            advance(added, f"{dropped} dropped: unfinished, empty or seen before")
    return file


def _write_turns(
    engine: Engine,
    loaded: LoadedTarget,
    prefix: UserPrefix,
    tries: range,
    config: SynthesizeConfig,
) -> list[tuple[int, str]]:
    """(try, turn) of those tries that gave a turn, ascending."""
    numbers: dict[int, int] = {}
    for number in tries:
        params = SamplingParams(
            temperature=config.temperature,
            top_p=config.top_p,
            max_new_tokens=config.max_new_tokens,
            seed=derive_seed(config.seed, "synthesize", number),
            verification="rejection",
            stop=prefix.stops,
            stop_token_ids=prefix.stop_token_ids,
        )
        numbers[engine.add(prefix.token_ids, params)] = number
    texts = dict.fromkeys(numbers, "")
    turns: dict[int, str] = {}
    for event in engine.run():
        if event.error is not None:
            raise event.error
        texts[event.request] += event.text
        if event.finished is not None:
            turn = clean_turn(texts[event.request], ended=event.finished == "stop")
            if turn is not None:
                turns[numbers[event.request]] = turn
    engine.records.clear()
    return sorted(turns.items())
