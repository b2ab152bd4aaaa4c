"""Which page holds the keys and values of which beginning of a prompt."""

import hashlib
from collections.abc import Sequence

import numpy as np


def page_digests(prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """One digest for every full page of a prompt; each covers all tokens up to its page's end and
    one more.

    One more, because a drafter may pair a position's features with the token after it: the context
    K/V of a page's last position belong to that token, too. So the last token of a prompt is never
    in a shared page, its logits are always computed, and no shared page is ever written to.
    """
    digests = []
    chain = hashlib.sha256()
    for start in range(0, len(prompt) - page_size, page_size):
        chain.update(np.array(prompt[start : start + page_size + 1], dtype=np.int64).tobytes())
        digests.append(chain.digest())
    return tuple(digests)


class PrefixIndex:
    """Digest -> page, for pages that prefill computed as positions of a prompt.

    A page is *exact* if every step that computed it and what came before it was row-exact. Requests
    whose tokens must not depend on the batch (law 5) use those only. Generated positions are never
    indexed: they may run on another, equally row-exact kernel than prompts do.
    """

    def __init__(self) -> None:
        self._pages: dict[tuple[bytes, bool], int] = {}
        self._keys: dict[int, tuple[bytes, bool]] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, digests: Sequence[bytes], *, exact: bool) -> tuple[list[int], bool]:
        """Pages of the longest known beginning, and whether all of them are exact."""
        pages: list[int] = []
        all_exact = True
        for digest in digests:
            page = self._pages.get((digest, True))
            if page is None and not exact:
                page = self._pages.get((digest, False))
                all_exact = all_exact and page is None
            if page is None:
                break
            pages.append(page)
        return pages, all_exact

    def add(self, digest: bytes, page: int, *, exact: bool) -> bool:
        """False if another page already serves for it."""
        if (digest, exact) in self._pages:
            return False
        assert page not in self._keys, "a page has one content"
        self._pages[digest, exact] = page
        self._keys[page] = (digest, exact)
        return True

    def forget(self, page: int) -> None:
        """The page is about to hold something else."""
        del self._pages[self._keys.pop(page)]
