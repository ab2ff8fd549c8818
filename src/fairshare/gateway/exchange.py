"""One request that goes to an engine, from the moment it is known what it asks for until it has ended.

It stands between a client, an engine and the dispatch queue. Three rules shape it:

- A request ends in `_end` and nowhere else, once; from then on it hears of nothing any more (promise P6).
- The head of an answer is kept until the first byte of its body. Engines send the head of a stream while the request
  still waits in their queue, and a client that has seen the head could not be recalled.
- It ends when the *engine* has finished, not when the client has read: what the client has not read yet is in its
  connection's buffer, and when that is full the engine's connection is not read either.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fairshare.core.decisions import DispatchQueue, Held, Recall, Refused, Request, Send
from fairshare.core.priority import Standing
from fairshare.gateway.driver import DrivenPool, Place, PoolDriver
from fairshare.gateway.explain_header import explained, refused_after_waiting
from fairshare.gateway.options import PoolSpec, TokenEstimates
from fairshare.gateway.ports import Outcome, RequestRecord, Reservation
from fairshare.gateway.token_count import question_for
from fairshare.gateway.upstream import Loss, UpstreamConnection
from fairshare.wire.body import BodyFacts, rewrite_body
from fairshare.wire.endpoints import Endpoint
from fairshare.wire.headers import (
    ResponseHeaders,
    fairshare_lines,
    upstream_head,
)
from fairshare.wire.multipart import FormReader
from fairshare.wire.prefix import prefix_keys
from fairshare.wire.problems import (
    INTERNAL_ERROR,
    NO_INSTANCE,
    TOO_MANY_CONNECTIONS,
    UPSTREAM_BROKE,
    UPSTREAM_TIMEOUT,
    UPSTREAM_UNREACHABLE,
    Problem,
    RequestProblem,
    error_event,
    refusal_message,
    refusal_problem,
)
from fairshare.wire.salt import cache_salt
from fairshare.wire.sse import StreamTail
from fairshare.wire.trace_context import Trace
from fairshare.wire.usage import AnswerTail, Usage, read_answer

log = logging.getLogger("fairshare.gateway")

LAST_CHUNK = b"0\r\n\r\n"

# A member of an enumeration that is asked of its class takes as long as ten names of the module (CPython 3.11).
_HELD = Place.HELD
_BORROWING = Standing.BORROWING
_COMPLETED, _FAILED = Outcome.COMPLETED, Outcome.FAILED
_TOKENIZE = TokenEstimates.TOKENIZE

CLIENT_LEFT = "client_left"
CLIENT_STALLED = "client_stalled"
ENGINE_ERROR = "engine_error"

NO_USAGE = Usage()


class ClientSide(Protocol):
    """The client of one request."""

    def answered(self, *, keep_alive: bool) -> None:
        """The answer is complete, and the exchange has ended."""
        ...

    def answer_problem(
        self, problem: Problem, message: str, *, param: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        """The whole answer is this error, and the exchange has ended."""
        ...

    def break_off(self) -> None:
        """The answer cannot be completed and the client must see that; the exchange has ended."""
        ...

    def want_upload(self, wanted: bool) -> None:
        """Read more of the request's body, or none for now."""
        ...


