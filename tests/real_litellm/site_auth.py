"""LiteLLM's keys without its database: the key says the team. Imported by the proxy, not by the tests."""

from typing import Any

from litellm.proxy._types import ProxyException, UserAPIKeyAuth  # pyright: ignore[reportMissingImports]

TEAMS = {"sk-search": "search", "sk-ads": "ads", "sk-ads-batch": "ads", "sk-other": None}


async def user_api_key_auth(request: Any, api_key: str) -> Any:
    if api_key not in TEAMS:
        raise ProxyException(message="Unknown key.", type="auth_error", param=None, code=401)
    metadata = {"fairshare_class": "batch"} if api_key.endswith("batch") else {}
    return UserAPIKeyAuth(api_key=api_key, team_alias=TEAMS[api_key], metadata=metadata)
