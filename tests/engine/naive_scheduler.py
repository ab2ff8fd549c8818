"""vLLM's scheduling rules the slow, plain way: every step visits every request and every block.

An independent second opinion for `fairshare.engine.scheduler`, written request by request as the engine does it,
without any of its short cuts.
"""

from dataclasses import dataclass, field

from fairshare.engine.scheduler import FinishReason, SchedulerConfig


@dataclass(eq=False)
class Naive:
    id: str
    priority: int
    arrival: float
    prompt: int
    output: int
    reason: FinishReason
    keys: tuple = ()
    generated: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0
    cached: int = 0
    preempted: bool = False

    @property
    def text(self) -> int:
        return self.prompt + self.generated

    def key(self, i: int):
        return self.keys[i] if i < len(self.keys) else (id(self), i)


class NaiveScheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: list[Naive] = []
        self.running: list[Naive] = []
        self.free = list(range(1, config.num_blocks))
        self.references = dict.fromkeys(self.free, 0)
        self.key_of: dict[int, object] = {}
        self.log: list[tuple[str, str]] = []
        self.everyone: list[Naive] = []  # keeps ids unique
        self.steps = self.tokens = self.preemptions = 0

    def add(self, id, *, prompt_tokens, output_tokens, priority, arrival, reason=FinishReason.LENGTH, block_keys=()):
        room = self.config.max_model_len - prompt_tokens
        if output_tokens > room:
            output_tokens, reason = room, FinishReason.LENGTH
        request = Naive(id, priority, arrival, prompt_tokens, output_tokens, reason, tuple(block_keys))
        self.waiting.append(request)
        self.everyone.append(request)

    def abort(self, id) -> None:
        for queue in (self.waiting, self.running):
            for request in list(queue):
                if request.id == id:
                    queue.remove(request)
                    self.give_back(request)

    def give_back(self, request: Naive) -> None:
        first, last = [], []
        for block in reversed(request.blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                (last if block in self.key_of else first).append(block)
        self.free[:0] = first
        self.free += last
        request.blocks, request.hashed = [], 0

    def find(self, request: Naive) -> list[int]:
        if not self.config.prefix_caching:
            return []
        hits: list[int] = []
        for i in range((request.text - 1) // self.config.block_size):
            holders = [b for b, key in self.key_of.items() if key == request.key(i)]
            if not holders:
                break
            hits.append(holders[0])
        return hits

    def grow(self, request: Naive, tokens: int) -> None:
        while len(request.blocks) < -(-tokens // self.config.block_size):
            block = self.free.pop(0)
            self.key_of.pop(block, None)
            self.references[block] = 1
            request.blocks.append(block)
        if self.config.prefix_caching:
            while request.hashed < min(tokens, request.text) // self.config.block_size:
                self.key_of[request.blocks[request.hashed]] = request.key(request.hashed)
                request.hashed += 1

    def missing(self, request: Naive, tokens: int) -> int:
        return -(-tokens // self.config.block_size) - len(request.blocks)

    def step(self):
        if not self.waiting and not self.running:
            return []
        config, budget = self.config, self.config.max_num_batched_tokens
        scheduled: dict[Naive, int] = {}
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.text - request.computed, budget)
            while self.missing(request, request.computed + count) > len(self.free):
                if config.policy == "priority":
                    victim = max(self.running, key=lambda r: (r.priority, r.arrival))
                else:
                    victim = self.running[-1]
                place = self.running.index(victim)
                del self.running[place]
                if place < index:
                    index -= 1
                budget += scheduled.pop(victim, 0)
                self.give_back(victim)
                victim.computed, victim.preempted = 0, True
                self.waiting.insert(0, victim)
                self.preemptions += 1
                self.log.append(("preempted", victim.id))
                preempted = True
                if victim is request:
                    break
            if request not in self.running:
                break
            self.grow(request, request.computed + count)
            scheduled[request] = count
            budget -= count
            index += 1
        while not preempted and budget > 0 and self.waiting and len(self.running) < config.max_num_seqs:
            if config.policy == "priority":
                request = min(self.waiting, key=lambda r: (r.priority, r.arrival, r.id))
            else:
                request = self.waiting[0]
            hits = self.find(request)
            idle_hits = sum(self.references[b] == 0 for b in hits)
            if -(-request.text // config.block_size) - len(hits) + idle_hits > len(self.free):
                break
            self.waiting.remove(request)
            self.running.append(request)
            for block in hits:
                if self.references[block] == 0:
                    self.free.remove(block)
                self.references[block] += 1
            request.blocks, request.hashed = list(hits), len(hits)
            request.computed = len(hits) * config.block_size
            if not request.preempted:
                request.cached = request.computed
            count = min(request.text - request.computed, budget)
            self.grow(request, request.computed + count)
            scheduled[request] = count
            budget -= count
            self.log.append(("admitted", request.id))
        self.steps += 1
        self.tokens += sum(scheduled.values())
        for request, count in scheduled.items():
            request.computed += count
        events = []
        for request in scheduled:
            if request.computed < request.text:
                continue
            new = 1 if request.output else 0
            request.generated += new
            finished = request.generated == request.output
            events.append((request.id, new, finished, request.reason if finished else None, request.cached))
            if finished:
                self.running.remove(request)
                self.give_back(request)
        return events
