"""Virtual time: clients, a gateway policy and engines, event by event.

Engines run by themselves until something could concern the gateway. Each says up to when it is certain to stay quiet
(`Scheduler.quiet_until`); the earliest of these times and of the pending events is what happens next. So an engine is
never ahead of what it will be sent, and hours of mere decoding cost next to nothing.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import count
from math import floor, inf, nextafter
from typing import Any, cast

from fairshare.core.apportion import apportion
from fairshare.core.decisions import Decision, Held, Instance, Recall, Refused, Request, Send
from fairshare.core.hold import HoldQueue
from fairshare.core.pool import Pool
from fairshare.core.trim import Trim
from fairshare.engine.scheduler import Change, Event, Policy, Scheduler, SchedulerConfig
from fairshare.simulator import measures
from fairshare.simulator.outcome import Outcome, PoolOutcome, TeamOutcome, Windows
from fairshare.simulator.policies import HELD, UNHELD, GatewayPolicy, PolicyName, make_policy
from fairshare.simulator.records import Call, Client, Domain, Engine, Sequence
from fairshare.simulator.replicas import Cluster, ReplicatedPool
from fairshare.simulator.scenario import Change as PlannedChange
from fairshare.simulator.scenario import Failure, PoolPlan, Scenario
from fairshare.simulator.traces import Arrival

SCRAPE_SECONDS = 2.0
"""How often the gateway scrapes its engines (`fairshare.gateway.instances`)."""


class World:
    """One run of a scenario under one policy."""

    def __init__(
        self,
        scenario: Scenario,
        policy: PolicyName,
        *,
        seed: int | None = None,
        arrivals: Iterable[Arrival] = (),
        tokens_per_minute: float = inf,
        only_team: str | None = None,
        make_scheduler: Callable[[SchedulerConfig, Callable[[Change, str], None]], Scheduler] = Scheduler,
    ) -> None:
        """`arrivals`: what the scenario's traces bring, by time. `only_team`: leave all others out.
        `tokens_per_minute`: of all teams together, under `rate-limit`.

        `make_scheduler`: makes the engines' schedulers; a test runs vLLM's own class in their place.
        """
        self.scenario = scenario
        self.seed = scenario.seed if seed is None else seed
        self.now = 0.0
        self._half_round_trip = scenario.round_trip / 2.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._calls: dict[str, Call] = {}
        self._sequences: dict[str, Sequence] = {}
        self._engines: list[Engine] = []
        self._quiet_until: list[float] = []
        """Of each engine."""
        self._deadlines: list[float] = []
        """Of each pool's policy."""
        self._sampled_at = 0.0
        self._requests = 0
        self._only_team = only_team
        self._policy_name = policy
        self._make_scheduler = make_scheduler
        self._domains = [self._domain(plan) for plan in scenario.pools]
        by_name = {domain.plan.name: domain for domain in self._domains}
        self._cluster = self._replicas()
        made: dict[str, GatewayPolicy] = {}

        def policy_of(domain: Domain) -> GatewayPolicy:
            plan = domain.plan
            if self._cluster is not None:
                return ReplicatedPool(self._cluster, plan.name)
            if plan.name not in made:
                fallback = policy_of(by_name[plan.fallback]) if plan.fallback else None
                options = plan.hold.options()
                made[plan.name] = make_policy(
                    policy, domain.pool, options, self._instances(domain), tokens_per_minute, fallback
                )
            return made[plan.name]

        for domain in self._domains:
            domain.policy = policy_of(domain)
            self._deadlines.append(inf)
        self._see_deadlines()
        self._by_name = by_name
        self._start(arrivals)

    # ------------------------------------------------------------------ making

    def _domain(self, plan: PoolPlan) -> Domain:
        shares = self.scenario.shares_of(plan)
        teams = {team: TeamOutcome(team, float(share), floor(share * plan.capacity)) for team, share in shares.items()}
        for team in self.scenario.teams:
            teams.setdefault(team.name, TeamOutcome(team.name, 0.0, 0))
        outcome = PoolOutcome(
            plan.name,
            plan.capacity,
            {team: float(share) for team, share in shares.items()},
            teams,
            Windows(list(teams)),
            kv_tokens=plan.engines.count * plan.engines.kv_tokens,
        )
        pool = Pool(plan.name, plan.capacity, shares, plan.half_life, clock=lambda: self.now)
        config = plan.engines.config(with_headroom=self._policy_name not in UNHELD)
        domain = Domain(plan, config, pool, outcome)
        for number in range(plan.engines.count):
            self._add_engine(domain, f"{plan.name}-{number}")
        return domain

    def _replicas(self) -> Cluster | None:
        """The gateway's replicas; None: the scenario has none, or the policy decides in one place whatever fails."""
        plan = self.scenario.replicas
        if plan is None or self._policy_name not in HELD:
            return None
        pools = [(domain.plan, domain.pool, self._instances(domain)) for domain in self._domains]
        for failure in plan.fail:
            self._at(failure.at, self._lose_replica, failure)
        return Cluster(plan, self._policy_name, pools, clock=lambda: self.now)

    def _add_engine(self, domain: Domain, instance_id: str) -> None:
        index = len(self._engines)
        engine = Engine(domain, index, instance_id)
        engine.scheduler = self._scheduler(engine)
        self._engines.append(engine)
        self._quiet_until.append(inf)
        domain.engines[instance_id] = engine
        domain.healthy[instance_id] = True

    def _scheduler(self, engine: Engine) -> Scheduler:
        config = engine.domain.config
        if self._policy_name is PolicyName.FCFS:
            config = replace(config, policy=Policy.FCFS)
        return self._make_scheduler(
            config, lambda change, sequence_id: self._seen_at_engine(engine, change, sequence_id)
        )

    def _instances(self, domain: Domain) -> list[Instance]:
        """The pool's instances as records, each with its integer part of C."""
        parts = self._parts(domain)
        seats = domain.config.max_num_seqs if domain.plan.engines.known_seats else None
        return [
            Instance(
                id=name,
                part_slots=self._effective(domain, name, parts.get(name, 0)),
                seats=seats,
                accepting=well,
            )
            for name, well in domain.healthy.items()
        ]

    @staticmethod
    def _parts(domain: Domain) -> dict[str, int]:
        """Each healthy engine's integer part of C = floor(capacity x healthy / configured), before any trim."""
        healthy = [name for name, well in domain.healthy.items() if well]
        if not healthy:
            return {}
        capacity = domain.configured_capacity * len(healthy) // len(domain.healthy)
        return apportion(capacity, {name: Fraction(1, len(healthy)) for name in healthy})

    @staticmethod
    def _effective(domain: Domain, name: str, part_slots: int) -> int:
        trim = domain.trims.get(name)
        return part_slots if trim is None else trim.effective(part_slots)

    def _start(self, arrivals: Iterable[Arrival]) -> None:
        for team in self.scenario.teams:
            if self._only_team is not None and team.name != self._only_team:
                continue
            for number, load in enumerate(team.loads):
                for client in range(max(1, load.clients)):
                    rng = random.Random(f"{self.seed}/{team.name}/{number}/{client}")
                    self._start_client(Client(team.name, load, rng))
        if self._only_team is not None:
            arrivals = [arrival for arrival in arrivals if arrival.team == self._only_team]
        self._next_of_trace(iter(arrivals), None)
        for change in self.scenario.changes:
            self._at(change.at, self._change, change)
        for domain in self._domains:
            if domain.plan.trim and isinstance(domain.policy, HoldQueue):
                domain.trims = {name: Trim() for name in domain.engines}
                self._at(SCRAPE_SECONDS, self._scrape, domain)
        self._at(self.scenario.window, self._sample)

    def _start_client(self, client: Client) -> None:
        load = client.load
        if load.rate:
            self._at(client.pause_end(load.start) + client.rng.expovariate(load.rate), self._arrive_open, client)
        elif load.burst:
            self._at(load.start, self._burst, client)
        else:
            # With think times, clients that started together would stay together.
            self._at(client.pause_end(load.start + self._think(client)), self._arrive_closed, client)

    # ------------------------------------------------------------------ time

    def _at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what, arguments))

    def run(self, progress: Callable[[float], None] | None = None) -> Outcome:
        """Run to the end. `progress` is told the virtual time now and then."""
        self._progress = progress
        events, quiet, deadlines = self._events, self._quiet_until, self._deadlines
        end = self.scenario.duration
        while True:
            event_at = events[0][0]  # there is always the next sample
            tick_at = min(deadlines)
            engine_at = min(quiet)
            if engine_at < event_at and engine_at < tick_at:
                if engine_at > end:
                    break
                self._run_engine(engine_at, min(event_at, tick_at))
            elif tick_at < event_at:
                if tick_at > end:
                    break
                self.now = max(self.now, tick_at)
                index = deadlines.index(tick_at)
                domain = self._domains[index]
                self._carry_out(domain, domain.policy.tick())
            else:
                if event_at > end:
                    break
                _, _, what, arguments = heapq.heappop(events)
                self.now = max(self.now, event_at)
                what(*arguments)
        return self._finish()

    def _run_engine(self, engine_at: float, limit: float) -> None:
        """Let the engine that may be the next to matter run, up to its next event and not beyond `limit`."""
        quiet = self._quiet_until
        index = quiet.index(engine_at)
        quiet[index] = inf
        limit = min(limit, min(quiet))
        engine = self._engines[index]
        scheduler = engine.scheduler
        if limit <= scheduler.now:
            limit = nextafter(scheduler.now, inf)  # two engines at the same time: this one takes one step
        for event in scheduler.advance(limit):
            self._engine_said(engine, event)
        quiet[index] = scheduler.quiet_until()

    def _catch_up(self, engine: Engine) -> None:
        """Bring an engine to the present; nothing can happen on the way."""
        events = engine.scheduler.advance(self.now)
        assert not events, f"{engine.instance_id} was not quiet until {self.now}: {events}"

    # ------------------------------------------------------------------ clients

    def _think(self, client: Client) -> float:
        think_seconds = client.load.think
        return client.rng.expovariate(1.0 / think_seconds) if think_seconds else 0.0

    def _arrive_closed(self, client: Client) -> None:
        if self.now < client.load.stop:
            self._ask(client)

    def _arrive_open(self, client: Client) -> None:
        load = client.load
        if self.now >= load.stop:
            return
        starts_at = client.pause_end(self.now)
        if starts_at > self.now:  # what would have come during a pause does not come
            self._at(starts_at + client.rng.expovariate(load.rate), self._arrive_open, client)
            return
        self._ask(client)
        self._at(self.now + client.rng.expovariate(load.rate), self._arrive_open, client)

    def _burst(self, client: Client) -> None:
        load = client.load
        if self.now >= load.stop:
            return
        for _ in range(load.burst):
            self._ask(client)
        if load.every:
            self._at(self.now + load.every, self._burst, client)

    def _ask(self, client: Client) -> None:
        load, rng = client.load, client.rng
        prompt_tokens = load.prompt.draw(rng)
        outputs = [load.output.draw(rng) for _ in range(load.n)]
        domain = self._by_name[load.pool] if load.pool else self._domains[0]
        request = Request(
            id=str(self._requests),
            team=client.team,
            service_class=load.core_class,
            slots=load.n,
            estimated_tokens=prompt_tokens,
        )
        self._submit(domain, client, request, prompt_tokens, outputs, load.stream)

    def _next_of_trace(self, arrivals: Iterator[Arrival], arrived: Arrival | None) -> None:
        if arrived is not None:
            request = Request(
                id=str(self._requests),
                team=arrived.team,
                service_class=arrived.service_class,
                estimated_tokens=arrived.prompt_tokens,
            )
            domain = self._by_name[arrived.pool] if arrived.pool else self._domains[0]
            self._submit(domain, None, request, arrived.prompt_tokens, [arrived.output_tokens], True)
        following = next(arrivals, None)
        if following is not None:
            self._at(following.at, self._next_of_trace, arrivals, following)

    def _submit(
        self,
        domain: Domain,
        client: Client | None,
        request: Request,
        prompt_tokens: int,
        outputs: list[int],
        streams: bool,
    ) -> None:
        self._requests += 1
        account = domain.accounts[request.team]
        prompt_tokens = min(prompt_tokens, domain.config.max_model_len - 1)
        call = Call(request.id, domain, account, client, request, prompt_tokens, outputs, streams, self.now)
        self._calls[call.id] = call
        account.outcome.submitted += 1
        domain.outcome.longest_prompt_tokens = max(domain.outcome.longest_prompt_tokens, prompt_tokens)
        self._offer(call)

    def _offer(self, call: Call) -> None:
        """The request reaches the gateway."""
        domain, account, slots = call.domain, call.account, call.request.slots
        domain.touch(self.now)
        domain.held += 1
        account.wait(slots, self.now)
        account.demand_rose(slots, self.now)
        self._carry_out(domain, domain.policy.submitted(call.request))

    def _answered(self, call: Call) -> None:
        """The client has its answer, or knows that there is none."""
        client = call.client
        if client is not None and client.closed:
            self._at(client.pause_end(self.now + self._think(client)), self._arrive_closed, client)

    # ------------------------------------------------------------------ gateway

    def _carry_out(self, domain: Domain, decisions: list[Decision]) -> None:
        for decision in decisions:
            call = self._calls[decision.request_id]
            match decision:
                case Send():
                    self._send(call, decision)
                case Held():
                    pass
                case Recall():
                    self._recall(call, decision)
                case Refused():
                    self._refused(call, decision)
        self._see_deadlines()

    def _see_deadlines(self) -> None:
        for index, domain in enumerate(self._domains):
            deadline = domain.policy.next_deadline()
            self._deadlines[index] = inf if deadline is None else deadline

    def _send(self, call: Call, send: Send) -> None:
        call.domain.touch(self.now)
        call.domain.held -= 1
        runs_in = call.domain if send.pool == call.domain.plan.name else self._by_name[send.pool]
        runs_in.touch(self.now)
        runs_in.in_flight_slots += call.request.slots
        call.borrowed = send.grant.borrowing
        call.attempt += 1
        call.engine = runs_in.engines[send.instance_id]
        self._at(self.now + self._half_round_trip, self._reach_engine, call, call.attempt, send.priority or 0)

    def _reach_engine(self, call: Call, attempt: int, priority: int) -> None:
        engine = call.engine
        if call.attempt != attempt or engine is None:
            return
        self._catch_up(engine)
        scheduler = engine.scheduler
        outputs = call.outputs
        names = [call.id] if len(outputs) == 1 else [f"{call.id}.{number}" for number in range(len(outputs))]
        call.sequences = [Sequence(name, call, engine, tokens) for name, tokens in zip(names, outputs, strict=True)]
        call.unfinished = len(outputs)
        for sequence in call.sequences:
            self._sequences[sequence.id] = sequence
            scheduler.add(
                sequence.id,
                prompt_tokens=call.prompt_tokens,
                output_tokens=sequence.output_tokens,
                priority=priority,
                arrival=self.now,
            )
        self._quiet_until[engine.index] = scheduler.quiet_until()

    def _recall(self, call: Call, recall: Recall) -> None:
        engine = call.engine
        assert engine is not None
        domain = engine.domain
        domain.touch(self.now)
        domain.in_flight_slots -= call.request.slots
        call.domain.touch(self.now)
        call.domain.held += 1
        domain.outcome.recalls += 1
        domain.outcome.recalled_slot_seconds += recall.wasted_slot_seconds
        call.account.outcome.recalled += 1
        call.attempt += 1
        call.engine = None
        call.first_token_at = call.started_at = None
        sequences, call.sequences = call.sequences, []
        call.account.wait(len(sequences) - call.unfinished if sequences else 0, self.now)
        self._at(self.now + self._half_round_trip, self._abort, engine, sequences)
        self._at(self.now + 2.0 * self._half_round_trip, self._abort_is_known, call.domain, call.id)

    def _abort(self, engine: Engine, sequences: list[Sequence]) -> None:
        """The connection of a recalled request closes at its engine."""
        self._catch_up(engine)
        for sequence in sequences:
            self._leave_engine(engine, sequence)
        self._quiet_until[engine.index] = engine.scheduler.quiet_until()

    def _abort_is_known(self, domain: Domain, request_id: str) -> None:
        self._carry_out(domain, domain.policy.aborted(request_id))

    def _leave_engine(self, engine: Engine, sequence: Sequence) -> None:
        """A sequence is aborted; what was computed for it is thrown away."""
        if self._sequences.get(sequence.id) is not sequence:
            return
        scheduler = engine.scheduler
        generated = scheduler.generated(sequence.id)
        account = sequence.call.account
        if sequence.running_since is not None:
            self._count_tokens(sequence, generated)
            self._leave_seat(sequence, self.now)
            account.wait(1, self.now)
        if sequence.counted_tokens:
            engine.domain.outcome.thrown_away_tokens += sequence.counted_tokens
        scheduler.abort(sequence.id)
        del self._sequences[sequence.id]

    def _refused(self, call: Call, refused: Refused) -> None:
        domain, account, slots = call.domain, call.account, call.request.slots
        domain.touch(self.now)
        domain.held -= 1
        account.outcome.refused += 1
        account.wait(-slots, self.now)
        account.demand_fell(slots, self.now)
        self._at(self.now + refused.retry_after_seconds, self._offer, call)

    def _first_byte(self, call: Call, attempt: int) -> None:
        if call.attempt == attempt:
            self._carry_out(call.domain, call.domain.policy.first_byte(call.id))

    def _ended(self, call: Call, attempt: int) -> None:
        """The gateway has the whole answer."""
        if call.attempt != attempt:
            return
        engine, outcome = call.engine, call.account.outcome
        assert engine is not None
        engine.domain.touch(self.now)
        engine.domain.in_flight_slots -= call.request.slots
        del self._calls[call.id]
        outcome.finished += 1
        self._note_first_token(call)
        consumed = measures.service(call.prompt_tokens, sum(call.outputs))
        decisions = call.domain.policy.released(call.id, consumed)
        self._answered(call)
        self._carry_out(call.domain, decisions)

    def _note_first_token(self, call: Call) -> None:
        outcome = call.account.outcome
        if call.first_token_at is not None and call.asked_at >= self.scenario.warm_up:
            outcome.asked_at.append(call.asked_at)
            outcome.first_token_seconds.append(call.first_token_at - call.asked_at)
            outcome.borrowed.append(call.borrowed)

    # ------------------------------------------------------------------ engines

    def _seen_at_engine(self, engine: Engine, change: Change, sequence_id: str) -> None:
        sequence = self._sequences[sequence_id]
        call = sequence.call
        account = call.account
        now = engine.scheduler.now
        if change is Change.ADMITTED:
            sequence.running_since = now
            account.running += 1
            account.wait(-1, now)
            if call.started_at is None:
                call.started_at = now
                self._note_wait(call, now)
            if account.returned_at is not None and account.running >= account.whole_slots:
                account.outcome.returns.append((account.returned_at, max(0.0, now - account.returned_at)))
                account.returned_at = None
            return
        generated = engine.scheduler.generated(sequence_id)
        engine.domain.outcome.evictions += 1
        engine.domain.outcome.recomputed_tokens += call.prompt_tokens + generated
        account.outcome.evicted += 1
        self._count_tokens(sequence, generated)
        self._leave_seat(sequence, now)
        account.wait(1, now)

    def _engine_said(self, engine: Engine, event: Event) -> None:
        """A first token or an end, at the end of the engine's last step."""
        sequence = self._sequences[event.request_id]
        call = sequence.call
        at = engine.scheduler.now
        known_at = at + self._half_round_trip
        if not sequence.prompt_counted:
            sequence.prompt_counted = True
            call.account.prompt_tokens += call.prompt_tokens
        current = sequence.attempt == call.attempt
        if current and call.first_token_at is None:
            call.first_token_at = known_at
            if call.streams:
                self._at(known_at, self._first_byte, call, call.attempt)
        if not event.finished:
            return
        self._count_tokens(sequence, sequence.output_tokens)
        self._leave_seat(sequence, at)
        del self._sequences[sequence.id]
        if not current:  # it was recalled while its last token was under way, and waits again
            call.account.wait(1, at)
            return
        call.unfinished -= 1
        if call.unfinished == 0:
            self._at(known_at, self._ended, call, call.attempt)
        call.account.demand_fell(1, at)

    def _count_tokens(self, sequence: Sequence, generated: int) -> None:
        sequence.call.account.output_tokens += generated - sequence.counted_tokens
        sequence.counted_tokens = generated

    def _leave_seat(self, sequence: Sequence, at: float) -> None:
        account = sequence.call.account
        assert sequence.running_since is not None
        account.slot_seconds += max(0.0, at - max(sequence.running_since, self._sampled_at))
        account.running -= 1
        sequence.running_since = None

    def _note_wait(self, call: Call, now: float) -> None:
        outcome = call.account.outcome
        waited_seconds = now - call.asked_at
        outcome.longest_wait_seconds = max(outcome.longest_wait_seconds, waited_seconds)
        if call.borrowed:
            outcome.longest_borrower_wait_seconds = max(outcome.longest_borrower_wait_seconds, waited_seconds)

    # ------------------------------------------------------------------ changes

    def _change(self, change: PlannedChange) -> None:
        domain = self._by_name[change.pool] if change.pool else self._domains[0]
        for team, cost_units in change.usage.items():
            domain.pool.set_usage(team, cost_units)
        for team, slots in change.phantoms.items():
            domain.pool.add_phantoms(team, slots, self.now + change.lasting)
        if change.capacity is not None:
            domain.configured_capacity = change.capacity
        if change.lose_engine is not None:
            self._lose_engine(domain, list(domain.engines.values())[change.lose_engine], change.lasting)
        self._set_capacity(domain)

    def _set_capacity(self, domain: Domain) -> None:
        """C is what the healthy engines' parts add up to."""
        domain.touch(self.now)
        domain.capacity = sum(self._effective(domain, name, part) for name, part in self._parts(domain).items())
        domain.pool.set_capacity(domain.capacity)
        decisions: list[Decision] = []
        for instance in self._instances(domain):
            decisions += domain.policy.instance_changed(instance)
        for team, account in domain.accounts.items():
            account.whole_slots = floor(domain.pool.exact_shares.get(team, Fraction(0)) * domain.capacity)
        self._carry_out(domain, decisions + domain.policy.capacity_changed())

    def _scrape(self, domain: Domain) -> None:
        """As the gateway does it: what waits inside each engine may move its part of C."""
        queue = domain.policy
        assert isinstance(queue, HoldQueue)
        in_flight = {instance.id: instance.in_flight_slots for instance in queue.snapshot().instances}
        changed = 0
        for name, part_slots in self._parts(domain).items():
            engine = domain.engines[name]
            self._catch_up(engine)
            self._quiet_until[engine.index] = engine.scheduler.quiet_until()
            waiting = engine.scheduler.waiting_count
            changed += abs(domain.trims[name].scraped(waiting, in_flight_slots=in_flight[name], part_slots=part_slots))
        if changed:
            self._set_capacity(domain)
        self._at(self.now + SCRAPE_SECONDS, self._scrape, domain)

    def _lose_engine(self, domain: Domain, engine: Engine, seconds: float) -> None:
        """The engine dies: its connections are reset, and it is empty when it comes back.

        A request of which nothing had come back is sent once more, to another engine, as the gateway does.
        """
        self._catch_up(engine)
        domain.healthy[engine.instance_id] = False
        lost = [call for call in self._calls.values() if call.engine is engine]
        for sequence in [one for one in self._sequences.values() if one.engine is engine]:
            self._leave_engine(engine, sequence)
        engine.scheduler = self._scheduler(engine)
        engine.scheduler.advance(self.now)
        self._quiet_until[engine.index] = inf
        self._at(self.now + seconds, self._engine_is_back, domain, engine)
        for call in lost:
            call.attempt += 1
            other = None
            if call.first_token_at is None:
                other = call.domain.policy.reassigned(call.id, frozenset({engine.instance_id}))
            if other is not None:
                call.engine = domain.engines[other]
                priority = 0 if not call.borrowed else 10
                self._at(self.now + self._half_round_trip, self._reach_engine, call, call.attempt, priority)
                continue
            self._fail(call)
            decisions = call.domain.policy.released(call.id, 0.0)
            self._answered(call)
            self._carry_out(call.domain, decisions)

    def _fail(self, call: Call) -> None:
        """A request ends without an answer; nothing of it is left at its engine."""
        slots = call.request.slots
        if call.engine is None:
            call.domain.touch(self.now)
            call.domain.held -= 1
        else:
            call.engine.domain.touch(self.now)
            call.engine.domain.in_flight_slots -= slots
        call.account.wait(-call.unfinished if call.sequences else -slots, self.now)
        call.account.demand_fell(slots, self.now)
        call.account.outcome.failed += 1
        del self._calls[call.id]

    def _lose_replica(self, failure: Failure) -> None:
        """A process of the gateway is killed: the connections of its clients and its own to engines are reset."""
        assert self._cluster is not None
        killed = self._cluster.kill(failure.which)
        if killed is None:
            return
        place, lost = killed
        self._at(self.now + failure.lasting, self._replica_is_back, place)
        for call in [self._calls[request_id] for request_id in lost]:
            call.attempt += 1
            if call.engine is not None:
                self._abort(call.engine, call.sequences)
            self._fail(call)
            self._answered(call)
        self._see_deadlines()

    def _replica_is_back(self, place: int) -> None:
        assert self._cluster is not None
        self._cluster.start(place)
        self._see_deadlines()

    def _engine_is_back(self, domain: Domain, engine: Engine) -> None:
        domain.healthy[engine.instance_id] = True
        self._set_capacity(domain)

    # ------------------------------------------------------------------ measuring

    def _sample(self) -> None:
        """Close a window."""
        for engine in self._engines:
            self._catch_up(engine)
            self._quiet_until[engine.index] = engine.scheduler.quiet_until()
        now, since = self.now, self._sampled_at
        for sequence in self._sequences.values():
            if sequence.running_since is not None:
                self._count_tokens(sequence, sequence.engine.scheduler.generated(sequence.id))
                sequence.call.account.slot_seconds += max(0.0, now - max(sequence.running_since, since))
        self._sampled_at = now
        measured = since >= self.scenario.warm_up
        for domain in self._domains:
            self._close_window(domain, now, now - since, measured)
        if self._progress is not None:
            self._progress(now)
        self._at(now + self.scenario.window, self._sample)

    def _close_window(self, domain: Domain, now: float, seconds: float, measured: bool) -> None:
        domain.touch(now)
        if not measured:
            domain.outcome.idle_slot_seconds = 0.0
        windows = domain.outcome.windows
        accounts = domain.accounts.values()
        for account in accounts:
            if account.waiting:
                account.waiting_seconds += max(0.0, now - max(account.waiting_since, now - seconds))
                account.waiting_since = now
        if measured:
            windows.ends.append(now)
            windows.lengths.append(seconds)
            windows.capacity.append(domain.capacity_seconds / seconds)
            columns = cast("list[tuple[list[Any], str]]", [
                (windows.output_tokens, "output_tokens"),
                (windows.prompt_tokens, "prompt_tokens"),
                (windows.slot_seconds, "slot_seconds"),
                (windows.waiting_seconds, "waiting_seconds"),
                (windows.running, "running"),
                (windows.waiting, "waiting"),
            ])  # fmt: skip
            for rows, name in columns:
                rows.append([getattr(account, name) for account in accounts])
        domain.capacity_seconds = 0.0
        for account in accounts:
            if measured:
                account.outcome.output_tokens += account.output_tokens
                account.outcome.prompt_tokens += account.prompt_tokens
            account.output_tokens = account.prompt_tokens = 0
            account.slot_seconds = account.waiting_seconds = 0.0

    def _finish(self) -> Outcome:
        self.now = max(self.now, self.scenario.duration)
        for call in self._calls.values():
            self._note_first_token(call)
            if call.started_at is None:
                call.borrowed = True  # whatever it would have become: it waits
                self._note_wait(call, self.now)
        for domain in self._domains:
            domain.touch(self.now)
            engines = list(domain.engines.values())
            domain.outcome.steps = sum(engine.scheduler.steps for engine in engines)
            config = domain.plan.engines
            if domain.outcome.steps:
                tokens = sum(engine.scheduler.scheduled_tokens for engine in engines)
                domain.outcome.step_seconds = config.step + config.token * tokens / domain.outcome.steps
            for account in domain.accounts.values():
                if account.returned_at is not None:
                    account.outcome.unfulfilled_returns += 1
        return Outcome(
            scenario=self.scenario.title,
            policy=self._policy_name,
            seed=self.seed,
            measured_from=self.scenario.warm_up,
            until=self.scenario.duration,
            pools=[domain.outcome for domain in self._domains],
            requests=self._requests,
            reigns=[] if self._cluster is None else self._cluster.reigns,
            degraded_grants=0 if self._cluster is None else self._cluster.degraded_grants,
        )
