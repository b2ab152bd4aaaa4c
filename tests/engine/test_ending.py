"""Where a text ends, and what the records say about it."""

import itertools
import logging

import pytest

from dspark.core.records import RoundRecord, StepRecord
from dspark.core.sampling import SamplingParams
from dspark.engine.alarm import ROUNDS, AcceptanceAlarm
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength, Off
from tests.engine.setup import (
    BLOCK,
    GREEDY,
    PROMPTS,
    collect,
    drafter,
    engine_of,
    plain_greedy,
    run,
    target,
)

PROMPT = PROMPTS[4]


def greedy(**changes):
    values = {"temperature": 0.0, "max_new_tokens": 14, "ignore_eos": True}
    return SamplingParams(**values | changes)


def first_at(index):
    """A token of the greedy text whose first occurrence is at `index` or, if none is, after it."""
    text = plain_greedy()[4]
    while text.index(text[index]) != index:
        index += 1
    return index, text[index]


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("policy", [None, ("perfect", BLOCK), ("perfect", 2), ("never right", 3)])
def test_a_stop_token_ends_the_text_where_plain_decoding_would(policy, index):
    index, token = first_at(index)
    result = run([PROMPT], greedy(stop_token_ids=(token,)), policy)
    assert result.tokens == [plain_greedy()[4][: index + 1]]
    assert result.finished == ["stop"]
    assert len(result.fates[0]) == index + 1
    check_records(result, 0)
    if result.rounds[0]:
        assert [record.ended for record in result.rounds[0]].count(True) == 1
        assert result.rounds[0][-1].ended


@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("policy", [None, ("perfect", BLOCK), ("teacher", 3)])
def test_a_limit_ends_it_exactly(policy, limit):
    result = run([PROMPT], greedy(max_new_tokens=limit), policy)
    assert result.tokens == [plain_greedy()[4][:limit]]
    assert result.finished == ["length"]
    check_records(result, 0)
    assert bool(result.rounds[0]) == (limit > 1), "prefill's token is no round"


def check_records(result, index):
    """What holds for every request: rounds and fates account for each token once."""
    rounds, fates = result.rounds[index], result.fates[index]
    assert [record.round for record in rounds] == list(range(1, len(rounds) + 1))
    assert fates[0] == "plain"
    assert 1 + sum(record.emitted for record in rounds) == len(result.tokens[index]) == len(fates)
    assert sum(record.accepted for record in rounds) == fates.count("accepted")
    at = 1
    for record in rounds:
        own = fates[at : at + record.emitted]
        at += record.emitted
        assert 0 <= record.accepted <= record.admitted <= record.proposed
        assert own[: record.accepted] == ["accepted"] * record.accepted
        cut = record.emitted == record.accepted
        assert cut or record.emitted == record.accepted + 1
        assert record.ended or not cut, "a round without a last token must have ended in its run"
        if not cut:
            whole = "bonus" if record.accepted == record.admitted else "corrected"
            assert own[-1] == ("plain" if record.admitted == 0 else whole)


def test_an_end_inside_an_accepted_run():
    """A perfect drafter's first round is tokens 1 to 5: an end at 3 leaves three, and no bonus."""
    index, token = first_at(3)
    assert index <= 4, "the fixture's text repeats itself too early; take another prompt"
    result = run([PROMPT], greedy(stop_token_ids=(token,)), ("perfect", BLOCK))
    (record,) = result.rounds[0]
    assert (record.proposed, record.admitted) == (BLOCK, BLOCK)
    assert (record.accepted, record.emitted, record.ended) == (index, index, True)
    assert result.fates[0] == ["plain"] + ["accepted"] * index


def test_the_targets_own_end(monkeypatch):
    index, token = first_at(3)
    monkeypatch.setattr(target(), "eos_token_ids", (token,))
    policy = ("perfect", BLOCK)
    ended = run([PROMPT], greedy(ignore_eos=False), policy)
    assert ended.tokens == [plain_greedy()[4][: index + 1]] and ended.finished == ["stop"]
    ignored = run([PROMPT], greedy(ignore_eos=True), policy)
    assert ignored.tokens == [plain_greedy()[4]] and ignored.finished == ["length"]
    stopped = run([PROMPT], greedy(ignore_eos=True, stop_token_ids=(token,)), policy)
    assert stopped.tokens == ended.tokens and stopped.finished == ["stop"]


