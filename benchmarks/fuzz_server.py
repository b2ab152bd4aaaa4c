"""Sends a running server bodies that are almost right, or not at all: none may give a 5xx or hang.

    dspark serve --target TINY &                # any target will do, a tiny one is quick
    python benchmarks/fuzz_server.py --url http://127.0.0.1:8000 --requests 10000

At the end every page must be free again. Seeded: `--seed` repeats a run. Exit code 1 for a failure,
whose body is printed.
"""

import argparse
import http.client
import json
import random
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
ALLOWED = {200, 400, 404, 413, 429}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 17, 2**31, 2**63, -(2**63), 10**40, 0.0, 0.5, -0.5, 1e-320,
    1e308, "", "a", "user", "\ud800", "\x00", "\u202e<|im_end|>", "{{7*7}}", "😀" * 50, "x" * 5000,
    [], {},
    [[]], [{}], {"": ""}, {"type": "text"}, {"type": "json_object"}, ["a", "b"], [5, 6, 7], [-1],
    [10**9], [10**40], [-(2**63)], 2.5e9, [[5], [6, 7]], {"5": 3.0}, {"x": 1}, {"max": 2},
    "off", "auto", "coupled", "rejection",
    {"include_usage": True}, {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(a+)+$"}}},
    [{"role": "user", "content": "Hi"}], [{"role": "system", "content": []}],
    [{"role": "tool", "content": "x", "tool_call_id": "y"}], [{"role": "user"}],
    [{"type": "function", "function": {"name": "f"}}],
]  # fmt: skip
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs",
    "top_logprobs", "stream", "stream_options", "response_format", "user", "speculation",
    "verification", "token_details", "tools", "tool_choice", "echo", "best_of", "suffix", "tokens",
    "add_special_tokens", "no_such_field",
]  # fmt: skip


def body(random_: random.Random) -> tuple[str, bytes]:
    """A path, and a body for it."""
    path = random_.choice(PATHS)
    fields: dict[str, Any] = {"max_tokens": random_.randint(1, 4)}
    if path == PATHS[0]:
        fields["messages"] = [{"role": "user", "content": "Hi"}]
    elif path == PATHS[3]:
        fields = {"tokens": [5, 6]}
    else:
        fields["prompt"] = "Hi"
    if path == PATHS[2]:
        del fields["max_tokens"]
    for _ in range(random_.choice([0, 1, 1, 1, 2, 3, 6])):
        fields[random_.choice(FIELDS)] = random_.choice(ODD)
    content = json.dumps(fields).encode()
    if random_.random() < 0.1:  # not even JSON
        cut = random_.randrange(len(content))
        content = content[:cut] + random_.randbytes(random_.randrange(4)) + content[cut + 1 :]
    return path, content


def send(connection: http.client.HTTPConnection, path: str, content: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def problem(status: int, answer: bytes) -> str | None:
    """What is wrong with an answer, if anything."""
    if status not in ALLOWED:
        return f"status {status}: {answer[:300]!r}"
    if status != 200 and not json.loads(answer)["error"]["message"]:
        return "an error without a message"
    if status == 200 and answer.startswith(b"data:") and not answer.endswith(b"data: [DONE]\n\n"):
        return "a stream without its end"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random_ = random.Random(arguments.seed)
    connection = http.client.HTTPConnection(urlsplit(arguments.url).netloc, timeout=120)
    seen: Counter[int] = Counter()
    for number in range(arguments.requests):
        path, content = body(random_)
        status, answer = send(connection, path, content)
        seen[status] += 1
        if (wrong := problem(status, answer)) is not None:
            print(f"request {number}, {path}: {wrong}\n{content!r}")
            return 1
    time.sleep(1.0)
    connection.request("GET", "/stats")
    engine = json.loads(connection.getresponse().read())["engine"]
    used = engine["pages"] - engine["pages_free"]
    print(f"{arguments.requests} requests: {dict(sorted(seen.items()))}; {used} pages in use")
    return 1 if used else 0


if __name__ == "__main__":
    sys.exit(main())
