"""The benchmark scripts run, on a tiny target. What they call is tested where it lives."""

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from dspark.core.errors import ConfigError, DSparkError, MissingExtraError
from dspark.core.sampling import SamplingParams
from dspark.data.responses import Response, ResponseFile
from dspark.data.template import template_hash
from dspark.drafters import captured
from dspark.nn import padded_attention
from dspark.nn.sampling import race
from dspark.recipes import profile as profile_module
from dspark.recipes.profile import ProfileConfig
from dspark.recipes.progress import Progress
from dspark.recipes.prompt_sets import Job
from dspark.targets import captured as captured_targets
from tests.recipes.tiny import write_all, write_draft, write_prompts

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other from their own folder, as they do when they are run."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in (
        "policy_sweep", "threshold_sweep", "gate_cost", "planner_time", "common", "single_stream",
        "llama_cpp", "weights", "exactness", "sse_clients", "server_overhead",
        "objective", "gpu_check",
        "feature_precision",
    ):  # fmt: skip
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmarks")
    write_all(folder)
    turns = [f"question {i}" for i in range(60)]
    for name in ("gsm8k", "math500", "humaneval"):
        write_prompts(folder / f"{name}.jsonl", turns)
    return folder


def job(domain: str, line: int = 1) -> Job:
    return Job(domain, line, 0, (5, 6, 7), SamplingParams(temperature=0.0, max_new_tokens=9))


