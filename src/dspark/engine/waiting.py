"""Requests that wait for a place: priorities first, then fairness among owners."""

import heapq
from collections.abc import Container, Iterator

from dspark.engine.request import RequestState

Line = tuple[int, str]
"""Priority and owner."""


class WaitingRequests:
    """The highest priority goes first; within it the owner who was served least; of one owner the
    request that came first, one that was preempted included.

    Service is counted in tokens (`charge`). An owner who was away starts level with whoever is
    served now: nobody saves up service by staying idle.
    """

    def __init__(self) -> None:
        self.count = 0
        self.tokens = 0
        """Prompt and most new tokens of all that wait."""
        self._lines: dict[Line, list[tuple[int, RequestState]]] = {}
        self._served: dict[str, float] = {}  # above `_level` only
        self._level = 0.0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[RequestState]:
        return (state for line in self._lines.values() for _, state in line)

    def push(self, state: RequestState) -> None:
        line = (state.request.priority, state.request.owner)
        heapq.heappush(self._lines.setdefault(line, []), (state.request.id, state))
        self.count += 1
        self.tokens += state.request.most_tokens

    def first(self, passed: Container[Line] = ()) -> tuple[Line, RequestState] | None:
        """Who is next, `passed` lines left out."""
        lines = [line for line in self._lines if line not in passed]
        if not lines:
            return None
        best = min(lines, key=lambda li: (-li[0], self._served_of(li[1]), self._lines[li][0][0]))
        return best, self._lines[best][0][1]

    def pop(self, line: Line) -> RequestState:
        self._level = max(self._level, self._served_of(line[1]))
        self._served = {who: count for who, count in self._served.items() if count > self._level}
        _, state = heapq.heappop(self._lines[line])
        if not self._lines[line]:
            del self._lines[line]
        self.count -= 1
        self.tokens -= state.request.most_tokens
        return state

    def charge(self, owner: str, tokens: int) -> None:
        """Counts tokens that were computed for an owner."""
        self._served[owner] = self._served_of(owner) + tokens

    def remove(self, ids: Container[int] | None = None) -> list[RequestState]:
        """Takes requests out, all of them by default, and returns them."""
        gone = [state for state in self if ids is None or state.request.id in ids]
        kept = [state for state in self if ids is not None and state.request.id not in ids]
        self._lines, self.count, self.tokens = {}, 0, 0
        for state in kept:
            self.push(state)
        return gone

    def _served_of(self, owner: str) -> float:
        return self._served.get(owner, self._level)
