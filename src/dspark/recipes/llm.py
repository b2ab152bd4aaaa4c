"""The Python API: a target and a drafter joined, generating."""

import logging
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dspark.calibration.serving import Calibration, Uncalibrated
from dspark.checkpoints.native import read_bundle
from dspark.core.errors import ConfigError, PromptError
from dspark.core.records import FinishReason, StepRecord, TokenFate
from dspark.core.sampling import SamplingParams
from dspark.data.template import encode_messages, encode_prompt, template_hash
from dspark.drafters.lookup import PromptLookup
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.request import TokenEvent
from dspark.nn.linear import WeightKind
from dspark.nn.seams import Drafter
from dspark.recipes.bundles import LOOKUP, SHIPPED, make_drafter, shipped_bundle
from dspark.recipes.calibration import serving_calibration
from dspark.recipes.cost_tables import drafter_id, find_table, fingerprint_of, why_none
from dspark.recipes.progress import Progress
from dspark.recipes.values import set_threads
from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.parse import needs_cost, parse_policy
from dspark.scheduling.policies import Policy
from dspark.scheduling.probing import Probing
from dspark.scheduling.table import Fingerprint
from dspark.targets.load import LoadedTarget, load_target

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one prompt came to."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """Generated tokens; when `finish_reason` is "stop", the last one is what stopped it."""
    text: str
    fates: tuple[TokenFate, ...]
    """How each token came about."""
    finish_reason: FinishReason | None
    """None: interrupted."""
    rounds: int
    """Rounds after prefill: forwards of the target that this request took part in."""
    accepted_length: float | None
    """(accepted + 1) a round, no bonus counted after an end inside a run; None without a round."""
    seed: int | None
    """The seed that repeats these tokens (under `rejection`: only under the same schedule)."""


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step added to one prompt's output."""

    index: int
    """Which prompt."""
    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    """What each token adds to the text: nothing while a character is not whole, then all of it."""
    fates: tuple[TokenFate, ...]
    """How each token came about."""
    finish_reason: FinishReason | None

    @property
    def text(self) -> str:
        return "".join(self.texts)


