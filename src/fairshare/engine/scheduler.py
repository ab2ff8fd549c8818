"""vLLM v1's scheduler as a pure function of time: which request runs, waits or is evicted at which step.

The rules are those of vLLM 0.32 (`vllm/v1/core/sched/scheduler.py`, `kv_cache_manager.py`, `block_pool.py`) with one
kind of full attention, chunked prefill on, no watermark (its default) and synchronous steps:

* One step gives tokens to the running requests first, in the order they were admitted, then to waiting ones.
* A waiting request never displaces a running one. A running request that finds no free KV block evicts the worst
  running one: the largest (priority, arrival) under `priority`, the last admitted under `fcfs`. The victim loses its
  blocks, keeps its text, its priority and its arrival, waits again, and computes all of it again.
* Nothing is admitted in a step that evicted. The head of the waiting queue that does not fit (its whole text so far
  must fit) blocks everyone behind it.
* A sampled token needs its block at the step that computes it, one step later; the last one never needs any.
* A finished request gives its blocks and its seat back at the end of its step; the next step may use them.
* When a request evicts itself, the rest of the running list gets nothing in that step (0.33 goes on with the rest).

Cost: a step is O(1) plus the work of what changes in it (admissions, finishes, evictions), whatever the number of
running requests: those that only decode are counted, not visited. Times are seconds on a clock that only steps move.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from math import inf
from typing import NamedTuple


class Policy(StrEnum):
    """What `--scheduling-policy` says."""

    PRIORITY = "priority"
    FCFS = "fcfs"


class FinishReason(StrEnum):
    """Why a request has no more tokens."""

    STOP = "stop"
    LENGTH = "length"


class Change(StrEnum):
    """What a scheduler tells its observer."""

    ADMITTED = "admitted"
    PREEMPTED = "preempted"


class Event(NamedTuple):
    """What a step brought to one request."""

    request_id: str
    new_tokens: int
    """Tokens since the request's last event. 0: a request without output (embedding) is done."""
    finished: bool
    reason: FinishReason | None
    """Set when finished."""
    cached_tokens: int
    """Prompt tokens that came from the prefix cache when it was admitted first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """One engine. Defaults are vLLM's, except the step time (a small model on a GPU)."""

    max_num_seqs: int = 256
    num_blocks: int = 10_001
    """KV blocks; block 0 is the null block, which nobody gets."""
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    policy: Policy = Policy.PRIORITY
    prefix_caching: bool = False
    step_seconds: float = 0.010
    token_seconds: float = 20e-6
    """A step takes `step_seconds` + `token_seconds` x scheduled tokens."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "block_size", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not (
            self.step_seconds >= 0.0 and self.token_seconds >= 0.0 and self.step_seconds + self.token_seconds > 0.0
        ):
            raise ValueError(
                f"a step must take time: step_seconds {self.step_seconds} and token_seconds {self.token_seconds} "
                "must not be negative, and not both 0"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )
        if self.blocks_for(self.max_model_len) > self.usable_blocks:
            raise ValueError(
                f"a request of max_model_len ({self.max_model_len}) tokens needs {self.blocks_for(self.max_model_len)} "
                f"KV blocks of {self.block_size} tokens, but there are {self.usable_blocks}; "
                "lower max_model_len or give more KV tokens"
            )

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def block_keys(tokens: Sequence[int], block_size: int, salt: str | None = None) -> list[int]:
    """Keys of the full blocks of `tokens`: equal keys mean equal tokens in the block and in all blocks before it.

    `salt` (`cache_salt`) goes into the first block's key, and so into all of them.
    """
    keys: list[int] = []
    parent = 0 if salt is None else hash(salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash((parent, *tokens[start : start + block_size]))
        keys.append(parent)
    return keys


class _State(Enum):
    WAITING = 0
    RUNNING = 1
    GONE = 2


_OWN_TEXT = object()
"""Begins the keys of blocks whose contents only their request knows: no caller's key can be equal."""