def test_single_stream(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import single_stream

    files = [str(folder / f"{name}.jsonl") for name in ("gsm8k", "math500", "humaneval")]
    result = single_stream.main(
        ["--files", *files, "--target", str(folder / "target"), "--draft", str(folder / "draft"),
         "--weights", "fp32", "--limit", "1", "--max-new-tokens", "5"]
    )  # fmt: skip
    assert result["prompts"] == 3
    assert {*result["plain_over_transformers"]} == {"math", "code", "all"}
    greedy, sampled = "dspark fixed:3 0", "dspark fixed:3 1"
    assert {*result["dspark_over_plain"]} == {*result["accepted_length"]} == {greedy, sampled}
    assert {*result["dspark_over_plain"][sampled]} == {"math", "code", "all"}
    assert all(length >= 1.0 for length in result["accepted_length"][sampled].values())
    assert sum(result["phases"][greedy].values()) == pytest.approx(1.0)
    out = capsys.readouterr().out
    assert "plain / transformers: math" in out
    assert "DSpark / plain, fixed:3 at temperature 1: math" in out


def test_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import weights

    common = ["--files", str(folder / "gsm8k.jsonl"), "--target", str(folder / "target"),
              "--limit", "1", "--max-new-tokens", "5"]  # fmt: skip
    kinds = ["--kind", "fp32", "--kind", "int8"]
    result = weights.main(
        [*common, *kinds, "--draft", str(folder / "draft"), "--policy", "fixed:2"]
    )
    assert {*result["tokens_per_second"]} == {
        "transformers", "fp32 off", "fp32 fixed:2", "int8 off", "int8 fixed:2"
    }  # fmt: skip
    assert result["over_transformers"]["transformers"] == 1.0
    assert "int8 fixed:2" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no 4-bit grid"):
        weights.main([*common, "--kind", "q4", "--draft", "none"])


def test_single_stream_needs_a_drafter(folder: Path) -> None:
    import single_stream

    with pytest.raises(ConfigError, match="no drafter"):
        single_stream.main(
            ["--files", str(folder / "gsm8k.jsonl"), "--target", str(folder / "target"),
             "--weights", "fp32", "--max-new-tokens", "5"]
        )  # fmt: skip


def test_contenders_take_turns_and_ratios_are_of_summed_times() -> None:
    import common

    order: list[tuple[str, int]] = []

    def contender(name: str, tokens: int, seconds: float) -> common.Contender:
        def run(job: Job) -> common.Timing:
            order.append((name, job.line))
            return common.Timing(tokens * job.line, seconds)

        return run

    timings = common.interleave(
        {"a": contender("a", 10, 1.0), "b": contender("b", 10, 4.0)},
        [job("gsm8k", 1), job("aime24", 2), job("other", 3)],
        repeats=1,
        progress=Progress(quiet=True),
    )
    warm_up, counted = order[:2], order[2:]
    assert warm_up == [("a", 1), ("b", 1)]
    assert counted == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert timings["a"]["math"].tokens == 10 + 20  # gsm8k and aime24 are math
    assert timings["b"]["math"].seconds == 8.0
    assert common.ratios(timings, "a", "b") == {"math": 4.0, "other": 4.0, "all": 4.0}


def test_the_result_is_the_last_line_and_an_error_is_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import common

    common.finish(lambda: {"ratio": 1.5})
    assert json.loads(capsys.readouterr().out) == {"ratio": 1.5}

    def fail() -> dict[str, float]:
        raise ConfigError("no such\nthing")

    with pytest.raises(SystemExit) as exit_:
        common.finish(fail)
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: no such thing\n"


def fake_xllamacpp(answer: dict[str, object], seen: list[dict[str, object]]) -> ModuleType:
    class Server:
        def __init__(self, params: SimpleNamespace) -> None:
            seen.append(vars(params))

        def handle_completions(self, request: dict[str, object]) -> dict[str, object]:
            seen.append(request)
            return answer

    def params() -> SimpleNamespace:
        parts = ("model", "cpuparams", "cpuparams_batch")
        return SimpleNamespace(**{part: SimpleNamespace() for part in parts})

    module = ModuleType("xllamacpp")
    module.CommonParams, module.Server = params, Server  # type: ignore[attr-defined]
    return module


def test_llama_cpp_gets_the_same_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    seen: list[dict[str, object]] = []
    answer = {"usage": {"completion_tokens": 9}}
    monkeypatch.setitem(sys.modules, "xllamacpp", fake_xllamacpp(answer, seen))
    contender = llama_cpp.llama_cpp_contender(Path("x.gguf"), [job("gsm8k")], threads=1)
    assert contender(job("gsm8k")).tokens == 9
    params, request = seen
    assert params["n_ctx"] >= 3 + 9  # type: ignore[operator]
    assert request["prompt"] == [5, 6, 7]
    assert (request["n_predict"], request["temperature"]) == (9, 0.0)
    assert request["cache_prompt"] is False


def test_llama_cpp_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    import llama_cpp

    monkeypatch.setitem(sys.modules, "xllamacpp", fake_xllamacpp({"error": "full"}, []))
    contender = llama_cpp.llama_cpp_contender(Path("x.gguf"), [job("gsm8k")], threads=1)
    with pytest.raises(DSparkError, match="full"):
        contender(job("gsm8k"))
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'dspark\[bench\]'"):
        llama_cpp.llama_cpp_contender(Path("x.gguf"), [job("gsm8k")], threads=1)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        llama_cpp.main(["--target", "folder"])


def test_exactness_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import exactness

    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    sizes = ["--weights", "fp32", "--tokens", "50", "--max-new-tokens", "10", "--batch", "4"]
    monkeypatch.setattr(sys, "argv", ["exactness.py", *models, *sizes])
    with pytest.raises(SystemExit) as exit_:
        exactness.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])["exactness"]
    assert exit_.value.code == (0 if document["holds"] else 1)
    assert {way["tokens"] for way in document["ways"]} == {50}


# -- scheduling -------------------------------------------------------------------------------


def scheduling_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, *args: str
) -> dict[str, Any]:
    """A script's result on the tiny models, with a machine that is quickly profiled."""
    monkeypatch.setenv("DSPARK_CACHE", str(folder / "cache"))
    small = ProfileConfig(max_requests=2, contexts=(20,), repeats=1)
    full = profile_module.profile
    monkeypatch.setattr(
        profile_module, "profile", lambda llm, *, progress: full(llm, small, progress=progress)
    )
    files = [str(folder / f"{name}.jsonl") for name in ("gsm8k", "humaneval")]
    result: dict[str, Any] = module.main(
        ["--files", *files, "--target", str(folder / "target"), "--draft", str(folder / "draft"),
         "--weights", "fp32", "--limit", "1", "--max-new-tokens", "5", *args]
    )  # fmt: skip
    json.dumps(result, allow_nan=False)
    return result


