import numpy as np
import torch

from dspark.core.random import RequestRandom
from dspark.nn.sampling import race


def test_a_uniform_of_zero_lets_no_impossible_token_win(monkeypatch):
    """0 / 0 is NaN, which argmax takes for the largest."""

    class Zeros:
        def random(self, size):
            return np.zeros(size)

    monkeypatch.setattr(RequestRandom, "_generator", lambda *_: Zeros())
    random = RequestRandom(1)
    probs = torch.tensor([0.0, 0.0, 0.6, 0.4], dtype=torch.float64)
    assert race(probs, torch.from_numpy(random.coupled_exponentials(0, 4))) == 2
    assert race(probs, torch.from_numpy(random.round_exponentials(1, 2, 4))[1]) == 2


def test_uniforms_have_53_bits():
    """With 24 bits a token of probability 1e-8 would be drawn never, or far too often."""
    random = RequestRandom(3)
    for exponentials in (
        random.coupled_exponentials(5, 4000),
        random.round_exponentials(1, 4, 1000).ravel(),
        random.round_uniforms(1, "accept", 4000),
    ):
        bits = exponentials if exponentials.max() < 1 else -np.expm1(-exponentials)
        # On a grid of 2^-24 every value would be a whole number here.
        assert np.mean(np.abs(bits * 2**24 - np.round(bits * 2**24)) > 1e-3) > 0.9


def test_streams_of_neighbouring_positions_share_no_number():
    random = RequestRandom(2**63 - 1, choice=2)
    drawn = [random.coupled_exponentials(position, 64) for position in range(4)]
    drawn += [random.round_exponentials(number, 2, 32).ravel() for number in range(4)]
    drawn += [
        -np.log1p(-random.round_uniforms(number, purpose, 64))
        for number in range(4)
        for purpose in ("accept", "emit")
    ]
    everything = np.concatenate(drawn)
    assert len(np.unique(everything)) == len(everything)
