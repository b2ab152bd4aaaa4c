"""OpenAI's own client against `dspark serve`: an answer, a stream, and what only dspark can do.

    dspark serve                                # in one terminal
    pip install openai
    python examples/openai_client.py            # in another

Set DSPARK_URL and DSPARK_API_KEY for a server elsewhere.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("DSPARK_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("DSPARK_API_KEY", "not checked"),
)
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three prime numbers."}],
    temperature=0,
    max_tokens=48,
)
print(answer.choices[0].message.content, answer.usage, sep="\n")

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=64,
    seed=7,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

# With a seed the text does not depend on speculation: `coupled` verification is the default there.
for speculation in ("auto", "off"):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Write one line about rain."}],
        max_tokens=32,
        seed=7,
        extra_body={"speculation": speculation},
    )
    print(f"speculation {speculation}: {answer.choices[0].message.content!r}")
