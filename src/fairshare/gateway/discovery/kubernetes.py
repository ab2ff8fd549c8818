"""Instances from Kubernetes: lists a service's EndpointSlices, then watches them, as every controller does.

lightkube does what is hard to get right about reaching an API server (kubeconfig or service account, a token that is
renewed, certificates). The list and the watch are here: its own watch reconnects without a pause when a server ends it
at once, and does not tell when a server is reached again.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from fairshare import clock as clocks
from fairshare.clock import Clock
from fairshare.gateway.discovery.endpoints import Endpoints, EndpointSliceList, PortUnclear, Status, WatchEvent
from fairshare.gateway.discovery.source import LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS, Told, pause_seconds
from fairshare.gateway.options import KubernetesSource

ANSWER_SECONDS = 10.0
"""How long the API server may take to connect, and to begin to answer."""

WATCH_SECONDS = 240
"""After how long we ask the server to end a watch; then the next one begins where it ended."""

GONE = 410
"""What we know is older than what the server remembers: everything must be listed again."""

_LABEL = "kubernetes.io/service-name"


class _Unusable(Exception):
    """The server's answer cannot be used."""

    def __init__(self, trouble: str, *, gone: bool = False, retry_after_seconds: float = 0.0) -> None:
        super().__init__(trouble)
        self.gone = gone
        self.retry_after_seconds = retry_after_seconds


class KubernetesFollower:
    """Follows one service."""

    missing_seconds = 0.0

    def __init__(
        self,
        source: KubernetesSource,
        *,
        config: Callable[[], SingleConfig | None] = lambda: KubeConfig.from_env().get(),
        clock: Clock = clocks.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spread: Callable[[], float] = random.random,
    ) -> None:
        """`config` finds the API server; `spread` (0 to 1) keeps many gateways from asking in step."""
        self._source = source
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._spread = spread
        self._endpoints = Endpoints(source)

    async def follow(self, told: Told) -> None:
        """List and watch, again and again."""
        failures = 0
        while True:
            began_at, pause = self._clock(), 0.0
            try:
                config = self._config()
                if config is None:
                    raise ConfigError("no context is current")
                async with AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(ANSWER_SECONDS))) as client:
                    slices = _Slices(client, self._source, config.namespace)
                    while True:
                        began_at = self._clock()
                        await self._follow_once(slices, told)
                        failures = 0
                        # A watch that ends at once is no failure, but must not become a storm of questions.
                        if self._clock() - began_at < SHORTEST_PAUSE_SECONDS:
                            await self._sleep(SHORTEST_PAUSE_SECONDS * (1.0 + self._spread()))
            except _Unusable as unusable:
                trouble, pause = str(unusable), unusable.retry_after_seconds
                if unusable.gone:
                    known, self._endpoints.version = self._endpoints.version, ""
                    if known and not failures:
                        failures = 1
                        continue  # the ordinary way in which a watch grows old
            except ConfigError as error:
                trouble = (
                    f"no API server is configured ({error}); run in a pod with a service account, or set KUBECONFIG"
                )
            except msgspec.MsgspecError as error:
                trouble = f"the API server's answer is not as it must be ({error})"
            except (httpx2.HTTPError, OSError) as error:
                trouble = f"the API server does not answer ({_reason(error)})"
            if self._clock() - began_at > LONGEST_PAUSE_SECONDS:
                failures = 0  # it went well for a while
            failures += 1
            told.failed(trouble)
            await self._sleep(max(pause, pause_seconds(failures)) * (1.0 + self._spread() / 4))

    async def _follow_once(self, slices: "_Slices", told: Told) -> None:
        """Everything once if it is not known, then its changes until the server ends the watch."""
        endpoints = self._endpoints
        if not endpoints.version:
            endpoints.listed(await slices.list())
            self._tell(told)
        async with slices.watch(endpoints.version) as lines:
            self._tell(told)  # it is reached again, whatever was said before
            async for line in lines:
                event = msgspec.json.decode(line, type=WatchEvent)
                if event.type == "ERROR":
                    raise _of_status(msgspec.json.decode(event.object, type=Status), 0)
                if endpoints.changed(event):
                    self._tell(told)

    def _tell(self, told: Told) -> None:
        try:
            instances = self._endpoints.instances()
        except PortUnclear as unclear:
            told.failed(str(unclear))
        else:
            told.answered(instances)


class _Slices:
    """The API server's resource."""

    def __init__(self, client: httpx2.AsyncClient, source: KubernetesSource, own_namespace: str) -> None:
        self._client = client
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{source.namespace or own_namespace}/endpointslices"
        self._query = {"labelSelector": f"{_LABEL}={source.service}"}

    async def list(self) -> EndpointSliceList:
        answer = await self._client.get(self._path, params=self._query)
        if answer.status_code != 200:
            raise _of_answer(answer, answer.content)
        return msgspec.json.decode(answer.content, type=EndpointSliceList)

    @asynccontextmanager
    async def watch(self, version: str) -> AsyncGenerator[AsyncGenerator[str]]:
        query: dict[str, Any] = self._query | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        # The server ends the watch in time. If it does not, it, or the way to it, has gone without a word.
        timeout = httpx2.Timeout(ANSWER_SECONDS, read=WATCH_SECONDS + ANSWER_SECONDS)
        async with self._client.stream("GET", self._path, params=query, timeout=timeout) as answer:
            if answer.status_code != 200:
                raise _of_answer(answer, await answer.aread())
            yield _whole_lines(answer)


async def _whole_lines(answer: httpx2.Response) -> AsyncGenerator[str]:
    async for line in answer.aiter_lines():
        if line:
            yield line


def _of_answer(answer: httpx2.Response, body: bytes) -> _Unusable:
    try:
        status = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        status = Status()
    after = answer.headers.get("retry-after", "")
    unusable = _of_status(status, answer.status_code)
    if after.isascii() and after.isdigit():
        unusable.retry_after_seconds = min(LONGEST_PAUSE_SECONDS, float(after[:9]))
    return unusable


def _of_status(status: Status, http_status: int) -> _Unusable:
    code = status.code or http_status
    said = status.message or status.reason or "and says nothing more"
    return _Unusable(f"the API server answers {code}: {said}", gone=code == GONE)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
