"""lm-eval, unchanged, scoring over HTTP: its log-likelihoods are the target's own."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent.parent
TASKS = ROOT / "benchmarks" / "lm_eval"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("lm_eval") is None, reason="no lm_eval on the PATH: pip install 'lm-eval[api]'"
    ),
]


def test_a_multiple_choice_task(server, tiny_llm, target_folder, tmp_path):
    arguments = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": target_folder,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_length": 256,
    }
    command = [
        "lm_eval", "--model", "local-completions", "--include_path", str(TASKS),
        "--tasks", "small_facts", "--batch_size", "2", "--log_samples",
        "--output_path", str(tmp_path / "out"),
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    # Its own packages: this process's import path is not for it.
    environment = {**os.environ, **offline}
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    [samples] = (tmp_path / "out").rglob("samples_small_facts*.jsonl")
    [report] = (tmp_path / "out").rglob("results*.json")
    model = AutoModelForCausalLM.from_pretrained(target_folder)
    right = []
    records = [json.loads(line) for line in samples.read_text().splitlines()]
    questions = (TASKS / "small_facts.jsonl").read_text().splitlines()
    assert len(records) == len(questions) == 10
    for record in records:
        found = [float(score[0]) for score in record["filtered_resps"]]
        asked = [(one["arg_0"], one["arg_1"]) for one in record["arguments"].values()]
        expected = [log_likelihood(model, tiny_llm.tokenizer, *one) for one in asked]
        assert found == pytest.approx(expected, abs=1e-3)
        right.append(max(range(4), key=expected.__getitem__) == record["doc"]["answer"])
    accuracy = json.loads(report.read_text())["results"]["small_facts"]["acc,none"]
    assert accuracy == pytest.approx(sum(right) / 10)
    server.wait_idle()


def log_likelihood(model, tokenizer, context: str, continuation: str) -> float:
    """By the target alone, in one forward of transformers' own model."""
    start = len(tokenizer(context)["input_ids"])
    tokens = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    with torch.no_grad():
        logprobs = model(tokens).logits[0].log_softmax(-1)
    return float(logprobs[start - 1 : -1].gather(1, tokens[0, start:, None]).sum())
