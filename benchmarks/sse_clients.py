"""HTTP clients in a process of their own: `server_overhead.py` starts it.

Every line of standard input, "PORT STREAMS TOKENS", opens so many streamed chat completions at
once; the seconds until the last one has ended are printed.
"""

import asyncio
import json
import sys
import time

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a function that reverses a list.",
    "What is 17 times 6? Think step by step.",
    "Describe the sea to someone who has never seen it.",
]


def messages(stream: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": PROMPTS[stream % len(PROMPTS)]}]


async def read_stream(port: int, stream: int, tokens: int) -> None:
    body = json.dumps(
        {
            "messages": messages(stream),
            "max_tokens": tokens,
            "seed": stream,
            "stream": True,
            "ignore_eos": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    answer = await reader.read()
    writer.close()
    if b"data: [DONE]" not in answer or b'"finish_reason":"length"' not in answer:
        raise SystemExit(f"not a whole answer: {answer[-500:]!r}")


async def read_all(port: int, streams: int, tokens: int) -> None:
    await asyncio.gather(*(read_stream(port, stream, tokens) for stream in range(streams)))


if __name__ == "__main__":
    for line in sys.stdin:
        started = time.perf_counter()
        asyncio.run(read_all(*map(int, line.split())))
        print(time.perf_counter() - started, flush=True)
