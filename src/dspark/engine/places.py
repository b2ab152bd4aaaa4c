"""Who runs and who waits: admission, pages for the coming step, preemption."""

from collections.abc import Container, Sequence

from dspark.core.errors import OverloadedError
from dspark.engine.config import EngineConfig
from dspark.engine.memory import KVMemory
from dspark.engine.request import Request, RequestState
from dspark.engine.waiting import Line, WaitingRequests
from dspark.nn.attention_plan import FUSED_TILE


class Places:
    """Everything here happens before a step drafts, and knows nothing of drafts (law 2)."""

    def __init__(self, config: EngineConfig, memory: KVMemory, block_size: int) -> None:
        """block_size: the most draft tokens of a round; 0 without a drafter."""
        self.config = config
        self.memory = memory
        self.block_size = block_size
        self.waiting = WaitingRequests()
        self.running: list[RequestState] = []
        self.starting: RequestState | None = None
        """The waiting request that `prepare_step` is giving a place."""
        self.preemptions = 0
        self.refused = 0

    def check_load(self, requests: Sequence[Request]) -> None:
        """Raises OverloadedError if something waits already and these would be too much; nothing
        is too much for an engine where nothing waits. May run in any thread."""
        places = self.config.max_requests - len(self.running)
        most, most_tokens = self.config.max_waiting, self.config.max_waiting_tokens
        count, tokens = self.waiting.count, self.waiting.tokens
        message = None
        if most is not None and count + len(requests) > most + places:
            message = f"{count} requests are waiting, the limit is {most}"
        more = sum(request.most_tokens for request in requests)
        if most_tokens is not None and tokens + more > most_tokens:
            message = (
                f"waiting requests have {tokens} tokens and this one {more}, the limit is "
                f"{most_tokens} together"
            )
        if count and message is not None:
            self.refused += 1
            raise OverloadedError(f"{message}; try again later")

    def prepare_step(self) -> None:
        """Decides who takes part in the next step; each has pages for all it may write."""
        self._make_room()
        self._admit()
        # Equal tiles together, in memory order: neighbours at a constant stride share a call.
        self.running.sort(key=lambda s: (s.cached // FUSED_TILE, s.table.pages[0]))

    def retire(self, state: RequestState) -> None:
        """Ends a running request and frees its pages."""
        self.running.remove(state)
        self.memory.release(state)

    def preempt(self, state: RequestState) -> None:
        """Back to the queue; its text, its seed and its round number are all that it needs."""
        self.retire(state)
        self.waiting.push(state)
        self.preemptions += 1

    def remove(self, ids: Container[int] | None = None) -> list[RequestState]:
        """Ends requests wherever they are, all of them by default, and returns them."""
        gone = self.waiting.remove(ids)
        for state in [s for s in self.running if ids is None or s.request.id in ids]:
            self.retire(state)
            gone.append(state)
        return gone

    def drop_starting(self) -> RequestState | None:
        """Ends the request whose start raised, if one did, and returns it."""
        state, self.starting = self.starting, None
        if state is None:
            return None
        self.remove({state.request.id})
        self.memory.release(state)
        return state

    def _make_room(self) -> None:
        """Pages for whole blocks: whoever gives way does so whatever would have been drafted."""
        for state in sorted(self.running, key=lambda state: state.rank):
            chunk = len(state.chunk(self.config.chunk_tokens)) if state.prefilling else 0
            end = state.cached + chunk if chunk else state.reach(state.cached, self.block_size)
            while state in self.running and not self.memory.reserve(state, end):
                self.preempt(max(self.running, key=lambda state: state.rank))

    def _admit(self) -> None:
        passed: set[Line] = set()
        while (found := self.waiting.first(passed)) is not None:
            line, state = found
            self.starting = state
            if self.memory.is_coming(state, self.running):
                passed.add(line)  # until the one that computes the same prompt shares its pages
            elif self._find_place(state):
                self.running.append(self.waiting.pop(line))
                self.waiting.charge(state.request.owner, state.known - state.cached)
            else:
                break
        self.starting = None

    def _may_grow(self, state: RequestState) -> bool:
        """It does not hold all the pages that it can ever need."""
        return state.table.capacity < state.request.most_tokens + self.block_size

    def _find_place(self, state: RequestState) -> bool:
        """Gives a waiting request its pages; running ones of lower priority give way."""
        end = state.reach(state.known, self.block_size)
        while True:
            # A page for everybody who may grow stays free, or the newcomer would soon give way.
            growing = sum(map(self._may_grow, self.running))
            full = len(self.running) == self.config.max_requests
            if not full and self.memory.admit(state, end, headroom=growing):
                return True
            lowest = max(self.running, key=lambda state: state.rank, default=None)
            assert lowest is not None, "an idle engine has room for every request it took"
            if lowest.request.priority >= state.request.priority:
                return False
            self.preempt(lowest)
