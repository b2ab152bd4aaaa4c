"""Which rounds count at which position, and with which label."""

from dspark.calibration.samples import Rounds
from dspark.core.records import RoundRecord


def record(*, admitted, accepted, emitted=None, ended=False, confidence=(1.0, 2.0, 3.0)):
    return RoundRecord(
        request=0, round=1, proposed=3, admitted=admitted, accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted, ended=ended, confidence=confidence,
        entropy=tuple(value / 4 for value in confidence),
    )  # fmt: skip


def verdicts(one):
    """Per position: True, False, or None where it does not count."""
    rounds = Rounds.of([one], [7], 3)
    return [
        bool(rounds.labels(k)[0]) if rounds.counted(k)[0] else None
        for k in range(rounds.block_size)
    ]


def test_zero_after_a_rejection():
    assert verdicts(record(admitted=3, accepted=1)) == [True, False, False]


def test_only_verified_positions_count():
    assert verdicts(record(admitted=2, accepted=2)) == [True, True, None]
    assert verdicts(record(admitted=1, accepted=0)) == [False, None, None]


def test_positions_behind_an_end_of_text_were_never_judged():
    cut = record(admitted=3, accepted=2, emitted=2, ended=True)
    assert verdicts(cut) == [True, True, None]


def test_an_end_of_text_in_place_of_a_rejected_token_judges_them_all():
    last = record(admitted=3, accepted=1, emitted=2, ended=True)
    assert verdicts(last) == [True, False, False]


def test_rounds_without_a_draft_or_a_head_say_nothing():
    kept = record(admitted=3, accepted=3)
    plain = record(admitted=0, accepted=0, confidence=())
    rounds = Rounds.of([plain, kept, plain], [1, 2, 3], 3)
    assert rounds.prompts_N.tolist() == [2]
    assert rounds.logits_NK.tolist() == [[1.0, 2.0, 3.0]]
    assert rounds.entropies_NK.tolist() == [[0.25, 0.5, 0.75]]
    assert rounds.first(2).entropies_NK.tolist() == [[0.25, 0.5]]
    assert rounds.without_entropy().entropies_NK.tolist() == [[0.0] * 3]
    assert rounds.select(rounds.accepted_N < 3).entropies_NK.shape == (0, 3)
    assert len(Rounds.of([plain], [0], 3)) == 0


def test_means_and_counts_per_position():
    rounds = Rounds.of([record(admitted=2, accepted=2), record(admitted=1, accepted=0)], [0, 0], 3)
    assert rounds.samples == (2, 1, 0)
    assert rounds.mean_survival == (0.5, 1.0, None)
