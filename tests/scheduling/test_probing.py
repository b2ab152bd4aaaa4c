"""Probes verify whole rounds, chosen by request and round number alone."""

from dataclasses import replace

import numpy as np

from dspark.scheduling.policies import FixedLength, Off, RoundView
from dspark.scheduling.probing import Probing

K = 7


def view(requests, rounds, limits, survival=None):
    return RoundView(
        step=0, requests=tuple(requests), rounds=tuple(rounds), block_size=K, prefill_tokens=0,
        max_admit_R=np.array(limits), context_R=np.zeros(len(limits), dtype=np.int64),
        survival_RK=survival,
    )  # fmt: skip


def test_a_probe_verifies_all_that_was_drafted_and_other_rounds_what_the_policy_says():
    policy = Probing(FixedLength(2), every=10)
    lengths = policy.admit(view([0, 1, 2, 8], [5, 9, 9, 2], [7, 7, 7, 3]))
    assert lengths.tolist() == [2, 7, 2, 3]


def test_a_request_without_a_draft_is_not_probed():
    assert Probing(FixedLength(2), every=1).admit(view([0], [0], [0])).tolist() == [0]


def test_each_request_is_probed_once_in_so_many_rounds_and_not_all_at_once():
    policy = Probing(FixedLength(1), every=20)
    probed = np.array([policy.admit(view(range(8), [n] * 8, [K] * 8)) == K for n in range(100)])
    assert (probed.sum(0) == 5).all()
    assert probed.sum(1).max() == 1


def test_values_have_no_say():
    policy = Probing(FixedLength(2), every=3)
    base = view(range(9), range(9), [K] * 9, np.full((9, K), 0.5))
    other = replace(base, survival_RK=np.random.default_rng(0).random((9, K)))
    assert policy.admit(base).tolist() == policy.admit(other).tolist()


def test_it_passes_for_the_policy_it_probes_for():
    policy = Probing(FixedLength(2), every=3)
    assert (policy.name, policy.drafts, policy.rules) == ("fixed:2", True, FixedLength(2).rules)
    assert policy.fresh().every == 3
    assert not Probing(Off()).drafts
