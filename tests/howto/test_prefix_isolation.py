"""docs/howto/prefix-isolation.md, with the configuration that stands there, on the stand-in engine."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from fairshare.compose import Gateway
from fairshare.config import parse
from fairshare.engine.scheduler import SchedulerConfig
from fairshare.engine.server import EngineServer, EngineSettings
from howto.pages import blocks

(PAGE,) = blocks("prefix-isolation.md", "yaml")
PROMPT = "You are an assistant of a company that sells garden chairs. " * 8


@asynccontextmanager
async def serving(folder: Path, page: str) -> AsyncIterator[str]:
    """The page's gateway before a stand-in that says how many tokens it found in its cache."""
    scheduler = SchedulerConfig(prefix_caching=True, step_seconds=1e-4, token_seconds=0.0)
    (folder / "prefix.secret").write_text("5e" * 32 + "\n")
    async with EngineServer(
        EngineSettings(model_names=("tiny",), scheduler=scheduler, prompt_tokens_details=True)
    ) as engine:
        text = page.replace("http://127.0.0.1:9001", engine.url).replace(":8080", ":0").replace(":8081", ":0")
        for team in ("search", "ads"):
            digest = hashlib.sha256(f"fs-{team}".encode()).hexdigest()
            text = text.replace("<what fairshare keys new prints>", digest, 1)
        gateway = Gateway(parse(text + "store: none\n", path=folder / "fairshare.yaml", environ={}))
        await gateway.start()
        try:
            yield f"http://{gateway.listening_at}"
        finally:
            await gateway.stop()


async def cached_tokens(url: str, team: str, salt: str | None = None) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/chat/completions",
            json=body if salt is None else body | {"cache_salt": salt},
            headers={"authorization": f"Bearer fs-{team}"},
        )
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_team_finds_what_it_sent_and_another_team_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, PAGE) as url:
            assert await cached_tokens(url, "search") == 0
            assert await cached_tokens(url, "search") > 64
            assert await cached_tokens(url, "ads") == 0
            assert await cached_tokens(url, "ads") > 64

    asyncio.run(main())


def test_without_isolation_a_team_finds_what_another_sent(tmp_path: Path) -> None:
    async def main() -> None:
        page = PAGE.replace("    isolate_prefixes: team\n    prefix_secret_file: prefix.secret\n", "")
        assert page != PAGE
        async with serving(tmp_path, page) as url:
            assert await cached_tokens(url, "search") == 0
            assert await cached_tokens(url, "ads") > 64

    asyncio.run(main())


def test_a_clients_own_salt_divides_its_teams_cache_and_opens_nobody_elses(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, PAGE) as url:
            assert await cached_tokens(url, "search", "one") == 0
            assert await cached_tokens(url, "search", "one") > 64
            assert await cached_tokens(url, "search", "two") == 0
            assert await cached_tokens(url, "search") == 0
            assert await cached_tokens(url, "ads", "one") == 0

    asyncio.run(main())
