"""`dspark doctor`: what this machine can do, and whether the same seed gives the same tokens."""

import os
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dspark.core.errors import ConfigError
from dspark.core.sampling import SamplingParams
from dspark.engine.budget import free_bytes
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.linear import KINDS, check_kind
from dspark.recipes.exactness import Exactness, Job, check_exactness
from dspark.recipes.llm import LLM
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import gather_prompts, make_jobs

_PACKAGES = ("dspark", "torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    versions: dict[str, str]
    system: str
    processor: str
    """Architecture and the instruction set that torch uses."""
    cores: int
    threads: int
    """What torch computes with."""
    free_memory_gib: float
    weights: dict[str, str | None]
    """Kind of packed weights -> None where it runs, else why not."""
    cuda: tuple[str, ...]
    """Names of the GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    machine: Machine
    target: str
    drafter: str | None
    target_weights: str | None
    kv_memory: str
    exactness: Exactness

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.machine),
            "target": self.target,
            "drafter": self.drafter,
            "target_weights": self.target_weights,
            "kv_memory": self.kv_memory,
            "exactness": self.exactness.to_json(),
        }


def look_at_machine() -> Machine:
    return Machine(
        versions={name: _version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
        system=platform.platform(),
        processor=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        free_memory_gib=free_bytes(torch.device("cpu")) / 2**30,
        weights={kind: _why_not(kind) for kind in KINDS},
        cuda=tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())),
    )


def diagnose(
    llm: LLM, *, prompts: int = 4, max_new_tokens: int = 24, progress: Progress | None = None
) -> Diagnosis:
    """Looks at the machine and serves a few shipped prompts in every way that must not matter.

    prompts: of each domain; half of all texts are greedy, half sampled with a seed.
    """
    if prompts < 1 or max_new_tokens < 1:
        raise ConfigError("prompts and max_new_tokens must be at least 1")
    jobs = exactness_jobs(llm, prompts=prompts, max_new_tokens=max_new_tokens)
    engine = Engine(llm.loaded.target, llm.drafter, llm.policy, EngineConfig())
    return Diagnosis(
        machine=look_at_machine(),
        target=llm.loaded.name,
        drafter=llm.draft_name,
        target_weights=llm.loaded.weights,
        kv_memory=engine.memory.describe(),
        exactness=check_exactness(llm, jobs, batch=len(jobs), progress=progress),
    )


def exactness_jobs(
    llm: LLM, *, prompts: int | None, max_new_tokens: int, samples: int = 1
) -> list[Job]:
    """Shipped prompts, greedy and sampled in turn, `samples` times with other seeds."""
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=max_new_tokens, verification="coupled", ignore_eos=True
    )
    jobs = make_jobs(llm, gather_prompts(limit=prompts), sampling, samples=samples)
    jobs.sort(key=lambda job: job.sample)
    return [
        (job.prompt, _greedy(job.params) if index % 2 else job.params)
        for index, job in enumerate(jobs)
    ]


def _greedy(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=0.0)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _why_not(kind: Any) -> str | None:
    try:
        check_kind(kind)
    except ConfigError as error:
        return str(error)
    return None
