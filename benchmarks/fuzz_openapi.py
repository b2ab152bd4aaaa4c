"""Runs schemathesis, unchanged, on a running server's own OpenAPI description.

    dspark serve --target TINY &
    python benchmarks/fuzz_openapi.py --url http://127.0.0.1:8000 --examples 500

Bodies are made from the description, right ones and wrong ones. No answer may be a 5xx, take more
than a minute, differ from the description, or accept what the description forbids. At the end every
page must be free again. Seeded. Exit code 1 for a failure; schemathesis prints how to repeat it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence

# Some rules cannot be told in JSON schema (stream_options needs stream; prompts must fit the
# context), so a body that fits the description may still be refused.
_EXCLUDED = "positive_data_acceptance"


def command(url: str, *, examples: int, seed: int, key: str | None = None) -> list[str]:
    own = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json",
        "--phases", "coverage,fuzzing", "--max-examples", str(examples), "--seed", str(seed),
        "--exclude-checks", _EXCLUDED, "--request-timeout", "60", "--continue-on-failure",
        "--generation-database", "none", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    return own if key is None else [*own, "--header", f"Authorization: Bearer {key}"]


def pages_used(url: str, key: str | None = None) -> int:
    """Once nothing runs."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for _ in range(100):
        with urllib.request.urlopen(urllib.request.Request(f"{url}/stats", headers=headers)) as one:
            engine = json.load(one)["engine"]
        if engine["running"] == engine["waiting"] == 0:
            break
        time.sleep(0.1)
    used: int = engine["pages"] - engine["pages_free"]
    return used


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default=None)
    parser.add_argument("--examples", type=int, default=200, help="an operation and phase")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    run = command(given.url, examples=given.examples, seed=given.seed, key=given.key)
    with tempfile.TemporaryDirectory() as folder:  # schemathesis keeps notes where it runs
        failed = subprocess.run(run, cwd=folder, check=False).returncode
    used = pages_used(given.url, given.key)
    print(f"schemathesis exit code {failed}; {used} pages in use")
    return 1 if failed or used else 0


if __name__ == "__main__":
    sys.exit(main())
