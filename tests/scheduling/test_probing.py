"""Probes verify whole rounds, chosen by the step's number alone."""

from dataclasses import replace

import numpy as np

from dspark.scheduling.policies import FixedLength, Off, RoundView
from dspark.scheduling.probing import Probing

K = 7


def view(step, limits, survival=None):
    return RoundView(
        step=step, requests=tuple(range(len(limits))), rounds=(step,) * len(limits), block_size=K,
        prefill_tokens=0, max_admit_R=np.array(limits), survival_RK=survival,
        context_R=np.zeros(len(limits), dtype=np.int64),
    )  # fmt: skip


def test_a_probe_verifies_all_that_was_drafted_and_other_rounds_what_the_policy_says():
    policy = Probing(FixedLength(2), every=10)
    assert policy.admit(view(19, [7, 7, 3, 0])).tolist() == [7, 7, 3, 0]
    assert policy.admit(view(20, [7, 7, 3, 0])).tolist() == [2, 2, 2, 0]


def test_whole_blocks_are_drafted_for_probes_and_only_for_them():
    class Short(FixedLength):
        def draft_length(self, view):
            return 2

    policy = Probing(Short(2), every=20)
    lengths = [policy.draft_length(view(step, [K] * 8)) for step in range(100)]
    assert lengths.count(K) == 5 and lengths.count(2) == 95


def test_values_have_no_say():
    policy = Probing(FixedLength(2), every=3)
    for step in range(6):
        base = view(step, [K] * 9, np.full((9, K), 0.5))
        other = replace(base, survival_RK=np.random.default_rng(0).random((9, K)))
        assert policy.admit(base).tolist() == policy.admit(other).tolist()


def test_it_passes_for_the_policy_it_probes_for():
    policy = Probing(FixedLength(2), every=3)
    assert (policy.name, policy.drafts, policy.rules) == ("fixed:2", True, FixedLength(2).rules)
    assert policy.fresh().every == 3
    assert not Probing(Off()).drafts
