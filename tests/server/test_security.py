"""What someone may send who means harm."""

import json
import threading

import pytest

from tests.server.conftest import wait_until
from tests.server.raw import connect, read_all

USER = [{"role": "user", "content": "Hello"}]


def raw(server, request):
    """The whole answer to bytes that no client library would send."""
    with connect(server) as connection:
        connection.sendall(request)
        return read_all(connection)


def get(path, *headers):
    lines = [b"GET " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers]
    return b"\r\n".join([*lines, b"", b""])


@pytest.mark.parametrize(
    "path",
    [
        b"/../../../../etc/passwd",
        b"//etc/passwd",
        b"/style.css/../../app.py",
        b"/%2e%2e/%2e%2e/etc/passwd",
        b"/..%5c..%5capp.py",
        b"/..%252f..%252fapp.py",
        b"/style.css%00.js",
        b"/v1/models/../../../etc/passwd",
        b"/v1/../v1/models",
        b"/page/index.html",
        b"/index.html",
        b"http://evil.example/style.css/x",
    ],
)
def test_no_path_leads_to_a_file_that_is_not_served(server, path):
    answer = raw(server, get(path))
    assert answer.split(b" ")[1] in (b"400", b"404"), answer[:200]
    assert b"root:" not in answer and b"FastAPI" not in answer and b"import " not in answer


@pytest.mark.parametrize("path", [b"/V1/MODELS", b"//v1/models", b"/v1//models", b"/v1%2fmodels"])
def test_no_spelling_of_a_path_gets_around_the_keys(make_server, tmp_path, path):
    (tmp_path / "keys").write_text("a-key-for-tests")
    server = make_server(api_keys=tmp_path / "keys")
    answer = raw(server, get(path))
    assert answer.split(b" ")[1] in (b"401", b"404"), answer[:200]
    assert b"max_model_len" not in answer


def test_nothing_from_outside_becomes_a_header_or_a_line_of_the_log(server, caplog):
    from dspark.server.logs import JsonLines

    caplog.set_level("INFO")
    evil = b"x%0d%0aSet-Cookie:%20stolen=1%0d%0a%0d%0a<script>"
    answers = [
        raw(server, get(b"/v1/models/" + evil)),
        raw(server, get(b"/" + evil)),
        raw(server, get(b"/version?a=" + evil)),
        raw(server, get(b"/version", b"X-Request-Id: a\tb", b"X-Request-Id: c%0d%0aSet-Cookie: d")),
        raw(server, get(b"/version", b"X-Request-Id: a\r\n Set-Cookie: b=c")),
    ]
    for answer in answers:
        head = answer.split(b"\r\n\r\n")[0].lower()
        assert b"set-cookie" not in head and b"stolen" not in head, head
        assert b"text/html" not in head, "a browser must not read what was sent as a page"
    for record in caplog.records:
        line = JsonLines().format(record)
        assert "\n" not in line and json.loads(line)


