"""An OpenAI-compatible server over the scheduler, in real time: the stand-in for a vLLM 0.32 server.

It answers as vLLM does, with the same endpoints, headers, error bodies, metrics and the same silence about a priority
it does not use. Two things differ on purpose: one server generates, embeds and transcribes (vLLM serves one kind of
model), and it behaves as if started with a tool-call parser. Log probabilities are not made.

With `EngineSettings.sglang` it stands for SGLang 0.5.23 in what concerns a gateway: its scheduler, priorities, metrics,
endpoints about the server, who needs a key, and the outside of its errors. What requests and answers hold stays vLLM's.
"""

import asyncio
import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from dataclasses import asdict, dataclass, field
from email import policy
from email.parser import BytesParser
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairshare.engine.answers import Telling, Told, encode
from fairshare.engine.asked import (
    Asked,
    Family,
    no_response,
    plan,
    read_chat,
    read_completion,
    read_messages,
    read_responses,
)
from fairshare.engine.bodies import (
    Body,
    Refusal,
    Unparsable,
    bad_request,
    error,
    invalid,
    read_json,
    read_salt,
)
from fairshare.engine.metrics import SglangMetrics
from fairshare.engine.pooling import Pooled, read_input, read_rerank, read_score
from fairshare.engine.scheduler import Scheduler, SchedulerConfig
from fairshare.engine.service import Answer, EngineService, Wanted
from fairshare.engine.sglang import SGLANG_VERSION, SglangOptions
from fairshare.engine.text import Script, chat_tokens, detokenize, token_bytes, tokenize, write

VLLM_VERSION = "0.32.0"
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Paths that need the key. The others never do, /tokenize and /pooling included."""
_ENGINE_INTEGERS = (-(2**63), 2**64 - 1)
"""What the engine's wire format can carry; a priority beyond it is an internal error."""
_AUDIO_BYTES_PER_SECOND = 32_000
_AUDIO_PROMPT_TOKENS = 4

_SGLANG_OPEN = ("/health", "/ready", "/metrics")
"""Paths of SGLang that need no key. All others do."""
_SGLANG_OVERRIDES = ("/v1/chat/completions", "/v1/messages")
"""Where SGLang looks at the header x-override-priority."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One stand-in server."""

    model_names: tuple[str, ...]
    """Names it serves; answers carry the first."""
    scheduler: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(prefix_caching=True))
    sglang: SglangOptions | None = None
    """Set: it is SGLang, with these flags."""
    api_key: str | None = None
    prompt_tokens_details: bool = False
    """`--enable-prompt-tokens-details`: whether usage says how many tokens were cached."""
    request_id_headers: bool = False
    load_tracking: bool = False
    max_num_queued_reqs: int | None = None
    shutdown_timeout_seconds: float = 0.0
    silent_sigterm: bool = False
    """What a SIGTERM without a timeout does to running requests: real servers do either. False: they end with finish
    reason `abort`. True: they stay open and silent until their clients leave."""
    dev_mode: bool = False
    """VLLM_SERVER_DEV_MODE: opens /server_info."""


