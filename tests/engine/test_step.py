"""What one step is made of, and what it refuses."""

import pytest

from dspark.core.errors import ConfigError
from dspark.core.records import RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from dspark.engine.alarm import ROUNDS, AcceptanceAlarm
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength, Off
from tests.engine.setup import BLOCK, drafter, engine_of, target


class Watched:
    """A target that keeps the batches it is given, and may tamper with its output."""

    def __init__(self, tamper=lambda output: output):
        self.inner, self.tamper, self.batches = target(), tamper, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def forward(self, batch, store, **options):
        self.batches.append(batch)
        return self.tamper(self.inner.forward(batch, store, **options))


def sampled(rule="rejection", **changes):
    options = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True, "seed": 3}
    return SamplingParams(verification=rule, **options | changes)


@pytest.mark.parametrize(
    ("others", "exact"),
    [
        ([sampled(), sampled()], False),
        ([sampled("coupled"), sampled()], True),
        ([sampled(), sampled(temperature=0.0)], True),
    ],
)
def test_one_request_with_a_promise_makes_the_whole_step_exact(others, exact):
    for params in (others, others[::-1]):
        watched = Watched()
        engine = Engine(watched, None, Off())
        for own in params:
            engine.add([1, 2, 3], own)
        list(engine.run())
        assert {batch.exact for batch in watched.batches} == {exact}
    watched = Watched()
    engine = Engine(watched, None, Off(), EngineConfig(row_exact=False))
    engine.add([1, 2, 3], sampled("coupled"))
    list(engine.run())
    assert not any(batch.exact for batch in watched.batches)


def test_nothing_is_verified_that_could_not_be_emitted():
    """The last token of a text needs no draft: it is the one after the last accepted."""
    engine = engine_of(("perfect", BLOCK))
    lengths = {engine.add([1, 2], sampled(max_new_tokens=n, temperature=0.0)): n for n in (2, 5, 9)}
    list(engine.run())
    emitted = dict.fromkeys(lengths, 1)  # by prefill
    for record in (record for step in engine.records for record in step.rounds):
        left = lengths[record.request] - emitted[record.request]
        assert record.admitted <= left - 1
        emitted[record.request] += record.emitted
    assert emitted == lengths


def test_requests_stand_in_the_order_of_their_memory():
    """One that takes the place of a finished one stands there: neighbours share a kernel call."""
    watched = Watched()
    engine = Engine(watched, None, Off(), EngineConfig(max_requests=3, page_size=16))
    for length in (3, 9, 12, 7, 6):
        engine.add([1, 2, 3], sampled(max_new_tokens=length))
    firsts = []
    while not engine.idle:
        running = len(watched.batches)
        engine.step()
        batch = watched.batches[running]
        if len(batch.tokens_N) == 3:  # all decode
            firsts.append([int(slot) // 16 for slot in batch.slots_N])
    assert len(firsts) > 3 and all(slots == sorted(slots) for slots in firsts)


class OnlyCoupled(FixedLength):
    rules = frozenset({"coupled"})


def test_a_rule_under_which_the_policy_is_not_lossless():
    engine = Engine(target(), drafter("random"), OnlyCoupled(BLOCK))
    with pytest.raises(ConfigError, match="not lossless under 'rejection'"):
        engine.add([1], sampled("rejection"))
    engine.add([1], sampled("coupled"))
    engine.add([1], sampled("rejection", temperature=0.0))  # nothing is random


def test_the_alarm_leaves_out_rounds_that_a_text_ended():
    """Short texts end inside their first block: that says nothing of the drafter."""

    def round_record(ended):
        return RoundRecord(
            request=0, round=1, proposed=4, admitted=4, accepted=0, emitted=1, ended=ended
        )

    def step(ended):
        rounds = (round_record(ended),) * ROUNDS
        return StepRecord(step=0, batch_tokens=1, prefill_tokens=0, rounds=rounds)

    alarm = AcceptanceAlarm()
    assert alarm.observe(step(ended=True)) is None
    assert "accepted length is 1.000" in (alarm.observe(step(ended=False)) or "")


def test_the_alarm_counts_what_was_accepted_in_a_last_round():
    """Or a drafter that is right nine times in ten would be found out by its tenth rounds."""

    def one(accepted):
        return RoundRecord(
            request=0, round=1, proposed=1, admitted=1, accepted=accepted, emitted=accepted + 1,
            ended=bool(accepted),
        )  # fmt: skip

    alarm = AcceptanceAlarm()
    for _ in range(ROUNDS):
        rounds = (*[one(1)] * 9, one(0))
        step = StepRecord(step=0, batch_tokens=1, prefill_tokens=0, rounds=rounds)
        assert alarm.observe(step) is None


def test_choices_of_one_seed_are_other_texts():
    engine = engine_of(("random", BLOCK))
    for choice in range(3):
        engine.add([1, 2, 3], sampled("coupled", max_new_tokens=12), choice=choice)
    texts = dict.fromkeys(range(3), ())
    for event in engine.run():
        texts[event.request] += event.tokens
    assert len(set(texts.values())) == 3
    assert {len(text) for text in texts.values()} == {12}