@pytest.mark.parametrize(
    "headers",
    [
        (b"Content-Length: 2", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 2", b"Content-Length: 5"),
        (b"Content-Length: -1",),
        (b"Content-Length: 99999999999999999999999999",),
        (b"Transfer-Encoding: chunked, identity",),
        (b"Content Length: 2",),
    ],
)
def test_ambiguous_lengths_are_refused(server, headers):
    """Two readers of one connection must not see two different requests."""
    lines = [b"POST /tokenize HTTP/1.1", b"Host: x", *headers]
    smuggled = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = raw(server, b"\r\n".join([*lines, b"", b"{}"]) + smuggled)
    assert answer.split(b" ")[1] in (b"400", b"413"), answer[:300]
    assert answer.count(b"HTTP/1.1") == 1 and b"0.1.0" not in answer


def nested(depth, opening, closing, inside="1"):
    return opening * depth + inside + closing * depth


@pytest.mark.parametrize(
    "value",
    [
        nested(100_000, "[", "]"),
        nested(100_000, '{"a":', "}"),
        nested(900, "[", "]"),
        nested(900, '{"a":', "}"),
        "[" + ",".join(["[]"] * 200_000) + "]",
        "{" + ",".join(f'"{i}":0' for i in range(60_000)) + "}",
        '"' + "\\u0000" * 100_000 + '"',
        "1e99999",
        "-" + "9" * 4000,
    ],
)
@pytest.mark.parametrize("field", ["messages", "metadata", "stop", "logit_bias", "tools"])
def test_json_that_is_deep_or_wide(server, field, value):
    body = '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "%s": %s}'
    answer = server.http.post(
        "/v1/chat/completions",
        content=(body % (field, value)).encode(),
        headers={"content-type": "application/json"},
    )
    if field == "stop" and value.startswith('"'):
        assert answer.status_code == 200  # a long one, and no more
        return
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message and len(message) < 5000, "an error does not send back what was sent"


DEEP: dict = {"type": "integer"}
for _ in range(80):
    DEEP = {"anyOf": [DEEP, {"type": "array", "items": DEEP}]} if _ % 8 == 0 else {"allOf": [DEEP]}

BOMBS = {
    "repeats": {"type": "string", "pattern": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"},
    "alternatives": {"type": "string", "pattern": f"({'|'.join('a' * i for i in range(600))})*"},
    "ambiguous": {"type": "string", "pattern": "(a|a|aa|a*)*" * 200},
    "lookahead": {"type": "string", "pattern": "(?=a)(?!b)(\\1)+"},
    "unicode classes": {"type": "string", "pattern": "(\\p{L}|\\p{N}){1,5000}"},
    "a large enum": {"enum": [f"value {i}" for i in range(15_000)]},
    "long strings": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "long lists": {"type": "array", "minItems": 10**9, "items": {"type": "string"}},
    "large numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    "fine multiples": {"type": "number", "multipleOf": 1e-300},
    "a circle": {"$ref": "#"},
    "circles": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "from elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "deep": DEEP,
    "many properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(3000)},
        "required": [f"p{i}" for i in range(3000)],
    },
    "doubling": {
        "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
        | {"a40": {"type": "string"}},
        "$ref": "#/$defs/a0",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_grammar_bombs(server, name):
    """Taken or refused within a bound (llguidance's fuel), others being served meanwhile."""
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": BOMBS[name]}}
    result = {}

    def ask():
        result["answer"] = server.chat(response_format=asked, ignore_eos=False, max_tokens=2)

    asker = threading.Thread(target=ask)
    asker.start()
    assert server.chat(max_tokens=2).status_code == 200
    asker.join(timeout=60)
    assert not asker.is_alive(), "it hangs"
    answer = result["answer"]
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"] == "response_format" and len(error["message"]) < 1000
    assert "root:" not in answer.text
    server.wait_idle()


@pytest.mark.parametrize("role", ["{{7*7}}", "system ", "SYSTEM", "user><system", "", "\u200buser"])
def test_roles_are_a_closed_list(server, role):
    answer = server.chat(messages=[{"role": role, "content": "x"}])
    assert answer.status_code == 400 and "role" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    ["{{7*7}}", "{% for a in range(10**9) %}x{% endfor %}", "{{ messages.__class__ }}", "{#", "%}"],
)
def test_what_users_write_is_no_template(server, text):
    messages = [{"role": "user", "content": text, "name": text[:60]}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    written = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert written == f"<user>{text}<assistant>"


@pytest.mark.parametrize(
    "text",
    [
        "\u202eevil\u202c",
        "e\u0301" * 50,
        "\u0000\u0001\u001b[2J",
        "\ufeffBOM",
        "👩‍👩‍👧‍👦" * 5,
        "\U0010ffff\ufdd0",
        "\uff41\uff44\uff4d\uff49\uff4e",
    ],
)
def test_unicode_goes_through_unchanged(server, text):
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"] == text
    answer = server.post("/v1/completions", {"prompt": text, "max_tokens": 1, "echo": True})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].startswith(text)


def test_look_alikes_are_others(make_server, tmp_path):
    (tmp_path / "keys").write_text("a-key-for-tests")
    server = make_server(api_keys=tmp_path / "keys")
    good = {"Authorization": "Bearer a-key-for-tests"}
    for name in ("t\u0456ny", "tiny\u200b", "TINY", "tiny\x00", " tiny"):
        body = {"prompt": "a", "model": name}
        assert server.post("/v1/completions", body, **good).status_code == 404, name
    for key in ("a-key-for-test\u0455", "a-key-for-tests\u00a0", "\uff41-key-for-tests"):
        head = get(b"/v1/models", f"Authorization: Bearer {key}".encode())
        assert raw(server, head).split(b" ")[1] == b"401", key


def test_bodies_that_are_not_utf_8(server):
    for content in (b'{"prompt": "\xc0\xaf"}', b'{"prompt": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}"):
        answer = server.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    wide = json.dumps({"prompt": "Hi", "max_tokens": 1}).encode("utf-16")
    answer = server.http.post(
        "/v1/completions", content=wide, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400)  # Python's JSON reads it
    wait_until(lambda: server.serving.engine.open_choices == 0)
