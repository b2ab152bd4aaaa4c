import torch

from dspark.core.random import RequestRandom
from dspark.core.sampling import SamplingParams
from dspark.nn.noise import RequestNoise, Round, StepNoise

VOCAB, BLOCK = 50, 3
IDS = torch.tensor([[4, 0, 49, 17]])


def noise(seed=1, choice=0, rule="rejection", temperature=1.0):
    params = SamplingParams(verification=rule, temperature=temperature)
    return RequestNoise(RequestRandom(seed, choice), params, VOCAB)


def draft(request, number, index, ids=IDS):
    step = StepNoise([Round(request, number, index)], BLOCK)
    return torch.stack([step(slot, ids)[0] for slot in range(BLOCK)])


def uniforms(request, number, count=BLOCK):
    drawn = StepNoise([Round(request, number, 0)], BLOCK).verification([count])
    return torch.cat([drawn.accept_RK[0], drawn.emit_R])


def test_coupled_noise_is_a_function_of_position_and_token_id():
    request = noise(rule="coupled")
    first = draft(request, number=1, index=5)
    again = draft(request, number=2, index=6)
    assert torch.equal(first[1:], again[:-1])
    reordered = draft(noise(rule="coupled"), number=3, index=5, ids=IDS.flip(-1))
    assert torch.equal(first, reordered.flip(-1))


def test_coupled_draft_and_verification_share_their_noise():
    request = noise(rule="coupled")
    step = StepNoise([Round(request, 1, 5)], BLOCK)
    drafted = [step(slot, IDS)[0] for slot in range(BLOCK)]
    races = step.verification([BLOCK]).races[0]
    assert len(races) == BLOCK + 1  # the bonus token races too
    for slot in range(BLOCK):
        assert torch.equal(races[slot][IDS[0]], drafted[slot])


def test_coupled_rows_are_computed_once_and_dropped_when_emitted(monkeypatch):
    computed = []
    original = RequestRandom.coupled_exponentials

    def counting(self, position, vocab_size):
        computed.append(position)
        return original(self, position, vocab_size)

    monkeypatch.setattr(RequestRandom, "coupled_exponentials", counting)
    request = noise(rule="coupled")
    for number, index in enumerate((1, 3, 4)):
        step = StepNoise([Round(request, number, index)], BLOCK)
        for slot in range(BLOCK):
            step(slot, IDS)
        step.verification([BLOCK])
    assert computed == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(request._rows) == [4, 5, 6, 7]


def test_rejection_noise_is_fresh_in_every_round_for_every_slot_and_purpose():
    request = noise()
    drawn = torch.cat(
        [draft(request, number, index=5).flatten() for number in (1, 2)]
        + [-torch.log1p(-uniforms(request, number)) for number in (1, 2)]
    )
    assert len(drawn.unique()) == len(drawn)


def test_rejection_noise_repeats_for_the_same_round():
    assert torch.equal(draft(noise(), 4, 9), draft(noise(), 4, 20))
    assert torch.equal(uniforms(noise(), 4), uniforms(noise(), 4))
    # Verifying fewer tokens draws the same numbers for those.
    assert torch.equal(uniforms(noise(), 4, count=1)[:1], uniforms(noise(), 4)[:1])


def test_choices_and_seeds_differ():
    for rule in ("rejection", "coupled"):
        drawn = [draft(noise(seed, choice, rule), 1, 1) for seed in (1, 2) for choice in (0, 1)]
        assert len(torch.stack(drawn).unique()) == 4 * BLOCK * IDS.shape[1]


def test_draws_do_not_depend_on_the_batch():
    requests = [noise(seed, rule=rule) for seed, rule in enumerate(("coupled", "rejection") * 2)]
    step = StepNoise([Round(request, 3, 2) for request in requests], BLOCK)
    together = torch.stack([step(slot, IDS.expand(4, -1)) for slot in range(BLOCK)], dim=1)
    verification = step.verification([2, 1, 0, 3])
    for r, request in enumerate(requests):
        alone = StepNoise([Round(request, 3, 2)], BLOCK)
        assert torch.equal(together[r], torch.stack([alone(s, IDS)[0] for s in range(BLOCK)]))
        admitted = [2, 1, 0, 3][r]
        own = alone.verification([admitted])
        if request.coupled:
            assert all(map(torch.equal, verification.races[r], own.races[0]))
        else:
            assert verification.races[r] is None
            assert torch.equal(verification.accept_RK[r, :admitted], own.accept_RK[0])
            assert verification.emit_R[r] == own.emit_R[0]


def test_greedy_requests_draw_nothing(monkeypatch):
    monkeypatch.setattr(RequestRandom, "_generator", lambda *_: 1 / 0)
    for rule in ("rejection", "coupled"):
        request = noise(rule=rule, temperature=0.0)
        assert torch.equal(draft(request, 1, 1), torch.ones(BLOCK, 4).double())
        assert uniforms(request, 1).tolist() == [0.5] * (BLOCK + 1)