class Upload:
    """A form that is streamed through, never kept whole."""

    __slots__ = ("_pieces", "complete", "content_length", "form", "size", "started")

    def __init__(self, content_length: int | None, form: FormReader) -> None:
        self.content_length = content_length
        """What the engine is told; None: it comes in chunks."""
        self.form = form
        self.size = 0
        """Bytes that have come and are not sent yet."""
        self.complete = False
        self.started = False
        """Some of it is sent, so it cannot be sent again."""
        self._pieces: list[bytes] = []

    @property
    def ready(self) -> bool:
        """Enough has come to know what it asks for."""
        return self.form.ready

    def add(self, data: bytes) -> None:
        """A piece came. Raises `RequestProblem`."""
        self.form.feed(data)
        self._pieces.append(data)
        self.size += len(data)

    def end(self) -> None:
        """All of it came. Raises `RequestProblem`."""
        self.form.end()
        self.complete = True

    def rewrite(self, *, served_name: str | None, ask_usage: bool) -> None:
        """Make what is not sent yet say what the engine must read; before any of it is sent."""
        held = b"".join(self._pieces)
        rewritten = self.form.rewrite(held, served_name=served_name, ask_usage=ask_usage)
        if self.content_length is not None:
            self.content_length += len(rewritten) - len(held)
        self._pieces = [rewritten]
        self.size = len(rewritten)

    def take(self) -> bytes:
        """Everything that can be sent now, framed for the engine."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self.size = 0
        self.started = True
        if self.content_length is not None:
            return data
        return chunk(data) + LAST_CHUNK if self.complete else chunk(data)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body (RFC 9112, 7.1); nothing for no data, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request that goes to an engine."""

    driver: PoolDriver
    client: ClientSide
    write: Callable[[bytes], None]
    """Takes more of the answer for the client."""
    home: DrivenPool
    spec: PoolSpec
    """Its home's as it was on arrival: a reload changes timeouts and cost for new requests only."""
    serving: DrivenPool
    """Whose capacity it uses, or would."""
    queue: DispatchQueue
    endpoint: Endpoint
    request: Request
    id: str
    key_id: str
    model: str
    """As the client named it."""
    facts: BodyFacts
    body: bytes
    upload: Upload | None
    forwarded: bytes
    """Header lines of the client for the engine."""
    trace: Trace | None
    keep_alive: bool
    http_1_1: bool
    arrived_at: float
    arrived_wall_at: float
    received_at: float
    """When the last byte of its body had come."""
    reservation: Reservation | None
    heard_at: float
    ends_at: float

    place: Place = Place.NOWHERE
    began: bool = False
    instance_id: str = ""
    prefix_keys: Sequence[int] = ()

    _sent: Send | None = None
    """By which decision it was sent last."""
    _sent_seconds: float | None = None
    """From arrival until it was last sent to an engine; None: never."""
    _first_byte_seconds: float | None = None
    _added_seconds: float = 0.0
    _recalls: int = 0
    _wasted_slot_seconds: float = 0.0
    _retries: int = 0
    _cache_salt: str | None = None
    """Kept: a recalled request goes to an engine again, maybe after its secret was changed."""
    _upload_rewritten: bool = False
    _ended: bool = False
    _held: Held | None = None
    _explanation: bytes = b""
    _connecting: asyncio.Task[None] | None = None
    _connection: UpstreamConnection | None = None
    _excluded: frozenset[str] = frozenset()
    _tried_fresh: bool = False
    _blocked: bool = False
    _status: int = 0
    """What the engine answered; 0: nothing yet."""
    _chunked: bool = False
    _stream: StreamTail | None = None
    _tail: AnswerTail | None = None

    def __post_init__(self) -> None:
        facts, home, spec = self.facts, self.home, self.spec
        if spec.prefix_secret is not None and self.endpoint.takes_slots:
            own = facts.cache_salt
            self._cache_salt = cache_salt(
                spec.prefix_secret, self.request.team, bytes(own) if isinstance(own, msgspec.Raw) else b""
            )
        if facts.prompt is not None and home.balances_by_prefix():
            self.prefix_keys = prefix_keys(self.model, memoryview(facts.prompt), self._cache_salt)
        if facts.previous_response_id is not None:
            self.request.state_instance = home.responses.instance_of(facts.previous_response_id)

    @property
    def silence_limit_seconds(self) -> float:
        """How long its engine may be silent now."""
        if self.place is _HELD or self._sent_seconds is None:
            return math.inf
        timeouts = self.spec.timeouts
        return timeouts.idle_seconds if self._status else timeouts.first_byte_seconds

    # ------------------------------------------------------------------ from the driver

    def wait(self, held: Held) -> None:
        """It is held."""
        self._held = held

    def send(self, send: Send) -> None:
        """Its turn has come."""
        driver, request, priority, held_seconds = self.driver, self.request, send.priority, send.held_seconds
        self._sent = send
        if held_seconds or send.standing is _BORROWING:
            self._explanation = explained(send, self._held, recalls=self._recalls)
        now = driver.clock()
        if self._sent_seconds is None:
            added_seconds = now - self.received_at - held_seconds
            if added_seconds > 0.0:
                self._added_seconds = added_seconds
        if priority is not None:
            driver.watch.sent(
                request.id,
                send.instance_id,
                request.team,
                priority,
                request.slots,
                self.facts.estimated_prompt_tokens,
                self.facts.stream,
                now,
            )
        self._go(driver.serving_pool(send.pool, self.home), send.instance_id, now)
        if self.spec.token_estimates is _TOKENIZE and not self._ended and not self._recalls:
            self._count_tokens()

    def send_unqueued(self) -> None:
        """It takes no slot: send it to any instance."""
        instance_id = self.home.next_instance(frozenset())
        if instance_id is None:
            self.fail(
                NO_INSTANCE, f"No instance of pool {self.home.spec.name!r} accepts requests now. Try again later."
            )
        else:
            self._go(self.home, instance_id, self.driver.clock())

    def recall(self, recall: Recall) -> None:
        """Back to the queue: nothing of the answer has reached the client."""
        assert not self.began, f"request {self.id} was recalled although its client has a part of the answer"
        self._recalls += 1
        self._wasted_slot_seconds += recall.wasted_slot_seconds
        connection, self._connection = self._connection, None
        self._forget_answer()
        if connection is not None:
            connection.abort(lambda: self.driver.aborted(self))
        else:
            self._stop_connecting()
            self.driver.aborted(self)

    def refuse(self, refused: Refused) -> None:
        """The queue does not take it, or no longer keeps it."""
        problem = refusal_problem(refused.reason)
        self._end(Outcome.REFUSED, status=problem.status, reason=problem.code)
        self.client.answer_problem(
            problem,
            refusal_message(refused, pool=self.home.spec.name, team=self.request.team)
            + ("" if self._held is None else refused_after_waiting(self._held)),
            retry_after_seconds=refused.retry_after_seconds,
        )

    def overdue(self, now: float) -> None:
        """A sweep found it silent or alive for too long (`now`: coarse time)."""
        if self.ends_at < now:
            self.fail(
                UPSTREAM_TIMEOUT,
                f"The request lasted longer than longest_request, {self.spec.timeouts.longest_request_seconds:g} s."
                " Ask for fewer tokens.",
                engine_worked=True,
            )
        elif self._blocked:
            # The engine is silent because we do not listen: the client took nothing for that long.
            self._drop_connection()
            self._end(Outcome.CANCELLED, status=self._status, reason=CLIENT_STALLED, estimate=True)
            self.client.break_off()
        else:
            self.fail(
                UPSTREAM_TIMEOUT,
                f"The engine sent nothing for {self.silence_limit_seconds:g} s. Try again; if it lasts, tell whoever"
                " runs the engines.",
            )

    def engine_silent(self) -> None:
        """Its engine is taken for dead."""
        if self._status:
            self.fail(UPSTREAM_BROKE, "The engine stopped answering. Try again.")
        else:
            self._drop_connection()
            self._try_again(UPSTREAM_BROKE, "The engine stopped answering. Try again.", "its health check failed")

    def fail(self, problem: Problem, message: str, *, engine_worked: bool = False) -> None:
        """End it now, whatever it is doing, and tell the client as far as it can still be told."""
        # Of an engine that sent nothing it is not known that it consumed anything.
        estimate = self.began or (engine_worked and self._connection is not None)
        self._drop_connection()
        if not self.began:
            self._end(
                Outcome.REFUSED if self._sent_seconds is None else Outcome.FAILED,
                status=problem.status,
                reason=problem.code,
                detail=message,
                estimate=estimate,
            )
            self.client.answer_problem(problem, message)
            return
        rest = b"" if self._stream is None else self._stream.finish()
        self._end(Outcome.FAILED, status=self._status, reason=problem.code, detail=message, estimate=estimate)
        if self._stream is None:
            self.client.break_off()
            return
        rest += error_event(self.endpoint.family, problem, message)
        self.write(chunk(rest) + LAST_CHUNK if self._chunked else rest)
        self.client.answered(keep_alive=False)

    # ------------------------------------------------------------------ from the client's connection

    def client_left(self) -> None:
        """The client closed its connection: nobody waits for the answer."""
        at_engine = self._connection is not None
        self._drop_connection()
        self._end(Outcome.CANCELLED, status=self._status, reason=CLIENT_LEFT, estimate=at_engine)

    def client_blocked(self, blocked: bool) -> None:
        """The client's buffer is full (about 1 MiB of the answer was read ahead), or has room again."""
        self._blocked = blocked
        self.heard_at = self.driver.coarse.now
        if self._connection is not None:
            if blocked:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()

    def upload_came(self) -> None:
        """More of the body is in `Upload`, or it is complete."""
        if self._connection is not None:
            self._send_upload(self._connection)

    # ------------------------------------------------------------------ from the engine's connection

    def connected(self, connection: UpstreamConnection) -> None:
        self._connecting = None
        self._use(connection)

    def answer(self, head: ResponseHeaders, body: bytes, complete: bool) -> None:
        """A piece of the answer came."""
        if complete:
            self._connection = None  # it may serve others by now
        if not self._status:
            self._status = head.status
            watched = not head.encoded
            if watched and head.event_stream and head.status < 300:
                self._stream = StreamTail(strip_usage=self._strips_usage)
            elif complete:
                # All of it came at once, as most answers that are no streams do: nothing needs to be kept.
                usage, failure, finish_reason = read_answer(body) if watched else (None, None, "")
                self._begin(head, body, True)
                self._complete(usage, failure, finish_reason)
                return
            elif watched:
                self._tail = AnswerTail()
        self.heard_at = self.driver.coarse.now
        stream = self._stream
        if stream is not None:
            body = stream.feed(body)
            if complete:
                body += stream.finish()
        elif self._tail is not None:
            self._tail.feed(body)
        if not self.began:
            if not body and not complete:
                return
            self._begin(head, body, complete)
        elif complete:
            self.write(chunk(body) + LAST_CHUNK if self._chunked else body)
        elif body:
            self.write(chunk(body) if self._chunked else body)
        if complete:
            tail: StreamTail | AnswerTail | None = stream
            if tail is None and self._tail is not None:
                tail = self._tail
                tail.finish()
            if tail is None:
                self._complete(None, None, "")
            else:
                self._complete(tail.usage, tail.failure, tail.finish_reason)

    def chunk_came(self, framed: bytes) -> bool:
        """Bytes came between two chunks. True: one whole ordinary chunk, as nearly all of a stream, and relayed."""
        stream = self._stream
        if stream is None or not self._chunked or not stream.passes(framed):
            return False
        self.heard_at = self.driver.coarse.now
        self.write(framed)
        return True

    def lost(self, loss: Loss, *, anything_came: bool, reused: bool, detail: str) -> None:
        """The engine's answer will never be complete."""
        self._connection = None
        self._connecting = None
        if loss is Loss.NO_DESCRIPTOR:
            self.fail(TOO_MANY_CONNECTIONS, f"The gateway can open no more connections ({detail}). Try again.")
        elif self.began:
            self.fail(UPSTREAM_BROKE, "The engine's answer ended before it was complete. Try again.")
        elif anything_came or loss is Loss.GARBAGE:
            self.fail(UPSTREAM_BROKE, f"The engine's answer made no sense or ended early: {detail}. Try again.")
        elif reused and not self._tried_fresh and self._can_send_again:
            # The engine closed an idle connection at the moment we used it: nothing is wrong with the engine.
            self._go(self.serving, self.instance_id, self.driver.clock(), fresh=True)
        else:
            self._try_again(UPSTREAM_UNREACHABLE, f"The engine could not be reached: {detail}. Try again.", detail)

    def upload_blocked(self, blocked: bool) -> None:
        if self.upload is not None:
            self.client.want_upload(not blocked)

    def fault(self) -> None:
        """Handling what the engine sent raised; the log says why."""
        if not self._ended:
            self.fail(INTERNAL_ERROR, "fairshare failed to relay this answer; its log says why.")

    # ------------------------------------------------------------------ sending

    @property
    def _strips_usage(self) -> bool:
        """The engine is asked for a usage event that the client did not ask for."""
        facts = self.facts
        return facts.stream and not facts.wants_usage and (self.endpoint.usage_on_request or self.upload is not None)

    @property
    def _can_send_again(self) -> bool:
        return self.upload is None or not self.upload.started

    def _go(self, serving: DrivenPool | None, instance_id: str, now: float, *, fresh: bool = False) -> None:
        """Send it to an instance, on an idle connection if there is one and `fresh` does not forbid it."""
        self.instance_id = instance_id
        self._tried_fresh = fresh
        self._sent_seconds = now - self.arrived_at
        self.heard_at = self.driver.coarse.now
        connections = None if serving is None else serving.instances.get(instance_id)
        if serving is None or connections is None:
            self._try_again(UPSTREAM_UNREACHABLE, "The engine was just removed. Try again.", "instance removed")
            return
        self.serving = serving
        connection = None if fresh else connections.take()
        if connection is None:
            self._connecting = connections.connect(self, self.spec.timeouts.connect_seconds)
        else:
            self._use(connection)

    def _use(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        connection.begin(self)
        instance, upload = connection.home, self.upload
        served_name = self.serving.spec.models.get(self.model, self.model)
        priority = None if self._sent is None else instance.told_priority(self._sent.priority)
        if upload is None:
            try:
                body = rewrite_body(self.endpoint, self.body, self.facts, priority, served_name, self._cache_salt)
            except RequestProblem as problem:
                self.fail(problem.problem, problem.message)
                return
            content_length: int | None = len(body)
        else:
            body = b""
            if not self._upload_rewritten:
                # Once: the same bytes go to another instance if this one cannot be reached.
                self._upload_rewritten = True
                upload.rewrite(served_name=served_name, ask_usage=self._strips_usage)
            content_length = upload.content_length
        opening = instance.opening(self.endpoint, priority)
        connection.write(upstream_head(opening, self.forwarded, self.id, content_length, body))
        if upload is not None:
            self._send_upload(connection)

    def _count_tokens(self) -> None:
        """Ask the engine for the tokens of the prompt, beside the request."""
        connections, prompt = self.serving.instances.get(self.instance_id), self.facts.prompt
        if connections is None or prompt is None:
            return
        served_name = self.serving.spec.models.get(self.model, self.model)
        question = question_for(self.endpoint.kind, served_name, memoryview(prompt))
        if question is not None:
            self.driver.token_counter.count(connections.spec, question, self._tokens_counted)

    def _tokens_counted(self, count: int) -> None:
        self.facts.estimated_prompt_tokens = count

    def _send_upload(self, connection: UpstreamConnection) -> None:
        upload = self.upload
        assert upload is not None
        connection.sending = not upload.complete
        connection.write(upload.take())
        if not upload.complete and not connection.blocked:
            self.client.want_upload(True)

    def _try_again(self, problem: Problem, message: str, detail: str) -> None:
        """Nothing came from its instance: once, try another; else answer `problem`."""
        if self._retries == 0 and self._can_send_again:
            self._excluded |= {self.instance_id}
            other = self.driver.reassigned(self, self._excluded)
            if other is not None:
                log.info(
                    "request %s goes to %s, not %s: %s",
                    self.id,
                    other,
                    self.instance_id,
                    detail,
                    extra={"request_id": self.id},
                )
                self._retries += 1
                self._go(self.serving, other, self.driver.clock())
                return
        self.fail(problem, message)

    def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None

    def _drop_connection(self) -> None:
        """The engine stops working for it."""
        self._stop_connecting()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    # ------------------------------------------------------------------ answering

    def _forget_answer(self) -> None:
        self._status = 0
        self._stream = self._tail = None

    def _begin(self, head: ResponseHeaders, body: bytes, complete: bool) -> None:
        """The first byte goes to the client: the head, and what there is of the body."""
        self.began = True
        self._first_byte_seconds = self.driver.clock() - self.arrived_at
        if self.facts.stateful and self._status < 300:
            self.serving.responses.answered(body, self.instance_id)
        framing = b""
        if complete:
            if self._status not in (204, 304):  # these have no body, and must not say so (RFC 9110, 8.6)
                framing = b"content-length: %d\r\n" % len(body)
        elif head.content_length is not None and self._stream is None:
            framing = b"content-length: %d\r\n" % head.content_length
        elif self.http_1_1:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
            body = chunk(body)
        else:
            self.keep_alive = False  # the end of the connection is the end of the body
        if self.driver.draining:
            self.keep_alive = False
        if not self.keep_alive:
            framing += b"connection: close\r\n"
        elif not self.http_1_1:
            framing += b"connection: keep-alive\r\n"
        sent = self._sent
        ours = b""
        if sent is not None:
            ours = fairshare_lines(sent.pool, sent.standing, sent.priority, sent.held_seconds, self._explanation)
        self.write(b"%bx-request-id: %b\r\n%b%b\r\n%b" % (head.opening, self.id.encode(), ours, framing, body))
        if not complete:
            self.body = b""  # it will not be sent again
            self.driver.first_byte(self)

    def _complete(self, usage: Usage | None, failure: str | None, finish_reason: str) -> None:
        """The engine has finished: the slot is free, whatever the client has read by now."""
        status = self._status
        # An error with its own status (400, say) is the engine's answer to a wrong request, not its failure.
        failed = status >= 500 or (failure is not None and status < 300)
        self._end(
            _FAILED if failed else _COMPLETED,
            status,
            ENGINE_ERROR if failed else "",
            failure or "",
            usage,
            # An error consumed nothing; an answer without a count did.
            usage is None and status < 300,
            finish_reason,
        )
        self.client.answered(keep_alive=self.keep_alive)

    def _end(
        self,
        outcome: Outcome,
        status: int,
        reason: str,
        detail: str = "",
        usage: Usage | None = None,
        estimate: bool = False,
        finish_reason: str = "",
    ) -> None:
        """The end, exactly once: what it consumed, its record, its grant."""
        assert not self._ended, f"request {self.id} ended twice"
        self._ended = True
        request, takes_slots, sent_seconds, sent = (
            self.request,
            self.endpoint.takes_slots,
            self._sent_seconds,
            self._sent,
        )
        standing: Standing | None = None
        priority: int | None = None
        held_seconds, degraded = 0.0, False
        if sent is not None:
            standing, priority, held_seconds, degraded = sent.standing, sent.priority, sent.held_seconds, sent.degraded
        total_seconds = self.driver.clock() - self.arrived_at
        estimated = False
        if usage is not None:
            self._measure(usage, total_seconds)
        elif estimate and takes_slots:
            usage = self._estimated_usage(total_seconds)
            estimated = True
        else:
            usage = NO_USAGE
        # In the order of its fields: with their names CPython makes a dictionary of them first, at every call.
        record = RequestRecord(
            self.id,
            self.endpoint.path,
            self.arrived_wall_at,
            self.key_id,
            request.team,
            self.spec.name,
            "" if sent_seconds is None else self.serving.spec.name,
            self.instance_id,
            self.model,
            request.service_class,
            standing,
            priority,
            request.slots if takes_slots else 0,
            self.facts.stream,
            sent_seconds,
            self._first_byte_seconds,
            total_seconds,
            held_seconds,
            self._added_seconds,
            status,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            self.spec.cost.cost_units(usage) if takes_slots else 0.0,
            estimated,
            finish_reason,
            degraded,
            self.trace,
        )
        if outcome is not _COMPLETED:
            record.outcome, record.reason, record.detail = outcome, reason, detail
        if self._recalls:
            record.recalls, record.wasted_slot_seconds = self._recalls, self._wasted_slot_seconds
        if self._retries:
            record.retries = self._retries
        if outcome is _FAILED:
            log.warning(
                "request %s to %s failed: %s %s",
                record.id,
                self.instance_id,
                reason,
                detail,
                extra={"request_id": record.id, "team": record.team, "pool": record.pool},
            )
        if self.reservation is not None:
            self.reservation.end(record.prompt_tokens + record.completion_tokens)
        self.driver.ended(self, record)

    def _measure(self, usage: Usage, total_seconds: float) -> None:
        """Learn from a request whose tokens the engine counted."""
        sent_seconds = self._sent_seconds
        if usage.completion_tokens and sent_seconds is not None:
            slot_seconds = self.request.slots * (total_seconds - sent_seconds)
            self.serving.tokens_per_slot_second(self.instance_id).add(usage.completion_tokens, slot_seconds)
            if self._stream is not None:
                self.home.bytes_per_token(self.model).add(self._stream.text_bytes, usage.completion_tokens)

    def _estimated_usage(self, total_seconds: float) -> Usage:
        """What it consumed, when the engine's count never came (the one place where tokens are estimated)."""
        generated = 0.0
        if self._stream is not None:
            by_text = self._stream.text_bytes / self.home.bytes_per_token(self.model).value
            generated = max(self._stream.events, by_text)
        elif not self.facts.stream and self._sent_seconds is not None:
            per_second = self.serving.tokens_per_slot_second(self.instance_id).value
            generated = (total_seconds - self._sent_seconds) * per_second * self.request.slots
        if self.facts.max_tokens is not None:
            generated = min(generated, max(0, self.facts.max_tokens) * self.request.slots)
        return Usage(self.facts.estimated_prompt_tokens, 0, round(generated))
