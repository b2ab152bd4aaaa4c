"""benchmarks/throughput.py, with stand-ins for the engines that are not installed in tests."""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dspark.core.errors import ConfigError, DSparkError
from dspark.core.sampling import SamplingParams
from dspark.recipes.prompt_sets import Job
from tests.recipes.tiny import write_all, write_prompts

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
JOBS = [
    Job("gsm8k", n, 0, (5, 6, n), SamplingParams(max_new_tokens=9, ignore_eos=True))
    for n in range(4)
]
VLLM = """
from types import SimpleNamespace as N
class LLM:
    def __init__(self, model, **options):
        print("vLLM talks on standard output")
        assert options["max_num_seqs"] == 2 and options["dtype"] == "float32", options
    def generate(self, prompts, params, use_tqdm):
        assert len(prompts) <= 4
        text = N(outputs=[N(token_ids=[0] * params.max_tokens)])
        return [text for _ in prompts]
SamplingParams = TokensPrompt = N
"""


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("throughput", "common"):
        sys.modules.pop(name, None)


def test_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import throughput

    write_all(tmp_path)
    write_prompts(tmp_path / "gsm8k.jsonl", [f"question {i}" for i in range(40)])
    result = throughput.main(
        ["--files", str(tmp_path / "gsm8k.jsonl"), "--target", str(tmp_path / "target"),
         "--draft", str(tmp_path / "draft"), "--weights", "fp32", "--max-new-tokens", "4",
         "--concurrency", "2", "--concurrency", "3", "--repeats", "1", "--no-llama-cpp"]
    )  # fmt: skip
    assert {*result["tokens_per_second"]} == {2, 3}
    assert {*result["ratios"]} == {"fixed:3 / off"}
    assert "fixed:3 / off:" in capsys.readouterr().out


def test_bad_options() -> None:
    import throughput

    with pytest.raises(ConfigError, match="--vllm needs --vllm-model"):
        throughput.main(["--vllm", "python"])
    with pytest.raises(ConfigError, match="reads only GGUF files"):
        throughput.main(["--target", "folder"])


def test_llama_cpp_gets_the_same_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    import throughput

    seen: list[dict[str, Any]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"tokens_predicted": body["n_predict"]}).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        module = ModuleType("xllamacpp")
        params = SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        )
        address = f"http://127.0.0.1:{http.server_port}"
        module.CommonParams = lambda: params  # type: ignore[attr-defined]
        module.Server = lambda params: SimpleNamespace(  # type: ignore[attr-defined]
            listening_address=address
        )
        monkeypatch.setitem(sys.modules, "xllamacpp", module)
        with throughput.llama_cpp(Path("x.gguf"), 100, 8, threads=1) as run:
            assert run(JOBS, 2) > 0
        http.shutdown()
    assert params.n_ctx == 800 and params.n_parallel == 8
    assert sorted(body["prompt"] for body in seen) == [[5, 6, n] for n in range(4)]
    assert all(body["ignore_eos"] and body["temperature"] == 1.0 for body in seen)


def test_vllm_runs_in_its_own_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import throughput

    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = Path(sys.executable)
    with throughput.vllm(python, Path("model"), 100, 2, 1, ["--dtype", "float32"]) as run:
        assert run(JOBS, 2) > 0 and run(JOBS, 1) > 0
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')")
    with (
        pytest.raises(DSparkError, match="vLLM stopped"),
        throughput.vllm(python, Path("model"), 100, 2, 1, []),
    ):
        pass