def test_everything_is_recorded():
    ticks = itertools.count()
    engine = Engine(
        target(), drafter("perfect"), FixedLength(BLOCK), clock=lambda: float(next(ticks))
    )
    engine.drafter.engine = engine
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    result = collect(engine, ids)
    for index in range(len(PROMPTS)):
        check_records(result, index)
    assert [record.step for record in engine.records] == list(range(len(engine.records)))
    first = engine.records[0]
    assert first.prefill_tokens == first.batch_tokens == sum(map(len, PROMPTS))
    assert first.rounds == ()
    for record in engine.records:
        phases = ["draft", "draft_head", "schedule", "verify", "sample", "commit"]
        assert list(record.seconds) == phases
        assert sum(record.seconds.values()) == 5.0, "the phases are the whole step"
        offered = sum(1 + own.admitted for own in record.rounds)
        assert record.batch_tokens == record.prefill_tokens + offered
        for own in record.rounds:
            assert len(own.confidence) == own.proposed


def test_prefill_is_cut_into_chunks():
    engine = engine_of(chunk_tokens=16)
    result = run([PROMPTS[5], PROMPTS[0]], GREEDY, engine=engine)
    assert [record.prefill_tokens for record in engine.records[:6]] == [17, 16, 16, 16, 6, 0]
    assert result.tokens == [plain_greedy()[5], plain_greedy()[0]]


class TestCancel:
    def start(self, **config):
        engine = engine_of(("teacher", BLOCK), **config)
        return engine, [engine.add(prompt, GREEDY) for prompt in PROMPTS]

    def steps(self, engine, count):
        tokens = {}
        for _ in range(count):
            for event in engine.step():
                tokens.setdefault(event.request, []).extend(event.tokens)
            engine.memory.check_integrity(engine.running)
        return tokens

    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    @pytest.mark.parametrize("config", [{}, {"max_requests": 2, "chunk_tokens": 5}])
    def test_others_do_not_notice(self, steps, config):
        engine, ids = self.start(**config)
        early = self.steps(engine, steps)
        gone = {ids[1], ids[4]}
        engine.cancel(gone)
        engine.memory.check_integrity(engine.running)
        rest = collect(engine, [i for i in ids if i not in gone] + sorted(gone))
        for index, tokens in enumerate(rest.tokens[: len(ids) - 2]):
            request = [i for i in ids if i not in gone][index]
            assert [*early.get(request, []), *tokens] == plain_greedy()[ids.index(request)]

    def test_all(self):
        engine, _ = self.start(max_requests=3)
        self.steps(engine, 2)
        engine.cancel()
        assert engine.idle and engine.memory.pool.free_pages == engine.memory.pool.num_pages
        engine.cancel([99])
        assert run(PROMPTS[:1], GREEDY, engine=engine).tokens == plain_greedy()[:1]


class TestAlarm:
    def warnings(self, caplog):
        return [r.message for r in caplog.records if "accepted length" in r.message]

    def test_it_rings_once_for_a_drafter_that_never_fits(self, caplog):
        params = greedy(max_new_tokens=80)
        with caplog.at_level(logging.WARNING):
            result = run(PROMPTS, params, ("never right", 2))
        (message,) = self.warnings(caplog)
        assert "1.000 over the last 200 rounds" in message and "--policy off" in message
        assert sum(len(own) for own in result.rounds) > 2 * ROUNDS - 50

    def test_plain_decoding_does_not_ring_it(self, caplog):
        with caplog.at_level(logging.WARNING):
            result = run(PROMPTS, greedy(max_new_tokens=50))
        assert sum(len(own) for own in result.rounds) > ROUNDS
        assert not self.warnings(caplog)

    def test_it_waits_for_enough_rounds(self, caplog):
        with caplog.at_level(logging.WARNING):
            run(PROMPTS[:3], greedy(max_new_tokens=ROUNDS // 3), ("never right", 1))
        assert not self.warnings(caplog)

    def test_a_good_start_does_not_hide_a_bad_end(self):
        def step(accepted):
            own = RoundRecord(
                request=0, round=1, proposed=2, admitted=2, accepted=accepted,
                emitted=accepted + 1, ended=False,
            )  # fmt: skip
            return StepRecord(step=0, batch_tokens=3, prefill_tokens=0, rounds=(own,))

        alarm = AcceptanceAlarm()
        assert all(alarm.observe(step(2)) is None for _ in range(3 * ROUNDS))
        rung = [alarm.observe(step(0)) is not None for _ in range(2 * ROUNDS)]
        assert rung.count(True) == 1
        # It takes fewer than 5% accepted: 190 to 199 of the last 200 rounds at 0.
        assert ROUNDS * 0.95 <= rung.index(True) + 1 <= ROUNDS


def test_off_never_touches_a_drafter():
    own = drafter("perfect")
    engine = Engine(target(), own, Off())
    assert run(PROMPTS[:2], GREEDY, engine=engine).tokens == plain_greedy()[:2]
    assert own.drafts == own.extended == 0
    assert all(record.proposed == 0 for step in engine.records for record in step.rounds)
