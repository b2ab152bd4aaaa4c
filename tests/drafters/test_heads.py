"""The sequential heads, written out from their tensors, in training and in drafting."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafters.dspark import DSparkModel
from dspark.drafters.serving import DSparkDrafter
from dspark.nn.binding import head_logits
from tests.drafters.tiny import Served, features, sampled, tiny_binding, tiny_config, tiny_model
from tests.drafters.tiny import uniform_noise as noise

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-5}


def plain_biases(model: DSparkModel, hidden_KD: Tensor, previous: list[int]) -> Tensor:
    """Biases [K, V] of one block (equations 5 and 6, and DeepSpec's gate), tensor by tensor."""
    w = {k.removeprefix("markov_head."): v for k, v in model.state_dict().items()}
    kind, r = model.config.markov_head_type, model.config.markov_rank
    state = torch.zeros(r)
    biases = []
    for h, token in zip(hidden_KD, previous, strict=True):
        e = w["markov_w1.weight"][token]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            z = torch.cat([h, e])
            latent = torch.sigmoid(w["gate_proj.weight"] @ z + w["gate_proj.bias"]) * e
        else:
            z = torch.cat([state, e, h])
            joint = w["joint_proj.weight"] @ z + w["joint_proj.bias"]
            keep = torch.sigmoid(joint[:r])
            latent = torch.tanh(joint[2 * r :])
            state = keep * state + (1 - keep) * torch.tanh(joint[r : 2 * r])
        biases.append(w["markov_w2.weight"] @ latent)
    return torch.stack(biases)


def model_of(kind: str) -> DSparkModel:
    model = tiny_model(tiny_config(markov_head_type=kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
    return model


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_training_latents_give_the_plain_biases(kind: str) -> None:
    model = model_of(kind)
    hidden_AKD = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0))
    previous_AK = torch.randint(61, (3, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        biases = model.markov_head.bias(model.markov_head.latents(hidden_AKD, previous_AK))
        for a in range(3):
            want = plain_biases(model, hidden_AKD[a], previous_AK[a].tolist())
            torch.testing.assert_close(biases[a], want, **CLOSE)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("candidates", [0, 5])
def test_drafting_carries_the_state_from_slot_to_slot(kind: str, candidates: int) -> None:
    model = model_of(kind)
    binding = tiny_binding(model.config)
    served = Served.of(DSparkDrafter(model, binding, candidates=candidates))
    anchors, positions = torch.tensor([7, 9]), torch.tensor([9, 5])
    tables = [served.admit(features(model.config, n, seed=n)) for n in (9, 5)]
    hidden_RKD = served.drafter.block_hidden(anchors, positions, tables, served.store)
    block = served.drafter.draft(
        anchors, positions, tables, served.store,
        texts=[[0] * 9 + [7], [0] * 5 + [9]], sampling=sampled(0.8, 1.0), noise=noise,
    )  # fmt: skip
    for r, temperature in enumerate((0.8, 1.0)):
        previous = [int(anchors[r]), *block.tokens_RK[r, :-1].tolist()]
        logits = head_logits(binding, hidden_RKD[r]) + plain_biases(model, hidden_RKD[r], previous)
        probs_KV = (logits.double() / temperature).softmax(-1)
        kept_KC = probs_KV.gather(1, block.candidates_RKC[r])
        want = kept_KC / kept_KC.sum(-1, keepdim=True)
        torch.testing.assert_close(block.probs_RKC[r], want, **CLOSE)


def test_the_rnn_s_state_matters_and_starts_anew_with_every_block() -> None:
    model = model_of("rnn")
    head = model.markov_head
    hidden_AKD = torch.randn(1, 4, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = (
            head.latents(hidden_AKD, torch.tensor([tokens]))
            for tokens in ([1, 2, 3, 4], [5, 2, 3, 4])
        )
        again = head.latents(hidden_AKD, torch.tensor([[1, 2, 3, 4]]))
    assert torch.equal(a, again)
    assert not torch.isclose(a, b).all(-1).any(), "the first token is felt in every slot"
    vanilla = model_of("gated").markov_head
    with torch.no_grad():
        a, b = (
            vanilla.latents(hidden_AKD, torch.tensor([tokens]))
            for tokens in ([1, 2, 3, 4], [5, 2, 3, 4])
        )
    assert torch.equal(a[:, 1:], b[:, 1:]), "a Markov head sees the last token only"
