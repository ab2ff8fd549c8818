"""fairshare inside LiteLLM's proxy: `litellm_settings: {callbacks: fairshare.integrations.litellm.callback}`.

Imported by LiteLLM only. Its options stand under `fairshare_settings` in LiteLLM's own configuration file, or in the
file that FAIRSHARE_CONFIG names.
"""

import os
from pathlib import Path

import litellm.proxy.proxy_server as proxy  # pyright: ignore[reportMissingImports]
from litellm.integrations.custom_logger import (  # pyright: ignore[reportMissingImports]
    CustomLogger,  # pyright: ignore[reportUnknownVariableType]
)
from litellm.proxy._types import ProxyException  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

from fairshare.config import load_embedded
from fairshare.gateway.options import EmbeddedSpec
from fairshare.integrations.admission import TooWide, TurnedAway
from fairshare.integrations.litellm_hooks import Hooks


def _refusal(refused: TurnedAway | TooWide) -> Exception:
    problem = refused.problem
    later = {"retry-after": str(refused.retry_after_seconds)} if isinstance(refused, TurnedAway) else {}
    return ProxyException(  # pyright: ignore[reportUnknownVariableType]
        message=str(refused),
        type=problem.type,
        param=None,
        code=problem.status,
        headers=later,
        openai_code=problem.code,
    )


class FairshareCallback(Hooks, CustomLogger):  # pyright: ignore[reportUntypedBaseClass]
    """The hooks, as LiteLLM knows them."""

    def __init__(self, options: EmbeddedSpec) -> None:
        CustomLogger.__init__(self)  # pyright: ignore[reportUnknownMemberType]
        Hooks.__init__(self, options, _refusal)

    # LiteLLM looks for some of its hooks in the class itself, not in its bases.
    async_pre_call_hook = Hooks.async_pre_call_hook
    async_pre_call_deployment_hook = Hooks.async_pre_call_deployment_hook
    async_post_call_success_hook = Hooks.async_post_call_success_hook
    async_post_call_failure_hook = Hooks.async_post_call_failure_hook
    async_post_call_streaming_iterator_hook = Hooks.async_post_call_streaming_iterator_hook
    async_post_call_response_headers_hook = Hooks.async_post_call_response_headers_hook


def _options() -> EmbeddedSpec:
    own: object = proxy.user_config_file_path  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    named = os.environ.get("FAIRSHARE_CONFIG") or f"{own}"
    return load_embedded(Path(named), os.environ)


callback = FairshareCallback(_options())