class Running:
    """One request, running or waiting. While it decodes, its progress follows from the step count alone (`birth`)."""

    __slots__ = (
        "admission",
        "arrival",
        "birth",
        "blocks",
        "cached_tokens",
        "computed",
        "decoding",
        "generated",
        "hashed_blocks",
        "id",
        "keys",
        "output_tokens",
        "preemptions",
        "priority",
        "prompt_tokens",
        "reason",
        "reported",
        "serial",
        "state",
    )

    def __init__(
        self,
        id: str,
        serial: int,
        priority: int,
        arrival: float,
        prompt_tokens: int,
        output_tokens: int,
        reason: FinishReason,
        keys: Sequence[Hashable],
    ) -> None:
        self.id = id
        self.serial = serial
        self.priority = priority
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.reason = reason
        self.keys = keys
        self.state = _State.WAITING
        self.generated = 0
        """Tokens it has; valid while it does not decode."""
        self.computed = 0
        """Tokens whose KV is there; valid while it does not decode."""
        self.decoding = False
        self.birth = 0
        """While it decodes: completed steps minus tokens it has."""
        self.admission = 0
        """Grows with every admission: the order of the running list."""
        self.blocks: list[int] = []
        """Block numbers; only with prefix caching."""
        self.hashed_blocks = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.reported = 0

    def key(self, block: int) -> Hashable:
        """What its block number `block` contains; beyond the given keys its text is its own."""
        return self.keys[block] if block < len(self.keys) else (_OWN_TEXT, self.serial, block)


def _by_admission(sequence: Running) -> int:
    return sequence.admission


def _by_badness(sequence: Running) -> tuple[int, float]:
    return (sequence.priority, sequence.arrival)


