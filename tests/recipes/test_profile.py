"""`profile` on a tiny target: shapes, the table in the cache, who finds it and who does not."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dspark.checkpoints.native import read_bundle, write_bundle
from dspark.core.errors import ConfigError, DataError
from dspark.core.sampling import SamplingParams
from dspark.data.prompts import read_prompts
from dspark.engine.profiler import shapes
from dspark.recipes import bench as bench_module
from dspark.recipes import profile as profile_module
from dspark.recipes.bench import bench
from dspark.recipes.cost_tables import find_table, table_path, why_none
from dspark.recipes.llm import LLM
from dspark.recipes.policies import Policies
from dspark.recipes.profile import ProfileConfig, ProfileResult, draw, export, profile
from tests.recipes.tiny import BLOCK, write_all

SMALL = ProfileConfig(max_requests=4, contexts=(20, 60), repeats=2)
NEEDY = ("early", "async", "marginal", "global")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_all(folder)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(folder: Path, **options) -> LLM:
    return LLM(str(folder / "target"), draft=folder / "draft", weights="fp32", **options)


@pytest.fixture(scope="module")
def measured(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ProfileResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_CACHE", str(tmp_path_factory.mktemp("elsewhere")))
        return profile(load(folder, policy="off"), SMALL)


def keep(measured: ProfileResult, llm: LLM) -> Path:
    """The measured table where this test's cache has it."""
    path = table_path(llm.policies.fingerprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured.table.to_json()))
    llm.policies.forget_costs()
    return path


def test_every_shape_is_one_that_decoding_can_have() -> None:
    cells = shapes(ProfileConfig(), 7)
    assert len(cells) == len(set(cells)) < 120
    for tokens, requests, context in cells:
        assert requests <= tokens <= 8 * requests and context in (128, 512)
    for requests in (1, 2, 4, 8, 16, 32):
        assert {(requests, requests, 128), (8 * requests, requests, 128)} <= set(cells)
    at_first = {tokens for tokens, _, context in cells if context == 128}
    assert at_first >= {*range(1, 33), 33, 48, 49, 64, 65}


def test_a_profile_measures_every_shape_and_is_found_again(
    folder: Path, measured: ProfileResult
) -> None:
    cells = [(c.batch_tokens, c.requests, c.context_length) for c in measured.table.steps]
    assert cells == shapes(SMALL, BLOCK)
    assert all(cell.forward > 0 and cell.rest > 0 for cell in measured.table.steps)
    assert {(c.requests, c.length, c.context_length) for c in measured.table.drafts} == {
        *((requests, length, 20) for requests in (1, 2, 4) for length in range(1, BLOCK + 1)),
        (1, BLOCK, 60), (4, BLOCK, 60),
    }  # fmt: skip
    assert measured.fit.model.lengths == (*range(1, BLOCK + 1),)
    assert [cell.requests for cell in measured.capture] == [1, 2, 4]
    document = measured.to_json()
    assert {*document["verify"][0]} >= {
        "batch_tokens", "requests", "context_length", "milliseconds"
    }  # fmt: skip
    assert {*document["draft"][0]} == {"requests", "length", "context_length", "milliseconds"}
    assert document["fingerprint"]["target"].startswith("target ")
    json.dumps(document, allow_nan=False)

    llm = load(folder, policy="off")
    assert find_table(llm.policies.fingerprint) is None
    keep(measured, llm)
    found = find_table(llm.policies.fingerprint)
    assert found is not None and llm.policies.cost_model() is not None
    assert [c.forward for c in found.steps] == pytest.approx(
        [c.forward for c in measured.table.steps]
    )


@pytest.mark.parametrize("policy", NEEDY)
def test_without_a_table_a_fixed_length_stands_in_and_says_so(
    folder: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = load(folder, policy=policy)
    assert llm.policy.name == "fixed:2"
    [line] = [r.getMessage() for r in caplog.records if "cost table" in r.getMessage()]
    assert f"policy {policy} needs a cost table" in line
    assert "none has been measured yet; using fixed:2 instead. Run dspark profile" in line


def test_every_policy_runs_with_a_table(folder: Path, measured: ProfileResult) -> None:
    llm = load(folder, policy="off")
    keep(measured, llm)
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=12, ignore_eos=True)
    plain = [out.token_ids for out in llm.chat(["one", "two"], params, policy="off")]
    for policy in [*NEEDY, "threshold:0.5", "early:forward", "async:forward"]:
        assert llm.policies.resolve(policy).name == policy
        outputs = llm.chat(["one", "two"], params, policy=policy)
        assert [out.token_ids for out in outputs] == plain, policy


def test_global_is_refused_for_a_request_under_rejection(
    folder: Path, measured: ProfileResult
) -> None:
    llm = load(folder, policy="off")
    keep(measured, llm)
    with pytest.raises(ConfigError, match="'global' is not lossless under 'rejection'"):
        llm.chat("one", SamplingParams(verification="rejection", max_new_tokens=9), policy="global")