class LLM:
    """A target with a drafter, ready to generate.

    target: a folder, a hub id or a GGUF file; None is the embedded SmolLM2-135M-Instruct.
    draft: a bundle folder; "lookup" is prompt lookup, which needs no training; "auto" is the
        shipped bundle with the embedded target and no drafter with any other; None is no drafter.
    policy: see `dspark.scheduling.parse`; None is the bundle's own, else the whole block; off
        without a drafter. One that weighs cost needs a table that `dspark profile` has measured
        here; where there is none a fixed length stands in, and a line says so.
    weights: kind of packed CPU weights (fp32, bf16, fp16, int8); None picks for the processor.
    threads: CPU threads for torch; None leaves torch's own choice.
    max_requests: how many prompts decode at once; more wait.
    calibrated: use the bundle's `calibration.json`; False only to measure the head as it is.
    recalibrate: refit confidence temperatures to what is served (`calibration.online`), and verify
        one round in a hundred whole for it.
    progress: where start-up lines go; silent by default.

    Raises subclasses of UserError (`dspark.core.errors`) for anything wrong with these.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        draft: str | Path | None = "auto",
        policy: str | None = None,
        weights: WeightKind | None = None,
        threads: int | None = None,
        max_requests: int = 32,
        trust_remote_code: bool = False,
        calibrated: bool = True,
        recalibrate: bool = False,
        progress: Progress | None = None,
    ) -> None:
        set_threads(threads)
        if max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests}; it must be at least 1")
        progress = progress or Progress(quiet=True)
        if draft == "auto":
            draft = shipped_bundle() if target is None else None
        # Before the target, which takes longer: a wrong path is told at once.
        bundle = None if draft is None or draft == LOOKUP else read_bundle(Path(draft))
        self.calibration: Calibration = Uncalibrated()
        if bundle is not None and calibrated:
            self.calibration = serving_calibration(bundle, progress.say, recalibrate=recalibrate)
        elif recalibrate:
            raise ConfigError("recalibration needs a draft bundle, used with its calibration")
        self._probes = recalibrate
        self.bundle_folder: Path | None = None if bundle is None else bundle.path
        self.loaded: LoadedTarget = load_target(
            target,
            weights=weights,
            template_hash=template_hash,
            trust_remote_code=trust_remote_code,
            say=progress.say,
        )
        self.tokenizer: Any = self.loaded.tokenizer
        self.max_requests = max_requests
        self.draft_name: str | None = None
        self.drafter: Drafter | None = None
        self._bundle_policy: str | None = None
        self._bundle_path = None if bundle is None else bundle.path
        self._has_confidence = False
        self._cost: CostModel | None = None
        self._say = logger.warning if progress.quiet else progress.say
        if draft == LOOKUP:
            self.draft_name = LOOKUP
            self.drafter = PromptLookup()
        elif bundle is None:
            progress.say(
                "no drafter: plain decoding (give a bundle with --draft, or --draft lookup, which "
                "needs no training)"
            )
        else:
            self.draft_name = SHIPPED if draft == shipped_bundle() else str(draft)
            self.drafter = make_drafter(bundle, self.loaded)
            self._bundle_policy = None if bundle.info is None else bundle.info.policy
            self._has_confidence = bundle.config.has_confidence
        self.policy = self.resolve_policy(policy)

    def resolve_policy(self, text: str | None) -> Policy:
        """The policy that `text` names for this drafter; None is the default."""
        block_size = None if self.drafter is None else self.drafter.block_size
        text = self.default_policy if text is None else text
        if self.lacks_costs(text):
            assert block_size is not None
            fixed = f"fixed:{(block_size + 1) // 2}"
            self._say(
                f"policy {text} needs a cost table of this machine, target and drafter, and "
                f"{why_none(self.fingerprint)}; using {fixed} instead. Run dspark profile for one"
            )
            text = fixed
        policy = parse_policy(
            text,
            block_size=block_size,
            has_confidence=self._has_confidence,
            cost=self.cost_model,
        )
        return Probing(policy) if self._probes and policy.drafts else policy

    @property
    def default_policy(self) -> str:
        """What the bundle names, else its whole block; off without a drafter."""
        if self.drafter is None:
            return "off"
        return self._bundle_policy or f"fixed:{self.drafter.block_size}"

    @property
    def fingerprint(self) -> Fingerprint:
        """What a cost table must have been measured with to hold here."""
        path = self._bundle_path
        return fingerprint_of(self.loaded, LOOKUP if path is None else drafter_id(path))

    def cost_model(self) -> CostModel | None:
        """What steps cost on this machine; None where it has not been measured.

        Raises DataError for a table that is broken or another machine's.
        """
        if self._cost is None and (table := find_table(self.fingerprint)) is not None:
            self._cost = table.fit().model
        return self._cost

    def forget_costs(self) -> None:
        """The table is read again before the next use."""
        self._cost = None

    def lacks_costs(self, policy: str) -> bool:
        """Whether only a cost table is missing to run this policy."""
        able = self.drafter is not None and self._has_confidence
        return able and needs_cost(policy) and self.cost_model() is None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: str | None = None,
    ) -> list[RequestOutput]:
        """Completes raw text or token ids (no chat template); outputs in the prompts' order.

        sampling: one for all prompts, or one each; None is `SamplingParams()`, temperature 1.
        policy: overrides the policy of this LLM.
        """
        return self.start(self._encode_raw(prompts), sampling, policy=policy).run()

    def chat(
        self,
        turns: str | Sequence[str],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        system: str | None = None,
        policy: str | None = None,
    ) -> list[RequestOutput]:
        """Answers user turns (a conversation each), through the target's chat template."""
        return self.start(self.encode_chat(turns, system), sampling, policy=policy).run()

    def stream(
        self,
        turns: str | Sequence[str],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        system: str | None = None,
        policy: str | None = None,
    ) -> "Generation":
        """Like `chat`, yielding StreamPieces as they come."""
        return self.start(self.encode_chat(turns, system), sampling, policy=policy)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: str | None = None,
        row_exact: bool = True,
    ) -> "Generation":
        """A generation over token ids, to be iterated.

        row_exact: as in `EngineConfig`; False only to time plain decoding.
        Raises PromptError for a prompt that does not fit the target's context.
        """
        if sampling is None:
            sampling = SamplingParams()
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else [*sampling]
        if len(params) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts came with {len(params)} sampling parameters")
        for prompt, own in zip(prompts, params, strict=True):
            limit = self.loaded.target.max_context
            if len(prompt) + own.max_new_tokens > limit:
                raise PromptError(
                    f"the prompt has {len(prompt)} tokens and max_new_tokens is "
                    f"{own.max_new_tokens}; together they must fit the target's context of "
                    f"{limit} tokens"
                )
        chosen = self.policy if policy is None else self.resolve_policy(policy)
        return Generation(self, prompts, params, chosen, row_exact)

    def encode_chat(self, turns: str | Sequence[str], system: str | None = None) -> list[list[int]]:
        """Token ids of user turns in the target's chat template, up to where the answer starts."""
        turns = [turns] if isinstance(turns, str) else turns
        return [encode_prompt(self.tokenizer, turn, system).tolist() for turn in turns]

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation of {"role", "content"}, up to where the answer starts."""
        return encode_messages(self.tokenizer, messages, tools)

    def _encode_raw(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many = cast(Sequence[Prompt], [prompts] if single else prompts)
        encoded = []
        for prompt in many:
            if not len(prompt):  # before a tokenizer puts its own first token there
                raise PromptError("the prompt is empty; give it some text")
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            encoded.append([int(token) for token in ids])
        return encoded


class Generation:
    """One run over a list of prompts: iterate it for pieces, then ask for `outputs()`.

    Leaving the iteration early (an exception, Ctrl-C) keeps what was generated so far.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        policy: Policy,
        row_exact: bool,
    ) -> None:
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._tokenizer = llm.tokenizer
        # Drawn here, so that the result can say it; a request's rule still goes by its own seed.
        self._seeds = [p.seed if p.seed is not None else secrets.randbits(63) for p in params]
        config = EngineConfig.for_requests(
            (len(prompt) + p.max_new_tokens for prompt, p in zip(prompts, params, strict=True)),
            max_requests=llm.max_requests,
            block_size=llm.drafter.block_size if llm.drafter is not None else 0,
            row_exact=row_exact,
        )
        self.engine = Engine(
            llm.loaded.target,
            llm.drafter,
            policy,
            config,
            tokenizer=self._tokenizer,
            calibration=llm.calibration,
        )
        for prompt, own, seed in zip(self._prompts, params, self._seeds, strict=True):
            self.engine.add(prompt, own, seed=seed)
        count = len(prompts)
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self._fates: list[list[TokenFate]] = [[] for _ in range(count)]
        self._finished: list[FinishReason | None] = [None] * count
        self._text: list[str] = [""] * count
        self._pieces: deque[StreamPiece] = deque()

    def __iter__(self) -> Iterator[StreamPiece]:
        while self._pieces or not self.engine.idle:
            if not self._pieces:
                # A step's tokens are kept before any is handed out: whoever leaves in the middle
                # of a step loses none, and may go on later.
                self._pieces.extend([self._keep(event) for event in self.engine.step()])
            while self._pieces:
                yield self._pieces.popleft()

    def _keep(self, event: TokenEvent) -> StreamPiece:
        index = event.request  # ids of a fresh engine count from 0, in order
        self._tokens[index] += event.tokens
        self._fates[index] += event.fates
        self._finished[index] = event.finished
        piece = StreamPiece(index, event.tokens, event.texts, event.fates, event.finished)
        self._text[index] += piece.text
        return piece

    @property
    def records(self) -> list[StepRecord]:
        return self.engine.records

    def run(self) -> list[RequestOutput]:
        """Iterates to the end."""
        for _ in self:
            pass
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """What each prompt has come to so far, in their order."""
        rounds = [record for step in self.records for record in step.rounds]
        outputs = []
        for index, prompt in enumerate(self._prompts):
            own = [record for record in rounds if record.request == index]
            outputs.append(
                RequestOutput(
                    prompt_token_ids=prompt,
                    token_ids=tuple(self._tokens[index]),
                    text=self._text[index],
                    fates=tuple(self._fates[index]),
                    finish_reason=self._finished[index],
                    rounds=len(own),
                    accepted_length=sum(r.emitted for r in own) / len(own) if own else None,
                    seed=self._seeds[index],
                )
            )
        return outputs