def test_policy_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import policy_sweep

    policies = ["--policy", "off", "--policy", "fixed:2", "--policy", "async"]
    result = scheduling_run(
        folder, monkeypatch, policy_sweep, *policies, "--concurrency", "1", "--concurrency", "2",
        "--repeats", "1", "--plot", str(folder / "figure8.png"),
    )  # fmt: skip
    assert [*result["over_off"]] == [*result["async_over_best"]] == ["1", "2"]
    assert result["over_off"]["1"]["off"] == 1.0
    assert (folder / "figure8.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert printed.count("async / best other") == 2
    assert "by the clock" in printed and "by the cost table" in printed
    every = policy_sweep.policies_of(3, coupled=True)
    assert every[:4] == ["off", "fixed:1", "fixed:2", "fixed:3"] and every[-1] == "global"
    assert policy_sweep.against_best({"off": 1.0, "fixed:1": 1.2, "async": 1.8}, "async") == 1.5


def test_threshold_sweep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threshold_sweep

    result = scheduling_run(
        folder, monkeypatch, threshold_sweep, "--threshold", "0", "--threshold", "1",
        "--plot", str(folder / "figure5.png"),
    )  # fmt: skip
    everything, nothing = result["thresholds"]["0"], result["thresholds"]["1"]
    assert {*everything} == {"math", "code"}
    assert everything["math"]["verified"] > 0 and nothing["math"]["verified"] == 0
    assert nothing["math"]["rate"] == 1.0
    assert (folder / "figure5.png").stat().st_size > 1000


def test_gate_cost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gate_cost

    result = scheduling_run(folder, monkeypatch, gate_cost, "--policy", "early", "--domain", "math")
    useless = result["useless drafter"]["early"]
    assert {*useless["over_plain"]} == {"math", "code", "all"}
    assert 0 <= useless["drafted"] <= 1  # what pays is for the clock to say
    assert {*result["own drafter, math"]["early"]["over_plain"]} == {"math", "all"}


def test_planner_time(capsys: pytest.CaptureFixture[str]) -> None:
    import planner_time

    result = planner_time.main(["--requests", "1", "8", "--calls", "3"])
    assert {*result["microseconds"]} == {
        "algorithm 1", "top-K", "policy early", "policy async", "policy marginal"
    }  # fmt: skip
    assert all(value > 0 for own in result["microseconds"].values() for value in own.values())


def test_server_overhead(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import server_overhead

    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    server_overhead.main(["--streams", "3", "--tokens", "5", "--repeats", "2", *models])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(document["seconds"]["engine"]) == len(document["seconds"]["server"]) == 2
    ratio = document["server_tokens_per_second"] / document["engine_tokens_per_second"]
    assert document["overhead"] == pytest.approx(1 - ratio)


def test_feature_precision(
    talker_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import feature_precision

    tokenizer = AutoTokenizer.from_pretrained(talker_folder)
    file = ResponseFile(
        tmp_path / "responses.jsonl", target="talker", template_hash=template_hash(tokenizer),
        vocab_size=99,
    )  # fmt: skip
    prompts = write_prompts(tmp_path / "chat.jsonl", [f"question-{i}" for i in range(40)])
    ids = np.arange(10, 30, dtype=np.int32)
    file.append(Response("chat", line, 0, 1.0, 0, "stop", ids, ids + line) for line in range(1, 41))
    result = feature_precision.main(
        ["--prompts", str(prompts), "--responses", str(file.path), "--limit", "3", "--target",
         str(talker_folder), "--weights", "fp32", "--draft",
         str(write_draft(tmp_path / "draft", talker_folder))]
    )  # fmt: skip
    assert result["answers"] == 3 and abs(result["loss"]) < 0.05
    assert [own["bytes_per_token"] for own in result["kinds"].values()] == [192, 104]


def test_objective(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import objective

    # Each in a process of its own, for its peak of memory; here one of them shows that it works.
    apart = objective._in_own_process

    def run(name: str, arguments: list[str]) -> dict[str, float]:
        if name == "plain":
            return apart(name, arguments)
        own: dict[str, float] = objective.main([*arguments, "--version", name])
        return own

    monkeypatch.setattr(objective, "_in_own_process", run)
    result = objective.main(
        ["--anchors", "40", "--vocabulary", "600", "--draft-vocabulary", "200", "--hidden-size",
         "16", "--rank", "4", "--repeats", "1", "--threads", "1", "--dtype", "float32"]
    )  # fmt: skip
    assert {*result["versions"]} == {
        "plain", "plain-reduced", "ours float32", "ours-reduced float32"
    }  # fmt: skip
    assert result["versions"]["plain"]["share_of_plain_bytes"] == 1.0
    assert "x as fast as plain" in capsys.readouterr().out


def test_gpu_check_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    import gpu_check

    result = gpu_check.main(["--device", "cpu", "--tiny", "--dtype", "fp32", "--repeats", "1"])
    assert [row["draft_length"] for row in result["latency"]] == [2, 4]
    for row in result["latency"]:
        for name, form in product(("dspark", "dflash"), ("eager", "captured")):
            assert row[f"{name}_{form}_ms"] > row[f"{name}_{form}_draft_ms"] > 0
            assert row[f"{name}_same_tokens"] == 1.0 and 0 <= row[f"{name}_probs_apart"] < 1e-5
    assert [*result["steps_a_second"]] == [1, 4, 8] and result["skipped"] == []
    for row in result["steps_a_second"].values():
        assert row["eager"] > 0 and row["captured"] > 0
        assert row["same_tokens"] == 1.0 and row["logits_apart"] < 1e-4
    out = capsys.readouterr().out
    assert "DSpark costs more by" in out and "steps a second" in out
    assert "tokens drafted alike: DSpark 100.0%, DFlash 100.0%" in out
    assert result["captured_by"] == "recorder" and result["not_captured"] == []
    assert "captured by a recorder: its results count, its times do not" in out


def test_gpu_check_says_what_it_did_not_capture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu_check

    for module in (captured, captured_targets):
        monkeypatch.setattr(module, "MOST_KEYS", 1)
    result = gpu_check.main(["--device", "cpu", "--tiny", "--dtype", "fp32", "--repeats", "1"])
    assert result["not_captured"][:2] == [
        "dspark's backbone, 16 + 2 tokens", "dflash's backbone, 16 + 2 tokens"
    ]  # fmt: skip
    assert len(result["not_captured"]) == 8
    for row in result["steps_a_second"].values():
        assert "eager" in row and "captured" not in row
    assert "too much to copy: dflash's backbone, 40 + 4 tokens" in capsys.readouterr().out


def test_gpu_check_tells_a_captured_verification_from_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpu_check

    mask = padded_attention.padded_mask
    monkeypatch.setattr(
        padded_attention, "padded_mask", lambda positions, *rest: mask(positions - 1, *rest)
    )
    bench = gpu_check.Bench(gpu_check.TINY, "cpu", torch.float32)
    with pytest.raises(DSparkError, match="captured verification is not the eager one"):
        gpu_check.steps_a_second(bench, 1)


def test_gpu_check_tells_a_captured_draft_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check

    monkeypatch.setattr(captured, "race", lambda probs, noise: race(probs.sqrt(), noise))
    with pytest.raises(DSparkError, match="the captured draft is not the eager one"):
        gpu_check.main(["--device", "cpu", "--tiny", "--dtype", "fp32", "--repeats", "1"])


def test_gpu_check_skips_by_name_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check

    monkeypatch.setattr(gpu_check, "free_bytes", lambda device: 150_000)
    result = gpu_check.main(["--device", "cpu", "--tiny", "--dtype", "fp32", "--repeats", "1"])
    assert any(what.startswith("context 40: needs about") for what in result["skipped"])


def test_gpu_check_refuses_a_device_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device 'cuda' is not here: torch .* finds no CUDA"):
        gpu_check.main([])