class _Events:
    """A response of server-sent events. A client that leaves is noticed at once, also between two events."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _or_gone(self._send(send), receive)
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _or_gone(work: Awaitable[T], receive: Receive) -> T | None:
    """The result of the work, or None if the client left first (the work is cancelled then)."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EngineApp:
    """The ASGI application. `service.run()` must run beside it."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.service = EngineService(
            settings.scheduler,
            settings.model_names[0],
            settings.max_num_queued_reqs,
            Scheduler if settings.sglang is None else settings.sglang.scheduler,
        )
        self.load = 0
        self._started = int(time.time())
        post: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/v1/chat/completions": self._generates(read_chat, "chatcmpl"),
            "/v1/completions": self._generates(read_completion, "cmpl"),
            "/v1/responses": self._generates(read_responses, "resp"),
            "/v1/messages": self._generates(read_messages, "chatcmpl"),
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/embeddings": self._pools(lambda body: read_input(body, "embedding"), "embd"),
            "/pooling": self._pools(lambda body: read_input(body, "pooling"), "pooling"),
            "/score": self._pools(read_score, "score"),
            "/v1/score": self._pools(read_score, "score"),
            "/rerank": self._pools(read_rerank, "score"),
            "/v1/rerank": self._pools(read_rerank, "score"),
            "/v2/rerank": self._pools(read_rerank, "score"),
            "/v1/audio/transcriptions": self._transcribes("transcription", "trsc"),
            "/v1/audio/translations": self._transcribes("translation", "trsl"),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        get: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/v1/models": self._models,
            "/v1/responses/{response_id}": self._stored_response,
            "/health": self._nothing,
            "/version": self._version,
            "/load": self._load,
            "/metrics": self._metrics,
        }
        self._rendered = self.service.metrics.render
        if settings.sglang is not None:
            get |= dict.fromkeys(("/ready", "/health_generate"), self._nothing)
            get |= dict.fromkeys(("/server_info", "/get_server_info"), self._sglang_info)
            del get["/version"], get["/load"]
            kv_tokens = settings.scheduler.num_blocks * settings.scheduler.block_size
            self._rendered = SglangMetrics(
                self.service.metrics, model_name=settings.model_names[0], kv_tokens=kv_tokens
            ).render
        elif settings.dev_mode:
            get["/server_info"] = self._server_info
        routes = [self._route(path, "POST", handler) for path, handler in post.items()]
        routes += [self._route(path, "GET", handler) for path, handler in get.items()]
        routes.append(self._route("/ping", "GET", self._nothing, "POST"))
        self._app = Starlette(routes=routes, exception_handlers={HTTPException: _framework_error})

    def _route(self, path: str, method: str, handler: Callable[[Request], Awaitable[ASGIApp]], *more: str) -> Route:
        async def endpoint(request: Request) -> Any:
            try:
                return await handler(request)
            except Refusal as refusal:
                # Errors of the body itself have OpenAI's form on every endpoint.
                if self.settings.sglang is not None:
                    return _json({"object": "error", **refusal.openai()["error"]}, refusal.status)
                anthropic = path.startswith("/v1/messages") and refusal.kind != "Bad Request"
                return _json(refusal.anthropic() if anthropic else refusal.openai(), refusal.status)
            except Unparsable:
                return _json({"detail": "There was an error parsing the body"}, 400)
            except ClientDisconnect:
                return Response(status_code=400)

        route = Route(path, endpoint, methods=[method, *more])
        assert route.methods is not None
        route.methods.discard("HEAD")  # vLLM's routes do not answer it
        return route

    # ------------------------------------------------------------------ around every request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self.settings.request_id_headers:
            send = _with_request_id(send, headers.get("x-request-id", secrets.token_hex(16)))
        if self._needs_key(scope) and not self._has_key(headers.get("authorization", "")):
            await _json({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        tracked = self.settings.load_tracking and scope["method"] == "POST"
        self.load += tracked
        try:
            await self._app(scope, receive, send)
        finally:
            self.load -= tracked

    def _needs_key(self, scope: Scope) -> bool:
        path = str(scope["path"])
        guarded = path.startswith(_GUARDED) if self.settings.sglang is None else not path.startswith(_SGLANG_OPEN)
        return self.settings.api_key is not None and scope["method"] != "OPTIONS" and guarded

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        wanted = hashlib.sha256((self.settings.api_key or "").encode()).digest()
        found = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        return scheme.lower() == "bearer" and secrets.compare_digest(wanted, found)

    def _check_model(self, model: str | None) -> None:
        # SGLang serves whatever name is asked for.
        if model and model not in self.settings.model_names and self.settings.sglang is None:
            names = ", ".join(self.settings.model_names)
            message = f"The model `{model}` does not exist. Valid aliases: {names}."
            raise Refusal(404, "NotFoundError", message, "model")

    def _check_accepting(self) -> None:
        if not self.service.accepting:
            raise Refusal(500, "InternalServerError", "cannot schedule new futures after shutdown")

    @property
    def _max_model_len(self) -> int:
        return self.settings.scheduler.max_model_len

    # ------------------------------------------------------------------ generation

    def _generates(self, read: Callable[[Body], Asked], prefix: str) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def generate(request: Request) -> ASGIApp:
            asked = read(await _body(request))
            self._check_model(asked.model)
            self.service.check_admission(asked.n)
            planned = plan(asked, self._max_model_len)
            self._check_accepting()
            salt = read_salt(asked.fields)
            wanted = [
                Wanted(planned.prompt_of(index), script, planned.max_tokens, asked.n, salt)
                for index, script in enumerate(planned.scripts)
            ]
            telling = Telling(
                planned,
                f"{prefix}-{_request_id(request)}" if prefix != "resp" else f"resp_{_request_id(request)}",
                asked.model or self.settings.model_names[0],
                int(time.time()),
                self.settings.scheduler.block_size if self.settings.scheduler.prefix_caching else None,
                self.settings.prompt_tokens_details,
            )
            priority = self._priority(request, asked)
            if priority is not None and not _ENGINE_INTEGERS[0] <= priority <= _ENGINE_INTEGERS[1]:
                failure = Refusal(500, "InternalServerError", "")
                if not asked.stream:
                    raise failure
                return _Events(_failed_stream(failure, asked.family))
            answer = self.service.submit(wanted, priority=priority, request_id=telling.id)
            if asked.stream:
                return _Events(self._stream(telling, answer))
            await _or_gone(self._collect(telling, answer), request.receive)
            return _json(telling.whole())

        return generate

    def _priority(self, request: Request, asked: Asked) -> int | None:
        if self.settings.sglang is None:
            return _priority(request, asked.priority)
        header = request.headers.get("x-override-priority")
        if header is not None and request.url.path in _SGLANG_OVERRIDES:
            try:
                return int(header)
            except ValueError as problem:
                raise HTTPException(400, f"invalid x-override-priority header {header!r}: {problem}") from problem
        return asked.priority if "priority" in asked.fields else None

    async def _stream(self, telling: Telling, answer: Answer) -> AsyncGenerator[bytes]:
        try:
            begun = False
            async for told in self._told(telling, answer):
                if not begun:
                    begun = True
                    for event in telling.begin():
                        yield event
                for event in telling.go_on(told):
                    yield event
            for event in telling.end():
                if event:
                    yield event
        finally:
            self.service.abort(answer)

    async def _collect(self, telling: Telling, answer: Answer) -> None:
        try:
            async for told in self._told(telling, answer):
                telling.add(told)
        finally:
            self.service.abort(answer)

    async def _told(self, telling: Telling, answer: Answer) -> AsyncIterator[Told]:
        while new := await answer.take():
            telling.cached_tokens = answer.cached_tokens or 0
            for delta in new:
                yield Told(choice=delta.choice, tokens=delta.tokens, finish_reason=delta.finish_reason)

    async def _stored_response(self, request: Request) -> ASGIApp:
        raise no_response(request.path_params["response_id"])

    async def _count_tokens(self, request: Request) -> ASGIApp:
        asked = read_messages(await _body(request), counting=True)
        self._check_model(asked.model)
        count = sum(len(prompt.tokens) for prompt in asked.prompts)
        return _json({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    # ------------------------------------------------------------------ without generated tokens

    def _pools(self, read: Callable[[Body], Pooled], prefix: str) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def pool(request: Request) -> ASGIApp:
            body = await _body(request)
            pooled = read(body)
            self._check_model(pooled.model)
            pooled.check(self._max_model_len)
            self._check_accepting()
            self.service.check_admission(len(pooled.prompts))
            answer_id = f"{prefix}-{_request_id(request)}"
            salt = read_salt(body.fields)
            wanted = [Wanted(prompt.tokens, None, salt=salt) for prompt in pooled.prompts]
            # These endpoints know the body's priority only; the header is ignored.
            priority = None if self.settings.sglang is not None and "priority" not in body.fields else pooled.priority
            answer = self.service.submit(wanted, priority=priority, request_id=answer_id)
            await _or_gone(self._finish(answer), request.receive)
            model = pooled.model or self.settings.model_names[0]
            return _json(pooled.answer(answer_id, model, int(time.time())))

        return pool

    async def _finish(self, answer: Answer) -> None:
        try:
            while await answer.take():
                pass
        finally:
            self.service.abort(answer)

    # ------------------------------------------------------------------ audio

    def _transcribes(self, kind: str, prefix: str) -> Callable[[Request], Awaitable[ASGIApp]]:
        async def transcribe(request: Request) -> ASGIApp:
            form, audio = _multipart(request.headers.get("content-type", ""), await request.body())
            if audio is None:
                raise invalid(error("missing", "body.file", "Field required", None))
            self._check_model(form.get("model"))
            self._check_accepting()
            self.service.check_admission(1)
            if not audio:
                raise bad_request("Invalid or unsupported audio file.")
            seconds = max(1, -(-len(audio) // _AUDIO_BYTES_PER_SECOND))
            prompt = tokenize(hashlib.sha256(audio).hexdigest()[: 4 * _AUDIO_PROMPT_TOKENS])
            script = write(prompt, 0, max_tokens=min(4 * seconds, self._max_model_len - len(prompt)))
            answer_id = f"{prefix}-{_request_id(request)}"
            # No field and no header: vLLM's engine gets these requests with priority 0, SGLang's without.
            priority = 0 if self.settings.sglang is None else None
            answer = self.service.submit([Wanted(prompt, script)], priority=priority, request_id=answer_id)
            if form.get("stream", "").lower() in ("true", "1"):
                return _Events(self._transcript(f"{kind}.chunk", answer_id, form, script, len(prompt), answer))
            await _or_gone(self._finish(answer), request.receive)
            text = script.text(script.tokens)
            if form.get("response_format") == "text":
                return Response(text, media_type="text/plain")
            return _json({"text": text, "usage": {"type": "duration", "seconds": seconds}})

        return transcribe

    async def _transcript(
        self, kind: str, answer_id: str, form: dict[str, str], script: Script, prompt: int, answer: Answer
    ) -> AsyncGenerator[bytes]:
        chunk: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": form.get("model") or self.settings.model_names[0],
        }
        shown = 0
        try:
            while new := await answer.take():
                for delta in new:
                    text = "".join(script.pieces[shown : shown + delta.tokens])
                    shown += delta.tokens
                    choice = {"delta": {"content": text}, "finish_reason": delta.finish_reason, "stop_reason": None}
                    yield b"data: " + encode(chunk | {"choices": [choice]}) + b"\n\n"
            if form.get("stream_include_usage", "").lower() in ("true", "1"):
                usage = {"prompt_tokens": prompt, "total_tokens": prompt + shown, "completion_tokens": shown}
                yield b"data: " + encode(chunk | {"choices": [], "usage": usage}) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.service.abort(answer)

    # ------------------------------------------------------------------ tokens

    async def _tokenize(self, request: Request) -> ASGIApp:
        body = await _body(request)
        model, with_texts = body.string("model"), body.flag("return_token_strs")
        prompt = body.string("prompt")
        tokens: list[int] = []
        if prompt is not None:
            tokens = tokenize(prompt)
        elif "messages" in body:
            tokens = read_chat(Body(body.fields)).prompts[0].tokens if body.fields["messages"] else chat_tokens([])
        else:
            body.missing("prompt")
            body.missing("messages")
        body.check()
        self._check_model(model)
        texts = [token_bytes(token).decode("utf-8", "replace") for token in tokens] if with_texts else None
        return _json(
            {"count": len(tokens), "max_model_len": self._max_model_len, "tokens": tokens, "token_strs": texts}
        )

    async def _detokenize(self, request: Request) -> ASGIApp:
        body = await _body(request)
        tokens = body.items("tokens")
        if tokens is None and "tokens" not in body:
            body.missing("tokens")
        model = body.string("model")
        body.check()
        self._check_model(model)
        return _json({"prompt": detokenize([token for token in tokens or [] if isinstance(token, int)])})

    # ------------------------------------------------------------------ about the server

    async def _models(self, request: Request) -> ASGIApp:
        return _json({"object": "list", "data": [self._model_card(name) for name in self.settings.model_names]})

    def _model_card(self, name: str) -> dict[str, Any]:
        permission: dict[str, Any] = {
            "id": f"modelperm-{secrets.token_hex(8)}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "vllm" if self.settings.sglang is None else "sglang",
            "root": self.settings.model_names[0],
            "parent": None,
            "max_model_len": self._max_model_len,
            "permission": [permission],
        }

    async def _nothing(self, request: Request) -> ASGIApp:
        return Response(status_code=200)

    async def _version(self, request: Request) -> ASGIApp:
        return _json({"version": VLLM_VERSION})

    async def _load(self, request: Request) -> ASGIApp:
        return _json({"server_load": self.load})

    async def _metrics(self, request: Request) -> ASGIApp:
        text, content_type = self._rendered()
        return Response(text, headers={"content-type": content_type})

    async def _server_info(self, request: Request) -> ASGIApp:
        scheduler = self.settings.scheduler
        config: dict[str, Any] = {
            "model_config": {
                "model": self.settings.model_names[0],
                "served_model_name": self.settings.model_names[0],
                "max_model_len": scheduler.max_model_len,
            },
            "cache_config": {
                "block_size": scheduler.block_size,
                "enable_prefix_caching": scheduler.prefix_caching,
                "num_gpu_blocks": scheduler.num_blocks,
                "kv_cache_size_tokens": scheduler.num_blocks * scheduler.block_size,
            },
            "scheduler_config": {
                "max_num_seqs": scheduler.max_num_seqs,
                "max_num_active_seqs": None,
                "max_num_batched_tokens": scheduler.max_num_batched_tokens,
                "max_num_queued_reqs": self.settings.max_num_queued_reqs,
                "policy": scheduler.policy.value,
                "async_scheduling": False,
            },
        }
        as_json = request.query_params.get("config_format", "text") == "json"
        return _json({"vllm_config": config if as_json else str(config), "vllm_env": {}, "system_env": {}})

    async def _sglang_info(self, request: Request) -> ASGIApp:
        scheduler, flags = self.settings.scheduler, self.settings.sglang
        assert flags is not None
        return _json(
            {
                **asdict(flags),
                "model_path": self.settings.model_names[0],
                "served_model_name": self.settings.model_names[0],
                "context_length": scheduler.max_model_len,
                "max_running_requests": scheduler.max_num_seqs,
                "max_total_num_tokens": scheduler.num_blocks * scheduler.block_size,
                "internal_states": [{"effective_max_running_requests_per_dp": scheduler.max_num_seqs}],
                "version": SGLANG_VERSION,
            }
        )


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")


async def _framework_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    return JSONResponse({"detail": problem.detail}, problem.status_code, problem.headers)


async def _body(request: Request) -> Body:
    return read_json(request.headers.get("content-type", ""), await request.body())


def _request_id(request: Request) -> str:
    return request.headers.get("x-request-id") or secrets.token_hex(8)


def _priority(request: Request, in_body: int) -> int:
    """The header wins over the body, unless it is no integer."""
    header = request.headers.get("x-vllm-priority")
    if header is not None:
        with contextlib.suppress(ValueError):
            return int(header)
    return in_body


async def _failed_stream(failure: Refusal, family: Family) -> AsyncGenerator[bytes]:
    if family is Family.MESSAGES:
        yield b"event: error\ndata: " + encode(failure.anthropic()) + b"\n\n"
        return
    yield b"data: " + encode(failure.openai()) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _with_request_id(send: Send, request_id: str) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
        await send(message)

    return send_with_id


def _multipart(content_type: str, data: bytes) -> tuple[dict[str, str], bytes | None]:
    """The text fields of a form, and the bytes of its file."""
    if not content_type.lower().startswith("multipart/form-data"):
        return {}, None
    header = b"Content-Type: " + content_type.encode("latin-1") + b"\r\n\r\n"
    message = BytesParser(policy=policy.HTTP).parsebytes(header + data)
    fields: dict[str, str] = {}
    audio: bytes | None = None
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        payload = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(payload, bytes):
            continue
        if name == "file":
            audio = payload
        else:
            fields[name] = payload.decode("utf-8", "replace")
    return fields, audio


# ---------------------------------------------------------------------- the process


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to us and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class EngineServer:
    """A running stand-in: `async with EngineServer(settings) as server: ... server.url`."""

    def __init__(self, settings: EngineSettings, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.app = EngineApp(settings)
        self._settings = settings
        self._address = (host, port)
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._uvicorn: _Uvicorn | None = None

    @property
    def url(self) -> str:
        """Its address, once it has started; the port is a free one if 0 was asked for."""
        assert self._socket is not None
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Returns when it listens. OSError: the address cannot be used."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(self._address)
        except OSError:
            self._socket.close()
            raise
        config = uvicorn.Config(self.app, log_config=None, log_level="warning", access_log=False, lifespan="off")
        self._uvicorn = _Uvicorn(config)
        serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        self._tasks = [serving, asyncio.ensure_future(self.app.service.run())]
        await self._uvicorn.listening.wait()

    async def terminate(self) -> None:
        """What SIGTERM does; returns when the process could end."""
        service, timeout_seconds = self.app.service, self._settings.shutdown_timeout_seconds
        if timeout_seconds > 0:
            service.accepting = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.wait_idle(), timeout_seconds)
            service.end_all()
        elif self._settings.silent_sigterm:
            self._tasks[1].cancel()
        else:
            service.end_all()
        assert self._uvicorn is not None
        self._uvicorn.should_exit = True
        await self.wait()

    async def wait(self) -> None:
        """Until it no longer listens and all answers have been sent."""
        await asyncio.wait(self._tasks[:1])

    async def stop(self) -> None:
        """Ends it now, whatever runs: connections are cut."""
        assert self._uvicorn is not None
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        self.app.service.end_all()
        await self.wait()
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._socket is not None
        self._socket.close()

    async def __aenter__(self) -> "EngineServer":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
