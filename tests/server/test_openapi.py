"""The server's own description of its API, and schemathesis on it."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
KEY = "a-key-for-tests"


@pytest.fixture
def fuzz_openapi(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import fuzz_openapi

    yield fuzz_openapi
    sys.modules.pop("fuzz_openapi")


def test_the_description_knows_this_server(server):
    document = server.http.get("/openapi.json").json()
    bodies = document["components"]["schemas"]
    completion = bodies["CompletionBody"]
    assert completion["additionalProperties"] is False
    assert completion["properties"]["model"]["anyOf"][0]["enum"] == ["tiny"]
    assert completion["properties"]["max_tokens"]["anyOf"][0]["maximum"] == 256
    assert completion["properties"]["top_p"]["anyOf"][0]["maximum"] == 1
    assert completion["properties"]["logprobs"]["anyOf"][0]["minimum"] == 0
    tokens = bodies["DetokenizeBody"]["properties"]["tokens"]["items"]
    assert tokens["maximum"] == server.serving.last_token
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["responses"].keys() >= {"200", "4XX", "5XX"}, path
            assert "422" not in operation["responses"]
            assert "security" not in operation, "this server has no keys"


@pytest.mark.slow
def test_schemathesis(make_server, tmp_path, fuzz_openapi):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    server = make_server(api_keys=keys, default_tokens=8)
    command = fuzz_openapi.command(server.url, examples=5, seed=0, key=KEY)
    # In a folder of its own: schemathesis reads settings of the one it runs in.
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "Tested: 11" in result.stdout
    assert fuzz_openapi.pages_used(server.url, KEY) == 0
    assert server.metric("dspark_requests_finished_total") > 10, "it asked for nothing"
    server.wait_idle()
