"""Responses of the target, kept as token ids: append-only, resumable, small.

A file is jsonl. Its first line says what wrote it; every further line is one response:

    {"file": "gsm8k", "line": 12, "sample": 0, "temperature": 1.0, "seed": 77, "finish": "stop",
     "prompt": "<ids>", "response": "<ids>", "crc": 123}

where <ids> is base64(zlib(little-endian uint16, or uint32 when the vocabulary needs it)). About
half a kilobyte a response. A process killed in the middle of a write leaves a torn last line: it is
dropped when the file is opened again. Anything else that is wrong is an error with the file and
line.
"""

import base64
import binascii
import contextlib
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.core.errors import DataError, DSparkError
from dspark.data.template import TokenIds, supervised_tokens

FORMAT = "dspark-responses/1"

ResponseKey = tuple[str, int, int]
"""(prompt file stem, 1-based line, sample)."""


@dataclass(frozen=True, eq=False, slots=True)
class Response:
    file: str
    line: int
    sample: int
    temperature: float
    seed: int
    finish_reason: str
    """"stop" (its last token is the end-of-turn token) or "length"."""
    prompt_ids: TokenIds
    response_ids: TokenIds

    @property
    def key(self) -> ResponseKey:
        return self.file, self.line, self.sample

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and response [T]."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def supervised(self) -> np.ndarray:
        """bool [T]: the response's tokens."""
        prompt, total = len(self.prompt_ids), len(self.prompt_ids) + len(self.response_ids)
        return supervised_tokens(total, [(prompt, total)])


class ResponseFile:
    """One file of responses, open for reading and appending by one process."""

    def __init__(
        self, path: Path | str, *, target: str, template_hash: str | None, vocab_size: int
    ) -> None:
        """Opens or creates `path`. DataError if another target, template or vocabulary wrote it."""
        self.path = Path(path)
        self.header = {
            "format": FORMAT, "target": target, "template": template_hash, "vocab_size": vocab_size,
        }  # fmt: skip
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self.responses: list[Response] = []
        self._done: set[ResponseKey] = set()
        if self.path.exists():
            self._load()
        if not self.path.exists() or self.path.stat().st_size == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write([json.dumps(self.header)])

    def __contains__(self, key: ResponseKey) -> bool:
        return key in self._done

    def __len__(self) -> int:
        return len(self.responses)

    def append(self, responses: Iterable[Response]) -> int:
        """Adds the responses whose key is not there yet, durably; how many were added."""
        fresh: dict[ResponseKey, Response] = {}
        for response in responses:
            if response.key not in self._done:
                fresh.setdefault(response.key, response)
        self._write([self._encode(response) for response in fresh.values()])
        self._done |= fresh.keys()
        self.responses += fresh.values()
        return len(fresh)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write("".join(line + "\n" for line in lines).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            # A full disk takes the first lines only: none of them counts, all that stood before do.
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise DSparkError(
                f"{self.path}: {error.strerror}; the {len(self.responses)} responses written "
                f"before are whole: make room, then run the same command again"
            ) from error

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            where = f"{self.path}, line {number}"
            try:
                record = json.loads(line)
                if number > 1:
                    response = self._decode(record)
            except (ValueError, KeyError, TypeError, binascii.Error, zlib.error) as error:
                raise DataError(f"{where}: not a response ({error}); delete the line") from None
            if number == 1:
                self._check_header(record)
            elif response.key in self._done:
                raise DataError(f"{where}: {response.key} is there twice; delete one line")
            else:
                self._done.add(response.key)
                self.responses.append(response)
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))

    def _check_header(self, header: Any) -> None:
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise DataError(f"{self.path} is not a response file ({FORMAT})")
        for key, ours in self.header.items():
            if header.get(key) != ours:
                raise DataError(
                    f"{self.path} was written with {key} {header.get(key)}, not {ours}; "
                    f"use another file"
                )

    def _encode(self, response: Response) -> str:
        prompt, answer = self._pack(response.prompt_ids), self._pack(response.response_ids)
        record = {
            "file": response.file, "line": response.line, "sample": response.sample,
            "temperature": response.temperature, "seed": response.seed,
            "finish": response.finish_reason, "prompt": prompt, "response": answer,
            "crc": zlib.crc32(f"{prompt} {answer}".encode()),
        }  # fmt: skip
        return json.dumps(record, separators=(",", ":"))

    def _decode(self, record: dict[str, Any]) -> Response:
        if zlib.crc32(f"{record['prompt']} {record['response']}".encode()) != record["crc"]:
            raise ValueError("the checksum does not match")
        return Response(
            file=record["file"],
            line=record["line"],
            sample=record["sample"],
            temperature=record["temperature"],
            seed=record["seed"],
            finish_reason=record["finish"],
            prompt_ids=self._unpack(record["prompt"]),
            response_ids=self._unpack(record["response"]),
        )

    def _pack(self, ids: TokenIds) -> str:
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.header["vocab_size"]):
            raise DataError(f"token ids must be in [0, {self.header['vocab_size']})")
        return base64.b64encode(zlib.compress(ids.astype(self._dtype).tobytes(), 9)).decode()

    def _unpack(self, text: str) -> TokenIds:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
        return np.frombuffer(raw, dtype=self._dtype).astype(np.int32)
