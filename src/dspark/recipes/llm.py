"""The Python API: a target and a drafter joined, generating."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from dspark.calibration.serving import Calibration, Uncalibrated
from dspark.checkpoints.native import read_bundle
from dspark.core.errors import ConfigError, PromptError
from dspark.core.sampling import SamplingParams
from dspark.data.template import encode_messages, encode_prompt, template_hash
from dspark.drafters.lookup import PromptLookup
from dspark.nn.graphs import CudaCapture
from dspark.nn.seams import Drafter
from dspark.recipes.bundles import (
    LOOKUP,
    SHIPPED,
    bundle_folder,
    check_policies,
    make_drafter,
    shipped_bundle,
    tell_graphs,
    wants_graphs,
)
from dspark.recipes.calibration import serving_calibration
from dspark.recipes.generation import Generation, RequestOutput
from dspark.recipes.policies import Policies
from dspark.recipes.progress import Progress
from dspark.recipes.values import policy_value, set_threads, weights_value
from dspark.targets.load import LoadedTarget, check_device, check_many_requests, load_target

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LLM:
    """A target with a drafter, ready to generate.

    target: a folder, a hub id or a GGUF file; None is the embedded SmolLM2-135M-Instruct.
    draft: a bundle folder; "lookup" is prompt lookup, which needs no training; "auto" is the
        shipped bundle with the embedded target and no drafter with any other; None is no drafter.
    policy: see `dspark.scheduling.parse`; None is the bundle's own, else the whole block; off
        without a drafter. One that weighs cost needs a table that `dspark profile` has measured
        here; where there is none a fixed length stands in, and a line says so.
    draft_length: draft at most so many tokens a round, instead of the drafter's whole block: a
        cheaper draft where verifying many is dear. A `fixed:N` policy drafts N in any case.
    weights: kind of packed CPU weights (fp32, bf16, fp16, int8, q4); None picks what suits the
        weights and the processor.
    device: "cpu", or a CUDA device; there `weights` are bf16 (None) or fp32. Not yet run on a GPU.
    cuda_graphs: capture the draft and common steps of the target in CUDA graphs
        (`drafters.captured`, `targets.captured`); None is wherever there is CUDA, and what cannot
        be captured is said. Not yet run on a GPU.
    threads: CPU threads for torch; None leaves torch's own choice.
    max_requests: how many prompts decode at once; more wait.
    calibrated: use the bundle's `calibration.json`; False only to measure the head as it is.
    recalibrate: refit confidences to what is served (`calibration.online`), and verify
        one round in a hundred whole for it.
    pipeline: write texts in a thread of its own while the next step computes (`EngineConfig`).
    many_requests: for weights of few bits (q4, int8): greedy and seeded requests are served by the
        copy of the weights that suits many rows, all of them and always. Slower for one request,
        1.4 to 2.8 times as fast at 32. Their texts may differ by rounding from those without it.
        Refused with other weights, where it would do nothing.
    progress: where start-up lines go; silent by default.

    Raises subclasses of UserError (`dspark.core.errors`) for anything wrong with these.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        draft: str | Path | None = "auto",
        policy: str | None = None,
        draft_length: int | None = None,
        weights: str | None = None,
        device: str = "cpu",
        cuda_graphs: bool | None = None,
        threads: int | None = None,
        max_requests: int = 32,
        trust_remote_code: bool = False,
        calibrated: bool = True,
        recalibrate: bool = False,
        pipeline: bool = False,
        many_requests: bool = False,
        progress: Progress | None = None,
    ) -> None:
        set_threads(threads)
        kind = weights_value(weights)
        check_device(device, kind)
        if many_requests:
            check_many_requests(device, kind)
        policy = policy_value(policy)
        if max_requests < 1:
            raise ConfigError(f"max_requests is {max_requests}; it must be at least 1")
        progress = progress or Progress(quiet=True)
        # Before the target, which takes longer: a wrong path is told at once.
        folder = bundle_folder(draft, target)
        bundle = None if folder is None else read_bundle(folder)
        draft = LOOKUP if draft == LOOKUP else folder
        graphs = wants_graphs(cuda_graphs, device)
        check_policies([] if policy is None else [policy], target, draft, draft_length)
        self.calibration: Calibration = Uncalibrated()
        if bundle is not None and calibrated:
            self.calibration = serving_calibration(
                bundle, progress.say, draft_length=draft_length, recalibrate=recalibrate
            )
        elif recalibrate:
            raise ConfigError("recalibration needs a draft bundle, used with its calibration")
        self.bundle_folder: Path | None = None if bundle is None else bundle.path
        capture = CudaCapture(torch.device(device)) if graphs else None
        self.loaded: LoadedTarget = load_target(
            target,
            weights=kind,
            device=device,
            capture=capture,
            template_hash=template_hash,
            trust_remote_code=trust_remote_code,
            many_requests=many_requests,
            say=progress.say,
        )
        self.tokenizer: Any = self.loaded.tokenizer
        self.max_requests = max_requests
        self.pipeline = pipeline
        self.many_requests = many_requests
        self.draft_name: str | None = None
        self.drafter: Drafter | None = None
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
            self.drafter = make_drafter(bundle, self.loaded, capture=capture)
        if graphs:
            tell_graphs(self.loaded.target, self.drafter, progress.say, asked=bool(cuda_graphs))
        if draft_length is not None and self.drafter is not None:
            self.drafter = self.drafter.shortened(draft_length)
        self.policies = Policies(
            self.loaded,
            self.drafter,
            bundle,
            draft_length=draft_length,
            graphs=graphs,
            many_requests=many_requests,
            calibrated=calibrated,
            probes=recalibrate,
            say=logger.warning if progress.quiet else progress.say,
        )
        self.policy = self.policies.resolve(policy)

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
        Raises RequestFailedError when a request fails on the way; it has the others' outputs.
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
    ) -> Generation:
        """Like `chat`, yielding StreamPieces as they come."""
        return self.start(self.encode_chat(turns, system), sampling, policy=policy)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: str | None = None,
        row_exact: bool = True,
    ) -> Generation:
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
        chosen = self.policy if policy is None else self.policies.resolve(policy)
        return Generation(
            self.loaded.target,
            self.drafter,
            chosen,
            self.tokenizer,
            prompts,
            params,
            calibration=self.calibration,
            max_requests=self.max_requests,
            row_exact=row_exact,
            pipeline=self.pipeline,
        )

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

    def token_text(self, token: int) -> str:
        """A single token as text, special ones by name."""
        text: str = self.tokenizer.decode([token])
        return text

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
