"""A tiny target, drafters for it, and ways to run them."""

from dataclasses import dataclass, field
from functools import cache

import torch

from dspark.core.sampling import SamplingParams
from dspark.drafters.build import build_model
from dspark.drafters.captured import CapturedDrafter
from dspark.drafters.chain import ChainModel
from dspark.drafters.chain_serving import ChainDrafter
from dspark.drafters.config import DSparkConfig, Eagle3Config, MtpConfig
from dspark.drafters.dspark import initialise
from dspark.drafters.serving import DSparkDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.nn.recorder import Recorder
from dspark.nn.seams import Binding
from dspark.scheduling.policies import FixedLength, Off
from dspark.targets.tiny import tiny_model
from tests.engine.drafters import NeverRight, RandomDrafter, TeacherDrafter
from tests.targets.ragged import packed_target, random_text

VOCAB, BLOCK = 97, 4
MODEL = {"num_hidden_layers": 2, "vocab_size": VOCAB, "max_position_embeddings": 512}


@cache
def target():
    return packed_target(tiny_model("llama", **MODEL))


@cache
def reference():
    """The same model, unpacked."""
    return tiny_model("llama", **MODEL)


def drafter(name, block=BLOCK):
    embedding = reference().get_input_embeddings().weight.detach()
    if name in UNTRAINED:
        return served(untrained(name, block))
    if name == "captured":
        return CapturedDrafter(
            untrained("untrained", block), binding(), candidates=16, capture=Recorder()
        )
    if name == "random":
        return RandomDrafter(block, embedding)
    if name == "never right":
        return NeverRight(block, embedding)
    errors = {"teacher": 0.3, "perfect": 0.0}[name]
    return TeacherDrafter(block, embedding, model=reference(), errors=errors)


UNTRAINED = {
    "untrained": {"markov_rank": 8},
    "gated": {"markov_rank": 8, "markov_head_type": "gated"},
    "rnn": {"markov_rank": 8, "markov_head_type": "rnn"},
    "dflash": {"markov_rank": 0, "enable_confidence_head": False},
    "eagle3": {},
    "mtp": {},
}
"""Every kind of drafter that can be trained; "untrained" is DSpark's vanilla one."""


def binding():
    model = reference()
    embedding = model.get_input_embeddings().weight.detach()
    return Binding(
        embedding_VD=embedding,
        embedding_scale=1.0,
        lm_head_VD=model.lm_head.weight.detach(),
        logit_scale=1.0,
        logit_softcap=None,
        num_target_layers=2,
        mask_token_id=0,
        target_name="tiny",
        embedding_hash="",
        chat_template_hash=None,
    )


def untrained(name, block=BLOCK, std=0.2):
    sizes = {
        "hidden_size": reference().config.hidden_size,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "num_target_layers": 2,
    }
    if name == "mtp":
        config = MtpConfig(**sizes, num_hidden_layers=1, target_layer_ids=(1,))
    elif name == "eagle3":
        config = Eagle3Config(
            **sizes, num_hidden_layers=1, target_layer_ids=(-1, 1), block_size=block
        )
    else:
        config = DSparkConfig(
            **sizes, num_hidden_layers=2, target_layer_ids=(-1, 1), block_size=block,
            mask_token_id=0, **UNTRAINED[name],
        )  # fmt: skip
    network = build_model(config)
    initialise(network, torch.Generator().manual_seed(0), std=std)
    return network


def served(network, candidates=16):
    serving = ChainDrafter if isinstance(network, ChainModel) else DSparkDrafter
    return serving(network, binding(), candidates=candidates)


@dataclass
class Run:
    """What an engine gave for its requests, in the order they were added."""

    engine: Engine
    tokens: list[list[int]]
    fates: list[list[str]]
    finished: list[str | None]
    rounds: list[list] = field(default_factory=list)


def engine_of(policy=None, **config):
    """`policy`: None is plain decoding, else (drafter or its name, draft tokens to verify)."""
    if policy is None:
        return Engine(target(), None, Off(), EngineConfig(**config))
    own = drafter(policy[0]) if isinstance(policy[0], str) else policy[0]
    engine = Engine(target(), own, FixedLength(policy[1]), EngineConfig(**config))
    own.engine = engine
    return engine


def run(prompts, params, policy=None, seeds=None, *, engine=None, **config):
    """Decodes all prompts in one engine; `params` is one for all, or one each."""
    engine = engine or engine_of(policy, **config)
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    seeds = seeds or [None] * len(prompts)
    ids = [
        engine.add(prompt, own, seed=seed)
        for prompt, own, seed in zip(prompts, params, seeds, strict=True)
    ]
    return collect(engine, ids)


def collect(engine, ids):
    tokens, fates, finished = ({i: [] for i in ids} for _ in range(3))
    for event in engine.run():
        assert len(event.tokens) == len(event.fates) > 0
        tokens[event.request] += event.tokens
        fates[event.request] += event.fates
        finished[event.request].append(event.finished)
    for reasons in finished.values():
        assert all(reason is None for reason in reasons[:-1])
    records = [record for step in engine.records for record in step.rounds]
    engine.memory.check_integrity([])
    return Run(
        engine,
        [tokens[i] for i in ids],
        [fates[i] for i in ids],
        [finished[i][-1] if finished[i] else None for i in ids],
        [[record for record in records if record.request == i] for i in ids],
    )


PROMPTS = [random_text(length, VOCAB, seed=length) for length in (1, 2, 7, 16, 33, 70)]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=14, ignore_eos=True)


@cache
def plain_greedy():
    """Each prompt's greedy tokens, decoded alone without speculation."""
    return [run([prompt], GREEDY).tokens[0] for prompt in PROMPTS]
