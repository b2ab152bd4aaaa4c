"""Responses of the target, kept as token ids: append-only, resumable, small.

A file is jsonl. Its first line says what wrote it; every further line is one response:

    {"file": "gsm8k", "line": 12, "sample": 0, "temperature": 1.0, "seed": 77, "finish": "stop",
     "prompt": "<ids>", "response": "<ids>", "crc": 123}

where <ids> is base64(zlib(little-endian uint16, or uint32 when the vocabulary needs it)), and later
turns of a conversation have a "turn", counted from 0. About half a kilobyte a response. A process
killed in the middle of a write leaves a torn last line: it is dropped when the file is opened
again. A file without a response, which a run that failed early leaves, belongs to nobody yet.
Anything else that is wrong is an error with the file and line.
"""

import base64
import binascii
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.core.errors import DataError
from dspark.data.lines import append_lines, cut_torn_line, whole_lines
from dspark.data.template import TokenIds, supervised_tokens

FORMAT = "dspark-responses/1"

ResponseKey = tuple[str, int, int, int]
"""(prompt file stem, 1-based line, sample, turn)."""


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
    turn: int = 0
    """Which of the conversation's answers this is; the prompt holds those before."""

    @property
    def key(self) -> ResponseKey:
        return self.file, self.line, self.sample, self.turn

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
        self,
        path: Path | str,
        *,
        target: str,
        template_hash: str | None,
        vocab_size: int,
        thinking: bool | None = None,
        read_only: bool = False,
    ) -> None:
        """Opens or creates `path`. DataError if it has responses that another target, template or
        vocabulary wrote, or the same one with another choice of `thinking`.

        read_only: the file is not touched, and another process may be writing it."""
        self.path = Path(path)
        self.read_only = read_only
        self.header = {
            "format": FORMAT, "target": target, "template": template_hash, "vocab_size": vocab_size,
            "thinking": thinking,
        }  # fmt: skip
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._by_key: dict[ResponseKey, Response] = {}
        if self.path.exists():
            self._load()
        if not read_only and (not self.path.exists() or self.path.stat().st_size == 0):
            self._write([json.dumps(self.header)])

    @property
    def responses(self) -> list[Response]:
        """In the order in which they were written."""
        return [*self._by_key.values()]

    def __getitem__(self, key: ResponseKey) -> Response:
        return self._by_key[key]

    def __contains__(self, key: ResponseKey) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def append(self, responses: Iterable[Response]) -> int:
        """Adds the responses whose key is not there yet, durably; how many were added."""
        fresh: dict[ResponseKey, Response] = {}
        for response in responses:
            if response.key not in self._by_key:
                fresh.setdefault(response.key, response)
        self._write([self._encode(response) for response in fresh.values()])
        self._by_key |= fresh
        return len(fresh)

    def _write(self, lines: list[str]) -> None:
        assert not self.read_only
        append_lines(self.path, lines, before=f"{len(self)} responses")

    def _load(self) -> None:
        try:
            lines = whole_lines(self.path, begin=b'{"format": "dspark-')
        except DataError:
            raise DataError(f"{self.path} is not a response file ({FORMAT})") from None
        header: dict[str, Any] = {}
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}, line {number}"
            try:
                record = json.loads(line)
                if number == 2:
                    self._check_header(header)
                if number > 1:
                    response = self._decode(record)
            except (ValueError, KeyError, TypeError, binascii.Error, zlib.error) as error:
                raise DataError(f"{where}: not a response ({error}); delete the line") from None
            if number == 1:
                if not isinstance(record, dict) or record.get("format") != FORMAT:
                    raise DataError(f"{self.path} is not a response file ({FORMAT})")
                header = record
            elif response.key in self._by_key:
                raise DataError(f"{where}: {response.key} is there twice; delete one line")
            else:
                self._by_key[response.key] = response
        if not self._by_key and not self.read_only:
            os.truncate(self.path, 0)  # nobody's yet, whatever its header says
        elif not self.read_only:
            cut_torn_line(self.path)

    def _check_header(self, header: dict[str, Any]) -> None:
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
            **({"turn": response.turn} if response.turn else {}),
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
            turn=record.get("turn", 0),
        )

    def _pack(self, ids: TokenIds) -> str:
        ids = np.asarray(ids)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.header["vocab_size"]):
            raise DataError(f"token ids must be in [0, {self.header['vocab_size']})")
        return base64.b64encode(zlib.compress(ids.astype(self._dtype).tobytes(), 9)).decode()

    def _unpack(self, text: str) -> TokenIds:
        raw = zlib.decompress(base64.b64decode(text, validate=True))
        return np.frombuffer(raw, dtype=self._dtype).astype(np.int32)
