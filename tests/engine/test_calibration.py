"""What a calibration does to a round: survival is calibrated, by one snapshot, and recorded."""

from dspark.calibration.condition import CandidateSet, Condition
from dspark.calibration.confidence import Scaling, conditional_confidence
from dspark.calibration.serving import FixedCalibration, Snapshot
from dspark.core.sampling import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.scheduling.policies import FixedLength, Off, Threshold
from dspark.scheduling.survival import survival_probabilities
from tests.engine.setup import BLOCK, PROMPTS, collect, drafter, target

PROPOSALS = CandidateSet(16, 97)
SCALINGS = {
    Condition(candidates=16, draft_vocabulary=97): Scaling(
        [2.0, 0.5, 1.0, 3.0], [0.0, -0.5, 1.0, 0.2], [-0.5, 0.0, 0.25, -1.0]
    ),
    Condition(temperature=0.0, candidates=16, draft_vocabulary=97): Scaling(
        [1.0, 9.0, 0.2, 1.0], [0.3, 0.0, 0.0, -1.0], [0.5, -0.25, 0.0, 0.1]
    ),
}
SAMPLING = [SamplingParams(max_new_tokens=9), SamplingParams(temperature=0.0, max_new_tokens=9)]


class Watching(FixedLength):
    """Keeps what it was shown after drafting."""

    reads_survival = True

    def __init__(self):
        super().__init__(BLOCK)
        object.__setattr__(self, "views", [])

    def admit(self, view):
        self.views.append(view)
        return super().admit(view)


class Counting:
    """A calibration whose snapshots differ, and which keeps what it was told."""

    def __init__(self):
        self.taken, self.expected, self.seen = 0, [], []

    def expect(self, sampling):
        self.expected.append(sampling)

    def snapshot(self):
        self.taken += 1
        return Snapshot(self.taken)

    def observe(self, record, sampling):
        self.seen.append((record, dict(sampling)))


def run(calibration, policy=None):
    policy = policy or Watching()
    engine = Engine(target(), drafter("untrained"), policy, EngineConfig(), calibration=calibration)
    ids = [engine.add(prompt, own) for prompt, own in zip(PROMPTS[2:4], SAMPLING, strict=True)]
    collect(engine, ids)
    return engine, policy


def test_survival_is_calibrated_by_each_requests_condition_and_confidence_stays_raw():
    engine, policy = run(FixedCalibration(SCALINGS, PROPOSALS))
    views = {view.step: view for view in policy.views if view.confidence_RK is not None}
    rounds = 0
    for step in engine.records:
        for record in step.rounds:
            if not record.confidence:
                continue
            view = views[step.step]
            row = view.requests.index(record.request)
            scaling = list(SCALINGS.values())[record.request]
            assert len({*record.entropy}) == BLOCK and min(record.entropy) > 0
            calibrated = scaling.confidence([record.confidence], [record.entropy])
            assert view.survival_RK[row].tolist() == survival_probabilities(calibrated)[0].tolist()
            raw = conditional_confidence([record.confidence])
            assert view.confidence_RK[row].tolist() == raw[0].tolist()
            rounds += 1
    assert rounds > 4


def test_one_snapshot_a_step_is_taken_and_recorded():
    calibration = Counting()
    engine, _ = run(calibration)
    assert calibration.taken == len(engine.records)
    assert [step.calibration for step in engine.records] == list(range(1, calibration.taken + 1))


def test_what_stands_in_for_a_condition_is_said_only_where_a_policy_reads_it():
    lines = []
    greedy = [*SCALINGS][1]
    for policy in (Off(), FixedLength(BLOCK), Threshold(0.5), Watching()):
        calibration = FixedCalibration({greedy: SCALINGS[greedy]}, PROPOSALS, say=lines.append)
        assert not lines, policy
        run(calibration, policy)
    assert len(lines) == 1 and "none for rejection, temperature 1" in lines[0]


def test_it_is_told_of_requests_and_of_every_step():
    calibration = Counting()
    engine, _ = run(calibration)
    assert calibration.expected == SAMPLING
    assert [record for record, _ in calibration.seen] == engine.records
    for record, sampling in calibration.seen:
        for own in record.rounds:
            assert sampling[own.request] == SAMPLING[own.request]