class _PriorityQueue:
    """Waiting requests, least (priority, arrival, id) first. Entries of requests that left are dropped on the way."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, int, Running]] = []

    def push(self, sequence: Running) -> None:
        heapq.heappush(self._heap, (sequence.priority, sequence.arrival, sequence.id, sequence.serial, sequence))

    push_back = push
    """An evicted request has no place of its own: its priority and arrival say where it waits."""

    def head(self) -> Running:
        """The next one; there must be one."""
        while self._heap[0][-1].state is not _State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def forget_gone(self, alive: int) -> None:
        """Keeps what left while waiting from piling up."""
        if len(self._heap) > 2 * alive + 64:
            self._heap = [entry for entry in self._heap if entry[-1].state is _State.WAITING]
            heapq.heapify(self._heap)


class _ArrivalQueue:
    """Waiting requests in the order they were added; evicted ones before all others."""

    def __init__(self) -> None:
        self._queue: deque[Running] = deque()

    def push(self, sequence: Running) -> None:
        self._queue.append(sequence)

    def push_back(self, sequence: Running) -> None:
        self._queue.appendleft(sequence)

    def head(self) -> Running:
        """The next one; there must be one."""
        while self._queue[0].state is not _State.WAITING:
            self._queue.popleft()
        return self._queue[0]

    def pop(self) -> None:
        self._queue.popleft()

    def forget_gone(self, alive: int) -> None:
        """Keeps what left while waiting from piling up."""
        if len(self._queue) > 2 * alive + 64:
            self._queue = deque(s for s in self._queue if s.state is _State.WAITING)


class _BlockCache:
    """Blocks with contents. Freed blocks that have a key stay findable until they are taken, oldest first."""

    def __init__(self, num_blocks: int) -> None:
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._references = [0] * num_blocks
        self._key_of: list[Hashable | None] = [None] * num_blocks
        self._blocks_of: dict[Hashable, dict[int, None]] = {}
        """Equal contents may sit in several blocks; the first one answers a lookup."""

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, sequence: Running, max_blocks: int) -> list[int]:
        """Blocks that hold the longest known prefix of the sequence, at most `max_blocks`."""
        found: list[int] = []
        for index in range(max_blocks):
            blocks = self._blocks_of.get(sequence.key(index))
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of them nobody holds now: sharing them takes them from the free ones."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, sequence: Running, blocks: list[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        sequence.blocks = list(blocks)
        sequence.hashed_blocks = len(blocks)

    def grow(self, sequence: Running, count: int) -> None:
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            sequence.blocks.append(block)

    def remember(self, sequence: Running, full_blocks: int) -> None:
        """Makes the sequence's first `full_blocks` blocks findable."""
        for index in range(sequence.hashed_blocks, full_blocks):
            key, block = sequence.key(index), sequence.blocks[index]
            self._key_of[block] = key
            self._blocks_of.setdefault(key, {})[block] = None
        sequence.hashed_blocks = max(sequence.hashed_blocks, full_blocks)

    def release(self, sequence: Running) -> None:
        # Last block first, so that the tail of a prefix is taken before its start; blocks without a key before all.
        for block in reversed(sequence.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._key_of[block] is None:
                    self._free.move_to_end(block, last=False)
        sequence.blocks = []
        sequence.hashed_blocks = 0

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is None:
            return
        self._key_of[block] = None
        holders = self._blocks_of[key]
        del holders[block]
        if not holders:
            del self._blocks_of[key]


class Scheduler:
    """One engine. Not thread-safe; every change goes through `add`, `abort`, `step` and `advance`."""

    def __init__(self, config: SchedulerConfig, observer: Callable[[Change, str], None] | None = None) -> None:
        """`observer` is told of every admission and eviction, in order, while the step runs."""
        self.config = config
        self._observer = observer
        self._sequences: dict[str, Running] = {}
        self._running: dict[str, Running] = {}  # in admission order
        self._waiting = _PriorityQueue() if config.policy is Policy.PRIORITY else _ArrivalQueue()
        self._waiting_count = 0
        self._cache = _BlockCache(config.num_blocks) if config.prefix_caching else None
        self._free_blocks = config.usable_blocks  # without prefix caching
        # The one running request whose prompt is not computed yet. There is never a second: a prompt that is cut
        # used the step's whole budget, so nobody was admitted behind it until it was done. It is the last running one.
        self._prefilling: Running | None = None
        # Decoding requests by the step (modulo block size) at which they need a new block.
        self._needing: list[dict[str, Running]] = [{} for _ in range(config.block_size)]
        # Decoding requests by the number of completed steps at which they finish, in admission order (the order in
        # which they begin to decode); entries may be out of date.
        self._finishing: dict[int, list[Running]] = {}
        self._finish_steps: list[int] = []  # heap of the keys of _finishing
        # In a step: admission number up to which the decoding requests have got what they need for it.
        self._granted_up_to = -1
        self._prefilled: list[Running] = []  # whose text was computed to its end in this step
        self._serials = 0
        self._admissions = 0
        self.now = 0.0
        """Seconds: the end of the last step, or the last time waited for."""
        self._origin_at = 0.0
        self._origin_steps = 0
        self._origin_tokens = 0
        self.steps = 0
        self.scheduled_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        """Tokens looked up in the prefix cache by requests admitted for the first time."""
        self.prefix_hits = 0

    # ------------------------------------------------------------------ what is

    @property
    def running(self) -> list[str]:
        """Running requests in the order of admission."""
        return list(self._running)

    @property
    def waiting(self) -> list[str]:
        """Waiting requests, in no order."""
        return [s.id for s in self._sequences.values() if s.state is _State.WAITING]

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    @property
    def free_blocks(self) -> int:
        return self._free_blocks if self._cache is None else self._cache.free

    @property
    def kv_usage(self) -> float:
        """0 to 1; cached blocks that nobody holds count as free."""
        return 1.0 - self.free_blocks / self.config.usable_blocks

    @property
    def busy(self) -> bool:
        return bool(self._sequences)

    def generated(self, request_id: str) -> int:
        """Tokens the request has got until now; `KeyError` if it is not here."""
        return self._generated(self._sequences[request_id])

    # ------------------------------------------------------------------ what happens

    def add(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        priority: int | None = None,
        arrival: float | None = None,
        reason: FinishReason = FinishReason.LENGTH,
        block_keys: Sequence[Hashable] = (),
    ) -> None:
        """A request waits from now on. Several choices or prompts are several requests with one arrival.

        Without a priority its priority is 0.

        output_tokens: how many it will make; cut where `max_model_len` ends it. 0: it is done with its prompt
        (embedding, scoring). reason: what its end is called. arrival: for ordering only, default now.
        block_keys: contents of its first full blocks for the prefix cache (see `block_keys`), of the prompt and, if
        known, of the output; what is beyond them is its own. Raises ValueError for what an engine would refuse.
        """
        if request_id in self._sequences:
            raise ValueError(f"request id {request_id!r} is in use; ids must be unique until the request is finished")
        if not 1 <= prompt_tokens <= self.config.max_model_len - (output_tokens > 0):
            raise ValueError(
                f"prompt of {request_id!r} must have 1 to {self.config.max_model_len - (output_tokens > 0)} tokens "
                f"(max_model_len {self.config.max_model_len}), got {prompt_tokens}"
            )
        if output_tokens < 0:
            raise ValueError(f"output_tokens of {request_id!r} must not be negative, got {output_tokens}")
        room = self.config.max_model_len - prompt_tokens
        if output_tokens > room:
            output_tokens, reason = room, FinishReason.LENGTH
        self._serials += 1
        sequence = Running(
            request_id,
            self._serials,
            priority or 0,
            self.now if arrival is None else arrival,
            prompt_tokens,
            output_tokens,
            reason,
            block_keys,
        )
        self._sequences[request_id] = sequence
        self._waiting.push(sequence)
        self._waiting_count += 1

    def abort(self, request_id: str) -> bool:
        """Forgets a request; its blocks and its seat are free at once. False: it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.state is _State.RUNNING:
            self._leave_running(sequence)
        else:
            self._waiting_count -= 1
        self._forget(sequence)
        self._waiting.forget_gone(self._waiting_count)
        return True

    def step(self) -> list[Event]:
        """Runs one step; returns an event for every request that got something, in the engine's order.

        A step in which nothing could be scheduled still takes `step_seconds`. Without any request nothing happens.
        """
        if not self._sequences:
            return []
        finished = self._run_step()
        done = {sequence.id for sequence in finished}
        events = [
            self._event(sequence, sequence.id in done)
            for sequence in self._running.values()
            if self._generated(sequence) > sequence.reported or sequence.id in done
        ]
        self._retire(finished)
        return events

    def advance(self, until: float) -> list[Event]:
        """Runs the steps that begin before `until`, but stops after the first one that brings a first token or an end.

        Returns the events of exactly those requests, in the engine's order (an event counts all tokens since the
        request's last one). An empty list: the clock has reached `until` (or passed it by a part of a step).
        All state is the same as after the same number of `step` calls.
        """
        while self._sequences and self.now < until:
            self._skip_quiet_steps(until)
            if self.now >= until:
                break
            finished = self._run_step()
            events = [self._event(s, True) for s in finished if s not in self._prefilled]
            events += [self._event(s, s in finished) for s in self._prefilled if s.reported == 0 or s in finished]
            self._retire(finished)
            if events:
                return events
        if not self._sequences and until > self.now:
            self.now = self._origin_at = until
            self._origin_steps = self.steps
            self._origin_tokens = self.scheduled_tokens
        return []

    def quiet_until(self) -> float:
        """The steps that begin before this time bring no first token, end, admission or eviction.

        True as long as nothing is added or aborted; a lower bound, so something may only happen later. Infinity:
        there is no request. A simulator of several engines need not look at this one before.
        """
        if not self._sequences:
            return inf
        if self._prefilling is not None or self._cache is not None or not self._running:
            return self.now
        if self._head_gets_a_seat():
            return self.now
        decoding = len(self._running)
        # In a block's length of steps each running request needs at most one block.
        enough_blocks_for_steps = self.config.block_size * (self._free_blocks // decoding)
        quiet_steps = min(self._finish_steps[0] - 1 - self.steps, enough_blocks_for_steps)
        if quiet_steps <= 0:
            return self.now
        # Between the begin of the last quiet step and that of the next one, safe from rounding.
        step_seconds = self.config.step_seconds + decoding * self.config.token_seconds
        return self.now + (quiet_steps - 0.5) * step_seconds

    # ------------------------------------------------------------------ one step

    def _skip_quiet_steps(self, until: float) -> None:
        """Runs the steps in which all running requests get one token each and nothing else can change.

        O(block size), whatever their number.
        """
        if self._prefilling is not None or self._cache is not None or not self._running:
            return
        steps = self._finish_steps[0] - 1 - self.steps
        if steps <= 0:
            return
        if self._head_gets_a_seat():
            return
        decoding = len(self._running)
        if self._end_of(steps - 1, decoding) >= until:  # not all of them begin before `until`
            step_seconds = self.config.step_seconds + decoding * self.config.token_seconds
            steps = int((until - self.now) / step_seconds)
            # Rounding may have hit the step beside it.
            while self._end_of(steps, decoding) < until:
                steps += 1
            while steps and self._end_of(steps - 1, decoding) >= until:
                steps -= 1
        # In a block's length of steps each running request needs exactly one block.
        block_size = self.config.block_size
        rounds = min(steps // block_size, self._free_blocks // decoding)
        free_blocks = self._free_blocks - rounds * decoding
        done = rounds * block_size
        while done < steps:
            needed = len(self._needing[(self.steps + done) % block_size])
            if needed > free_blocks:
                break
            free_blocks -= needed
            done += 1
        self._free_blocks = free_blocks
        self._pass(done, done * decoding)

    def _end_of(self, steps: int, tokens_each: int) -> float:
        """When that many more steps have ended.

        From whole numbers since the origin, so that the time is the same for every grouping of steps.
        """
        config = self.config
        return (
            self._origin_at
            + (self.steps + steps - self._origin_steps) * config.step_seconds
            + (self.scheduled_tokens + steps * tokens_each - self._origin_tokens) * config.token_seconds
        )

    def _pass(self, steps: int, tokens: int) -> None:
        """Time of so many steps with so many tokens in all of them goes by."""
        self.steps += steps
        self.scheduled_tokens += tokens
        self.now = self._end_of(0, 0)

    def _run_step(self) -> list[Running]:
        """One step up to its tokens. Returns the requests that are finished by it; they still have to be retired."""
        self._prefilled = []
        preempted, budget = self._schedule_running()
        if not preempted:
            budget = self._admit(budget)
        self._pass(1, self.config.max_num_batched_tokens - budget)

        if self._finish_steps and self._finish_steps[0] == self.steps:
            heapq.heappop(self._finish_steps)
        finished = [
            sequence
            for sequence in self._finishing.pop(self.steps, ())
            if sequence.decoding and sequence.birth + sequence.output_tokens == self.steps
        ]
        for sequence in self._prefilled:
            if sequence.output_tokens:
                sequence.generated += 1
            if sequence.generated == sequence.output_tokens:
                finished.append(sequence)
            else:
                self._start_decoding(sequence)
        return finished

    def _schedule_running(self) -> tuple[bool, int]:
        """Gives the running requests their tokens and blocks. Returns whether one was evicted, and the tokens left."""
        needing = self._needing[self.steps % self.config.block_size]
        evicted_before = self.preemptions
        if len(needing) <= self.free_blocks:
            if self._cache is None:
                self._free_blocks -= len(needing)
            else:
                for sequence in self._with_block_work():
                    self._give_decode_block(sequence)
            self._granted_up_to = self._admissions
            stopped_at = None
        else:
            stopped_at = self._give_blocks_by_force()
        prefilling = self._prefilling
        if stopped_at is None and prefilling is not None:
            budget = self._continue_prefill(prefilling)
        else:
            decoding = len(self._running) - (prefilling is not None)
            budget = self.config.max_num_batched_tokens - decoding
        if stopped_at is not None:
            for sequence in list(self._running.values()):
                if sequence.admission > stopped_at.admission and sequence.decoding:
                    self._postpone(sequence)
                    budget += 1
        self._granted_up_to = -1
        return self.preemptions > evicted_before, budget

    def _with_block_work(self) -> list[Running]:
        """Decoding requests that need a block in this step or (prefix caching) fill one, in running order."""
        step, block_size = self.steps, self.config.block_size
        work = self._needing[step % block_size]
        if self._cache is not None:
            work = work | self._needing[(step + 1) % block_size]
        return sorted(work.values(), key=_by_admission)

    def _give_decode_block(self, sequence: Running) -> None:
        position = sequence.prompt_tokens + self._generated(sequence) - 1  # of the token that this step computes
        grows = position % self.config.block_size == 0
        if self._cache is None:
            self._free_blocks -= grows
            return
        self._cache.grow(sequence, grows)
        self._cache.remember(sequence, (position + 1) // self.config.block_size)

    def _give_blocks_by_force(self) -> Running | None:
        """Blocks are short: evicts as it goes. Returns the request that had to evict itself, which ends the walk."""
        needing = self._needing[self.steps % self.config.block_size]
        for sequence in self._with_block_work():
            if not sequence.decoding:  # evicted for one before it
                continue
            if sequence.id in needing:
                while self.free_blocks < 1:
                    if self._evict_worst() is sequence:
                        return sequence
            self._give_decode_block(sequence)
            self._granted_up_to = sequence.admission
        self._granted_up_to = self._admissions
        return None

    def _continue_prefill(self, sequence: Running) -> int:
        """Computes more of a prompt that was cut, after the decoding requests. Returns the tokens left."""
        decoding = len(self._running) - 1
        budget = self.config.max_num_batched_tokens - decoding
        text = sequence.prompt_tokens + sequence.generated
        chunk = min(text - sequence.computed, budget)
        if chunk == 0:
            return 0
        needed = self.config.blocks_for(sequence.computed + chunk) - self.config.blocks_for(sequence.computed)
        while self.free_blocks < needed:
            budget += 1  # the victim's token of this step
            if self._evict_worst() is sequence:
                return budget - 1
        self._compute(sequence, chunk, needed)
        return budget - chunk

    def _admit(self, budget: int) -> int:
        """Admits waiting requests while there is a seat, a token and room. Returns the tokens left."""
        while budget > 0 and self._waiting_count and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting.head()
            shared = self._shared_blocks(sequence)
            if not self._fits(sequence, shared):
                break
            self._waiting.pop()
            self._waiting_count -= 1
            self._admissions += 1
            sequence.admission = self._admissions
            sequence.state = _State.RUNNING
            self._running[sequence.id] = sequence
            text = sequence.prompt_tokens + sequence.generated
            sequence.computed = len(shared) * self.config.block_size
            chunk = min(text - sequence.computed, budget)
            if self._cache is not None:
                self._cache.share(sequence, shared)
                if sequence.preemptions == 0:
                    sequence.cached_tokens = sequence.computed
                    self.prefix_queries += text
                    self.prefix_hits += sequence.computed
            self._compute(sequence, chunk, self.config.blocks_for(sequence.computed + chunk) - len(shared))
            budget -= chunk
            if self._observer is not None:
                self._observer(Change.ADMITTED, sequence.id)
        return budget

    def _head_gets_a_seat(self) -> bool:
        """Whether the next step may admit; if not, none will while nothing else changes: free blocks only get fewer.

        Without prefix caching, and with every running request decoding.
        """
        if not self._waiting_count or len(self._running) >= self.config.max_num_seqs:
            return False
        return self._fits(self._waiting.head(), [])

    def _shared_blocks(self, sequence: Running) -> list[int]:
        if self._cache is None:
            return []
        # The last token is always computed: its output is what the next token is sampled from.
        text = sequence.prompt_tokens + sequence.generated
        return self._cache.find(sequence, (text - 1) // self.config.block_size)

    def _fits(self, sequence: Running, shared: list[int]) -> bool:
        """Whether all of its text so far finds blocks now, also if this step computes only a part of it."""
        needed = self.config.blocks_for(sequence.prompt_tokens + sequence.generated) - len(shared)
        if self._cache is not None:
            needed += self._cache.unused(shared)
        return needed <= self.free_blocks

    def _compute(self, sequence: Running, chunk: int, new_blocks: int) -> None:
        """Schedules `chunk` tokens of a text that is not all computed yet."""
        sequence.computed += chunk
        if self._cache is None:
            self._free_blocks -= new_blocks
        else:
            self._cache.grow(sequence, new_blocks)
            self._cache.remember(sequence, sequence.computed // self.config.block_size)
        if sequence.computed == sequence.prompt_tokens + sequence.generated:
            self._prefilling = None
            self._prefilled.append(sequence)
        else:
            self._prefilling = sequence

    # ------------------------------------------------------------------ bookkeeping

    def _generated(self, sequence: Running) -> int:
        return self.steps - sequence.birth if sequence.decoding else sequence.generated

    def _event(self, sequence: Running, finished: bool) -> Event:
        generated = self._generated(sequence)
        new_tokens = generated - sequence.reported
        sequence.reported = generated
        return Event(sequence.id, new_tokens, finished, sequence.reason if finished else None, sequence.cached_tokens)

    def _needing_of(self, sequence: Running) -> dict[str, Running]:
        """At step s it computes position prompt + (s - birth) - 1, and needs a block where that begins one."""
        return self._needing[(sequence.birth - sequence.prompt_tokens + 1) % self.config.block_size]

    def _start_decoding(self, sequence: Running) -> None:
        sequence.decoding = True
        sequence.birth = self.steps - sequence.generated
        self._note_decoding(sequence)

    def _note_decoding(self, sequence: Running) -> None:
        self._needing_of(sequence)[sequence.id] = sequence
        finish_step = sequence.birth + sequence.output_tokens
        at_that_step = self._finishing.get(finish_step)
        if at_that_step is None:
            self._finishing[finish_step] = [sequence]
            heapq.heappush(self._finish_steps, finish_step)
        else:
            at_that_step.append(sequence)

    def _postpone(self, sequence: Running) -> None:
        """It gets nothing in this step."""
        del self._needing_of(sequence)[sequence.id]
        sequence.birth += 1
        self._note_decoding(sequence)

    def _leave_running(self, sequence: Running) -> None:
        """Takes its seat and its blocks; what it has generated stays known."""
        del self._running[sequence.id]
        if sequence.decoding:
            needing = self._needing_of(sequence)
            del needing[sequence.id]
            sequence.generated = self._generated(sequence)
            sequence.computed = sequence.prompt_tokens + sequence.generated - 1
            sequence.decoding = False
            granted = sequence.admission <= self._granted_up_to and sequence.computed % self.config.block_size == 0
        else:
            granted = False
        if self._cache is None:
            self._free_blocks += self.config.blocks_for(sequence.computed) + granted
        else:
            self._cache.release(sequence)
        if sequence is self._prefilling:
            self._prefilling = None

    def _worst(self) -> Running:
        if self.config.policy is Policy.PRIORITY:
            return max(self._running.values(), key=_by_badness)
        return next(reversed(self._running.values()))

    def _evict_worst(self) -> Running:
        victim = self._worst()
        self._evict(victim)
        return victim

    def _evict(self, victim: Running) -> None:
        self._leave_running(victim)
        victim.computed = 0
        victim.state = _State.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self._waiting.push_back(victim)
        self._waiting_count += 1
        if self._observer is not None:
            self._observer(Change.PREEMPTED, victim.id)

    def _retire(self, finished: list[Running]) -> None:
        for sequence in finished:
            self._leave_running(sequence)
            self._forget(sequence)

    def _forget(self, sequence: Running) -> None:
        sequence.state = _State.GONE
        del self._sequences[sequence.id]