def test_a_table_of_other_circumstances_is_told_apart(
    folder: Path, measured: ProfileResult, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(folder, policy="off")
    path = keep(measured, llm)
    stale = {**measured.table.fingerprint, "versions": "dspark 0.0.1"}
    document = {**measured.table.to_json(), "fingerprint": stale}
    # Under its own name it is not found, and the line says how it differs.
    path.rename(path.with_name("other.json")).write_text(json.dumps(document))
    assert "measured elsewhere: versions dspark 0.0.1, here dspark" in why_none(
        llm.policies.fingerprint
    )
    with caplog.at_level(logging.WARNING):
        assert llm.policies.resolve("async").name == "fixed:2"
    assert "versions dspark 0.0.1" in caplog.text
    # Copied over the right name it is refused.
    path.write_text(json.dumps(document))
    llm.policies.forget_costs()
    with pytest.raises(DataError, match="measured elsewhere"):
        llm.policies.resolve("async")
    path.write_text("{}")
    with pytest.raises(DataError, match="no cost table"):
        load(folder, policy="async")
    load(folder, policy="fixed:1")  # needs none


def test_a_table_measured_in_another_way_does_not_serve(
    folder: Path, measured: ProfileResult
) -> None:
    llm = load(folder, policy="off")
    keep(measured, llm)
    bundle = read_bundle(folder / "draft")

    def policies(**ways: bool) -> Policies:
        return Policies(
            llm.loaded, llm.drafter, bundle, draft_length=None, calibrated=False, probes=False,
            say=print, **{"graphs": False, "many_requests": False, **ways},
        )  # fmt: skip

    assert policies().cost_model() is not None
    for way, words in (("graphs", "in CUDA graphs"), ("many_requests", "for many requests")):
        other = policies(**{way: True})
        assert other.cost_model() is None and other.resolve("async").name == "fixed:2"
        assert words in str(other.fingerprint)
    assert "weights fp32, here fp32, for many" in why_none(policies(many_requests=True).fingerprint)


@pytest.mark.parametrize("exact", [False, True])
def test_many_requests_are_profiled_as_they_will_be_served(folder: Path, exact: bool) -> None:
    llm = load(folder, policy="off")
    llm.many_requests = exact
    seen = set()
    forward = llm.loaded.target.forward

    def watched(batch, *args, **options):
        seen.add(batch.exact)
        return forward(batch, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.loaded.target, "forward", watched)
        profile(llm, ProfileConfig(max_requests=1, contexts=(20,), repeats=1))
    assert exact in seen and (exact or True not in seen)


def test_a_bundles_own_policy_may_be_one_of_these(
    folder: Path, measured: ProfileResult, tmp_path: Path
) -> None:
    bundle = read_bundle(folder / "draft")
    assert bundle.info is not None
    write_bundle(
        tmp_path / "draft",
        config=bundle.config,
        info=replace(bundle.info, policy="async"),
        tensors=bundle.tensors,
        card="",
    )
    llm = LLM(str(folder / "target"), draft=tmp_path / "draft", weights="fp32")
    assert llm.policy.name == "fixed:2"
    document = {**measured.table.to_json(), "fingerprint": llm.policies.fingerprint}
    path = table_path(llm.policies.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    other = LLM(str(folder / "target"), draft=tmp_path / "draft", weights="fp32")
    assert other.policy.name == "async"
    # Another drafter, another table.
    assert load(folder, policy="async").policy.name == "fixed:2"


def test_bench_profiles_first_if_no_table_fits(
    folder: Path, measured: ProfileResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(folder, policy="off")
    profiled = []

    def short(llm: LLM, *, progress: object) -> None:
        profiled.append(llm)
        keep(measured, llm)

    monkeypatch.setattr(profile_module, "profile", short)
    sampling = SamplingParams(max_new_tokens=6)
    prompts = read_prompts(folder)
    result = bench(llm, prompts, sampling, policies=["off", "async"], concurrencies=[2], rounds=1)
    assert profiled == [llm]
    assert [row.policy for row in result.rows] == ["off", "async"]
    assert result.verification == "rejection"
    result = bench(llm, prompts, sampling, policies=["off", "fixed:2"], concurrencies=[2], rounds=1)
    off, useless = result.rows
    assert off.modelled == 1.0
    assert useless.modelled is not None and useless.modelled < 1.0, "drafts that cost and lose"
    result = bench(
        llm, prompts, sampling, policies=["global", "marginal"], concurrencies=[2], rounds=1
    )
    assert profiled == [llm]
    assert result.verification == "coupled"
    with pytest.raises(ConfigError, match="'global' is not lossless"):
        bench(llm, prompts, replace(sampling, verification="rejection"), policies=["global"])
    assert bench_module.ensure_costs is profile_module.ensure_costs


def test_exports_and_the_picture(measured: ProfileResult, tmp_path: Path) -> None:
    export(measured, "sglang", tmp_path / "sps.json")
    assert "sample_batch_tokens" in json.loads((tmp_path / "sps.json").read_text())
    draw(measured, tmp_path / "sps.svg")
    assert (tmp_path / "sps.svg").read_text().count("requests") >= 3
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        draw(measured, tmp_path / "sps.txt")


def test_bad_input(folder: Path) -> None:
    for wrong in ({"max_requests": 0}, {"repeats": 0}, {"contexts": ()}, {"contexts": (0,)}):
        with pytest.raises(ConfigError, match="must be at least 1"):
            ProfileConfig(**wrong)
    with pytest.raises(ConfigError, match="do not fit the target's 256"):
        profile(load(folder), ProfileConfig(max_requests=1, contexts=(250,)))
    with pytest.raises(ConfigError, match="no drafter to profile"):
        profile(LLM(str(folder / "target"), draft=None, weights="fp32"))
