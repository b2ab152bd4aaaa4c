"""Guided decoding through llguidance: a JSON schema, a regular expression or a Lark grammar.

Compiling is bounded by the library's own fuel and sizes, and runs in the thread of whoever submits
the request, without Python's lock; so does following a text, whose steps are bounded as well.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import ConfigError, DSparkError, MissingExtraError
from dspark.core.guided import Guided

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_grammar_size": 100_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""About 20 ms to build a lexer and 15 ms a step (llguidance's own figures), and some 100 MB."""

_KEPT = 32
"""Compiled grammars kept for the next request with the same one, and for other choices."""


class GrammarCompiler:
    """Compiles for one tokenizer, which takes a second to prepare, on first use."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._prepared: Any = None
        self._compiled: OrderedDict[Guided, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, guided: Guided) -> "LlguidanceGrammar":
        """Raises ConfigError for what the library does not take, MissingExtraError without it."""
        with self._lock:
            compiled = self._compiled.get(guided)
        if compiled is None:
            compiled = self._build(guided)
        with self._lock:
            self._compiled[guided] = compiled
            self._compiled.move_to_end(guided)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return LlguidanceGrammar(compiled.deep_copy(), self._vocab_size)

    def _build(self, guided: Guided) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise MissingExtraError("llguidance", "guided") from error
        builders: dict[str, Any] = {
            "json_schema": llguidance.LLMatcher.grammar_from_json_schema,
            "regex": llguidance.LLMatcher.grammar_from_regex,
            "grammar": llguidance.LLMatcher.grammar_from_lark,
        }
        matcher = llguidance.LLMatcher(
            self._for_tokenizer(),
            builders[guided.kind](guided.text),
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )
        if matcher.is_error():
            raise ConfigError(f"{guided.kind} cannot be used: {_one_line(matcher.get_error())}")
        return matcher

    def _for_tokenizer(self) -> Any:
        with self._lock:
            if self._prepared is None:
                from llguidance import hf

                try:
                    self._prepared = hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos or None
                    )
                except Exception as error:  # whatever it says of a tokenizer it does not know
                    reason = _one_line(str(error))
                    raise ConfigError(
                        f"guided decoding does not work with this tokenizer: {reason}"
                    ) from error
            return self._prepared


class LlguidanceGrammar:
    """`nn.logit_transforms.Grammar`: the matcher walks along a draft and back."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ahead: list[int] = []
        """Drafted tokens that the matcher has taken in beyond the text."""
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        """Of this round: the verifier asks again for what the drafter asked."""

    def allowed(self, drafted: tuple[int, ...]) -> Tensor | None:
        if drafted not in self._masks:
            self._masks[drafted] = self._mask() if self._walk_to(drafted) else None
        return self._masks[drafted]

    def commit(self, tokens: Sequence[int]) -> None:
        if not self._walk_to(tokens):
            raise DSparkError("guided decoding lost its place: a token that it forbids came out")
        self._ahead.clear()
        self._masks.clear()

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask_V = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        return torch.from_numpy(np.pad(mask_V, (0, self._vocab_size - len(mask_V))))

    def _walk_to(self, drafted: Sequence[int]) -> bool:
        """Moves the matcher behind `drafted`; False, and as far as it goes, if one is forbidden."""
        shared = 0
        for one, other in zip(self._ahead, drafted, strict=False):
            if one != other:
                break
            shared += 1
        if back := len(self._ahead) - shared:
            self._matcher.rollback(back)
            del self._ahead[shared:]
        for token in drafted[shared:]:
            if self._matcher.validate_tokens([token]) != 1:
                return False
            self._matcher.consume_token(token)
            self._check()
            self._ahead.append(token)
        return True

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error())
            raise ConfigError(f"guided decoding failed: {reason}; ask for something simpler")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
