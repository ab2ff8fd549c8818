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
from collections.abc import Sequence
from typing import Protocol

import msgspec

from fairshare.core.decisions import Held, Recall, Refused, Request, Send
from fairshare.core.priority import Standing
from fairshare.gateway.driver import DrivenPool, Place, PoolDriver
from fairshare.gateway.explain_header import explained, refused_after_waiting
from fairshare.gateway.identity import Identity
from fairshare.gateway.options import TokenEstimates
from fairshare.gateway.ports import Outcome, RequestRecord, Reservation
from fairshare.gateway.token_count import question_for
from fairshare.gateway.upstream import Loss, UpstreamConnection
from fairshare.wire.body import BodyFacts, rewrite_body
from fairshare.wire.endpoints import Endpoint
from fairshare.wire.headers import (
    ResponseHeaders,
    fairshare_lines,
    status_line,
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
from fairshare.wire.usage import AnswerTail, Usage

log = logging.getLogger("fairshare.gateway")

LAST_CHUNK = b"0\r\n\r\n"

CLIENT_LEFT = "client_left"
CLIENT_STALLED = "client_stalled"
ENGINE_ERROR = "engine_error"


class ClientSide(Protocol):
    """The client of one request."""

    def write(self, data: bytes) -> None:
        """More of the answer."""
        ...

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


class Exchange:
    """One request that goes to an engine."""

    __slots__ = (
        "_added_seconds",
        "_arrived_at",
        "_arrived_wall_at",
        "_blocked",
        "_body",
        "_cache_salt",
        "_chunked",
        "_client",
        "_connecting",
        "_connection",
        "_cost",
        "_driver",
        "_ended",
        "_endpoint",
        "_excluded",
        "_explanation",
        "_facts",
        "_first_byte_at",
        "_forwarded",
        "_head",
        "_held",
        "_held_seconds",
        "_http_1_1",
        "_id",
        "_identity",
        "_keep_alive",
        "_model",
        "_priority",
        "_recalls",
        "_received_at",
        "_reservation",
        "_retries",
        "_sent_at",
        "_serving",
        "_standing",
        "_status",
        "_stream",
        "_strips_usage",
        "_tail",
        "_timeouts",
        "_tried_fresh",
        "_upload",
        "_upload_rewritten",
        "_wasted_slot_seconds",
        "began",
        "ends_at",
        "heard_at",
        "home",
        "instance_id",
        "place",
        "prefix_keys",
        "queue",
        "request",
        "silence_limit_seconds",
    )

    def __init__(
        self,
        *,
        driver: PoolDriver,
        client: ClientSide,
        home: DrivenPool,
        endpoint: Endpoint,
        identity: Identity,
        request: Request,
        request_id: str,
        model: str,
        facts: BodyFacts,
        body: bytes,
        upload: Upload | None,
        forwarded: bytes,
        keep_alive: bool,
        http_1_1: bool,
        arrived_at: float,
        arrived_wall_at: float,
        received_at: float,
        reservation: Reservation | None,
    ) -> None:
        self._driver = driver
        self._client = client
        self.home = home
        prompt = facts.prompt
        self.prefix_keys: Sequence[int] = ()
        # Kept: a recalled request goes to an engine again, maybe after its secret was changed.
        self._cache_salt: str | None = None
        if (secret := home.spec.prefix_secret) is not None and endpoint.takes_slots:
            own = facts.cache_salt
            self._cache_salt = cache_salt(secret, request.team, bytes(own) if isinstance(own, msgspec.Raw) else b"")
        if prompt is not None and home.balances_by_prefix:
            self.prefix_keys = prefix_keys(model, memoryview(prompt), self._cache_salt)
        if facts.previous_response_id is not None:
            request.state_instance = home.responses.instance_of(facts.previous_response_id)
        self._endpoint = endpoint
        self._identity = identity
        self.request = request
        self._id = request_id
        self._model = model
        self._facts = facts
        self._body = body
        self._upload = upload
        self._forwarded = forwarded
        self._strips_usage = (
            facts.stream and not facts.wants_usage and (endpoint.usage_on_request or upload is not None)
        )
        """The engine is asked for a usage event that the client did not ask for."""
        self._upload_rewritten = False
        self._keep_alive = keep_alive
        self._http_1_1 = http_1_1
        self._arrived_at = arrived_at
        self._arrived_wall_at = arrived_wall_at
        self._received_at = received_at

        self.queue = home.queue
        self.place = Place.NOWHERE
        self.began = False
        self.instance_id = ""
        self.heard_at = arrived_at
        self.silence_limit_seconds = math.inf
        # Kept: a reload changes them for new requests only.
        self._timeouts = home.spec.timeouts
        self._cost = home.spec.cost
        self.ends_at = arrived_at + self._timeouts.longest_request_seconds

        self._reservation = reservation
        self._ended = False
        self._serving = home
        self._standing: Standing | None = None
        self._priority: int | None = None
        self._held: Held | None = None
        self._explanation = b""
        self._held_seconds = 0.0
        self._added_seconds = 0.0
        self._sent_at: float | None = None
        self._first_byte_at: float | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._connection: UpstreamConnection | None = None
        self._excluded: frozenset[str] = frozenset()
        self._tried_fresh = False
        self._retries = 0
        self._recalls = 0
        self._wasted_slot_seconds = 0.0
        self._blocked = False
        self._status = 0
        self._head: ResponseHeaders | None = None
        self._chunked = False
        self._stream: StreamTail | None = None
        self._tail: AnswerTail | None = None

    @property
    def id(self) -> str:
        """As its client sees it."""
        return self._id

    @property
    def key_id(self) -> str:
        return self._identity.key_id

    # ------------------------------------------------------------------ from the driver

    def wait(self, held: Held) -> None:
        """It is held."""
        self._held = held

    def send(self, send: Send) -> None:
        """Its turn has come."""
        self._standing = send.standing
        self._priority = send.priority
        self._held_seconds = send.held_seconds
        if send.held_seconds or send.standing is Standing.BORROWING:
            self._explanation = explained(send, self._held, recalls=self._recalls)
        now = self._driver.clock()
        if self._sent_at is None:
            self._added_seconds = max(0.0, now - self._received_at - send.held_seconds)
        if send.priority is not None:
            self._driver.watch.sent(
                self.request.id,
                instance_id=send.instance_id,
                team=self.request.team,
                priority=send.priority,
                slots=self.request.slots,
                prompt_size=self._facts.estimated_prompt_tokens,
                streaming=self._facts.stream,
                now=now,
            )
        self._go(self._driver.serving_pool(send.pool, self.home), send.instance_id, now)
        if self.home.spec.token_estimates is TokenEstimates.TOKENIZE and not self._ended and not self._recalls:
            self._count_tokens()

    def send_unqueued(self) -> None:
        """It takes no slot: send it to any instance."""
        instance_id = self.home.next_instance(frozenset())
        if instance_id is None:
            self.fail(
                NO_INSTANCE, f"No instance of pool {self.home.spec.name!r} accepts requests now. Try again later."
            )
        else:
            self._go(self.home, instance_id, self._driver.clock())

    def recall(self, recall: Recall) -> None:
        """Back to the queue: nothing of the answer has reached the client."""
        assert not self.began, f"request {self._id} was recalled although its client has a part of the answer"
        self._recalls += 1
        self._wasted_slot_seconds += recall.wasted_slot_seconds
        self.silence_limit_seconds = math.inf
        connection, self._connection = self._connection, None
        self._forget_answer()
        if connection is not None:
            connection.abort(lambda: self._driver.aborted(self))
        else:
            self._stop_connecting()
            self._driver.aborted(self)

    def refuse(self, refused: Refused) -> None:
        """The queue does not take it, or no longer keeps it."""
        problem = refusal_problem(refused.reason)
        self._end(Outcome.REFUSED, status=problem.status, reason=problem.code)
        self._client.answer_problem(
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
                f"The request lasted longer than longest_request, {self._timeouts.longest_request_seconds:g} s."
                " Ask for fewer tokens.",
                engine_worked=True,
            )
        elif self._blocked:
            # The engine is silent because we do not listen: the client took nothing for that long.
            self._drop_connection()
            self._end(Outcome.CANCELLED, status=self._status, reason=CLIENT_STALLED, estimate=True)
            self._client.break_off()
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
                Outcome.REFUSED if self._sent_at is None else Outcome.FAILED,
                status=problem.status,
                reason=problem.code,
                detail=message,
                estimate=estimate,
            )
            self._client.answer_problem(problem, message)
            return
        rest = b"" if self._stream is None else self._stream.finish()
        self._end(Outcome.FAILED, status=self._status, reason=problem.code, detail=message, estimate=estimate)
        if self._stream is None:
            self._client.break_off()
            return
        rest += error_event(self._endpoint.family, problem, message)
        self._client.write(chunk(rest) + LAST_CHUNK if self._chunked else rest)
        self._client.answered(keep_alive=False)

    # ------------------------------------------------------------------ from the client's connection

    def client_left(self) -> None:
        """The client closed its connection: nobody waits for the answer."""
        at_engine = self._connection is not None
        self._drop_connection()
        self._end(Outcome.CANCELLED, status=self._status, reason=CLIENT_LEFT, estimate=at_engine)

    def client_blocked(self, blocked: bool) -> None:
        """The client's buffer is full (about 1 MiB of the answer was read ahead), or has room again."""
        self._blocked = blocked
        self.heard_at = self._driver.coarse.now
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

    def answer(self, connection: UpstreamConnection, body: bytes, complete: bool) -> None:
        """A piece of the answer came."""
        self.heard_at = self._driver.coarse.now
        if complete:
            self._connection = None  # it may serve others by now
        if not self._status:
            self._open_answer(connection)
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
            self._begin(body, complete)
        elif complete:
            self._client.write(chunk(body) + LAST_CHUNK if self._chunked else body)
        elif body:
            self._client.write(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)
        if complete:
            self._complete()

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
            self._go(self._serving, self.instance_id, self._driver.clock(), fresh=True)
        else:
            self._try_again(UPSTREAM_UNREACHABLE, f"The engine could not be reached: {detail}. Try again.", detail)

    def upload_blocked(self, blocked: bool) -> None:
        if self._upload is not None:
            self._client.want_upload(not blocked)

    def fault(self) -> None:
        """Handling what the engine sent raised; the log says why."""
        if not self._ended:
            self.fail(INTERNAL_ERROR, "fairshare failed to relay this answer; its log says why.")

    # ------------------------------------------------------------------ sending

    @property
    def _can_send_again(self) -> bool:
        return self._upload is None or not self._upload.started

    def _go(self, serving: DrivenPool | None, instance_id: str, now: float, *, fresh: bool = False) -> None:
        """Send it to an instance, on an idle connection if there is one and `fresh` does not forbid it."""
        self.instance_id = instance_id
        self._tried_fresh = fresh
        self._sent_at = now
        self.heard_at = self._driver.coarse.now
        self.silence_limit_seconds = self._timeouts.first_byte_seconds
        connections = None if serving is None else serving.instances.get(instance_id)
        if serving is None or connections is None:
            self._try_again(UPSTREAM_UNREACHABLE, "The engine was just removed. Try again.", "instance removed")
            return
        self._serving = serving
        connection = None if fresh else connections.take()
        if connection is None:
            self._connecting = connections.connect(self, self._timeouts.connect_seconds)
        else:
            self._use(connection)

    def _use(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        connection.begin(self)
        upload = self._upload
        served_name = self._serving.spec.models.get(self._model, self._model)
        if upload is None:
            try:
                body = rewrite_body(
                    self._endpoint,
                    self._body,
                    self._facts,
                    priority=self._priority,
                    served_name=served_name,
                    cache_salt=self._cache_salt,
                )
            except RequestProblem as problem:
                self.fail(problem.problem, problem.message)
                return
            content_length = len(body)
        else:
            body = b""
            if not self._upload_rewritten:
                # Once: the same bytes go to another instance if this one cannot be reached.
                self._upload_rewritten = True
                upload.rewrite(served_name=served_name, ask_usage=self._strips_usage)
            content_length = upload.content_length
        connection.write(
            upstream_head(
                method=self._endpoint.method,
                path=connection.home.path_prefix + self._endpoint.path,
                host=connection.home.host,
                request_id=self._id,
                forwarded=self._forwarded,
                priority=self._priority,
                api_key=connection.home.spec.api_key,
                content_length=content_length,
            )
            + body
        )
        if upload is not None:
            self._send_upload(connection)

    def _count_tokens(self) -> None:
        """Ask the engine for the tokens of the prompt, beside the request."""
        connections, prompt = self._serving.instances.get(self.instance_id), self._facts.prompt
        if connections is None or prompt is None:
            return
        served_name = self._serving.spec.models.get(self._model, self._model)
        question = question_for(self._endpoint.kind, served_name, memoryview(prompt))
        if question is not None:
            self._driver.token_counter.count(connections.spec, question, self._tokens_counted)

    def _tokens_counted(self, count: int) -> None:
        self._facts.estimated_prompt_tokens = count

    def _send_upload(self, connection: UpstreamConnection) -> None:
        upload = self._upload
        assert upload is not None
        connection.sending = not upload.complete
        connection.write(upload.take())
        if not upload.complete and not connection.blocked:
            self._client.want_upload(True)

    def _try_again(self, problem: Problem, message: str, detail: str) -> None:
        """Nothing came from its instance: once, try another; else answer `problem`."""
        if self._retries == 0 and self._can_send_again:
            self._excluded |= {self.instance_id}
            other = self._driver.reassigned(self, self._excluded)
            if other is not None:
                log.info("request %s goes to %s, not %s: %s", self._id, other, self.instance_id, detail)
                self._retries += 1
                self._go(self._serving, other, self._driver.clock())
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

    def _open_answer(self, connection: UpstreamConnection) -> None:
        """Read the answer's head; the client's is written in `_begin`."""
        self._status = connection.status
        self.silence_limit_seconds = self._timeouts.idle_seconds
        head = self._head = connection.head
        if head.encoded:
            return
        if head.event_stream and self._status < 300:
            self._stream = StreamTail(strip_usage=self._strips_usage)
        else:
            self._tail = AnswerTail()

    def _forget_answer(self) -> None:
        self._status = 0
        self._head = self._stream = self._tail = None

    def _begin(self, body: bytes, complete: bool) -> None:
        """The first byte goes to the client: the head, and what there is of the body."""
        head = self._head
        assert head is not None
        self._head = None
        self.began = True
        self._body = b""  # it will not be sent again
        self._first_byte_at = self._driver.clock()
        if self._facts.stateful and self._status < 300:
            self._serving.responses.answered(body, self.instance_id)
        framing = b""
        if complete:
            if self._status not in (204, 304):  # these have no body, and must not say so (RFC 9110, 8.6)
                framing = b"content-length: %d\r\n" % len(body)
        elif head.content_length is not None and self._stream is None:
            framing = b"content-length: %d\r\n" % head.content_length
        elif self._http_1_1:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
            body = chunk(body)
        else:
            self._keep_alive = False  # the end of the connection is the end of the body
        if not self._keep_alive:
            framing += b"connection: close\r\n"
        elif not self._http_1_1:
            framing += b"connection: keep-alive\r\n"
        ours = (
            b"x-request-id: %b\r\n" % self._id.encode("ascii")
            if self._standing is None
            else fairshare_lines(
                request_id=self._id,
                pool=self._serving.spec.name,
                standing=self._standing,
                priority=self._priority,
                held_seconds=self._held_seconds,
                explanation=self._explanation,
            )
        )
        self._client.write(b"%b%b%b%b\r\n%b" % (status_line(self._status), head.lines, ours, framing, body))
        if not complete:
            self._driver.first_byte(self)

    def _complete(self) -> None:
        """The engine has finished: the slot is free, whatever the client has read by now."""
        tail: StreamTail | AnswerTail | None = self._stream
        if tail is None and self._tail is not None:
            tail = self._tail
            self._tail.finish()
        usage = failure = None
        if tail is not None:
            usage, failure = tail.usage, tail.failure
        # An error with its own status (400, say) is the engine's answer to a wrong request, not its failure.
        failed = self._status >= 500 or (failure is not None and self._status < 300)
        self._end(
            Outcome.FAILED if failed else Outcome.COMPLETED,
            status=self._status,
            reason=ENGINE_ERROR if failed else "",
            detail=failure or "",
            usage=usage,
            # An error consumed nothing; an answer without a count did.
            estimate=usage is None and self._status < 300,
        )
        self._client.answered(keep_alive=self._keep_alive)

    def _end(
        self,
        outcome: Outcome,
        *,
        status: int,
        reason: str,
        detail: str = "",
        usage: Usage | None = None,
        estimate: bool = False,
    ) -> None:
        """The end, exactly once: what it consumed, its record, its grant."""
        assert not self._ended, f"request {self._id} ended twice"
        self._ended = True
        now = self._driver.clock()
        sent_at, slots = self._sent_at, self.request.slots
        estimated = False
        if usage is not None:
            self._measure(usage, now)
        elif estimate and self._endpoint.takes_slots:
            usage, estimated = self._estimated_usage(now), True
        takes_slots = self._endpoint.takes_slots
        arrived_at = self._arrived_at
        record = RequestRecord(
            id=self._id,
            endpoint=self._endpoint.path,
            key_id=self._identity.key_id,
            team=self.request.team,
            pool=self.home.spec.name,
            served_by="" if sent_at is None else self._serving.spec.name,
            instance_id=self.instance_id,
            model=self._model,
            service_class=self.request.service_class,
            standing=self._standing,
            priority=self._priority,
            slots=slots if takes_slots else 0,
            stream=self._facts.stream,
            arrived_at=self._arrived_wall_at,
            sent_seconds=None if sent_at is None else sent_at - arrived_at,
            first_byte_seconds=None if self._first_byte_at is None else self._first_byte_at - arrived_at,
            total_seconds=now - arrived_at,
            held_seconds=self._held_seconds,
            added_seconds=self._added_seconds,
            outcome=outcome,
            status=status,
            reason=reason,
            detail=detail,
            prompt_tokens=0 if usage is None else usage.prompt_tokens,
            cached_tokens=0 if usage is None else usage.cached_tokens,
            completion_tokens=0 if usage is None else usage.completion_tokens,
            cost_units=self._cost.cost_units(usage) if usage is not None and takes_slots else 0.0,
            estimated=estimated,
            recalls=self._recalls,
            wasted_slot_seconds=self._wasted_slot_seconds,
            retries=self._retries,
        )
        if outcome is Outcome.FAILED:
            log.warning("request %s to %s failed: %s %s", self._id, self.instance_id, reason, detail)
        if self._reservation is not None:
            self._reservation.end(record.prompt_tokens + record.completion_tokens)
        self._driver.ended(self, record)

    def _measure(self, usage: Usage, now: float) -> None:
        """Learn from a request whose tokens the engine counted."""
        if usage.completion_tokens and self._sent_at is not None:
            slot_seconds = self.request.slots * (now - self._sent_at)
            self._serving.tokens_per_slot_second(self.instance_id).add(usage.completion_tokens, slot_seconds)
            if self._stream is not None:
                self.home.bytes_per_token(self._model).add(self._stream.text_bytes, usage.completion_tokens)

    def _estimated_usage(self, now: float) -> Usage:
        """What it consumed, when the engine's count never came (the one place where tokens are estimated)."""
        generated = 0.0
        if self._stream is not None:
            by_text = self._stream.text_bytes / self.home.bytes_per_token(self._model).value
            generated = max(self._stream.events, by_text)
        elif not self._facts.stream and self._sent_at is not None:
            per_second = self._serving.tokens_per_slot_second(self.instance_id).value
            generated = (now - self._sent_at) * per_second * self.request.slots
        if self._facts.max_tokens is not None:
            generated = min(generated, max(0, self._facts.max_tokens) * self.request.slots)
        return Usage(self._facts.estimated_prompt_tokens, 0, round(generated))
