"""`fairshare engine`: the stand-in for a vLLM or an SGLang server."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fairshare.errors import OperatorError

if TYPE_CHECKING:
    from fairshare.engine.server import EngineSettings


def register(app: typer.Typer) -> None:
    example = "fairshare engine --port 9001 --model tiny --max-num-seqs 16 --kv-tokens 65536 --policy priority"
    app.command("engine", epilog=f"Example: {example}")(engine)


def engine(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    model: Annotated[str, typer.Option(help="Name of the model it pretends to serve.")] = "tiny",
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests it runs at once (SGLang's --max-running-requests).")
    ] = 16,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Size of the KV cache in tokens, as vLLM counts it (one block is never used).")
    ] = 65_536,
    policy: Annotated[
        Literal["priority", "fcfs"],
        typer.Option(help="vLLM's --scheduling-policy. With fcfs, priorities are silently ignored."),
    ] = "fcfs",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Names that clients may use instead of --model; repeat for several.")
    ] = None,
    step_ms: Annotated[float, typer.Option(min=0, help="Time of a step, in milliseconds.")] = 10.0,
    token_us: Annotated[
        float, typer.Option(min=0, help="Time that every scheduled token adds to a step, in microseconds.")
    ] = 20.0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 2048,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt and answer; default: 4096, or what the KV cache holds.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV blocks of known prompt beginnings.")] = True,
    enable_prompt_tokens_details: Annotated[
        bool, typer.Option("--enable-prompt-tokens-details", help="Say in the usage how many tokens were cached.")
    ] = False,
    enable_request_id_headers: Annotated[
        bool, typer.Option("--enable-request-id-headers", help="Send x-request-id with every answer.")
    ] = False,
    enable_server_load_tracking: Annotated[
        bool, typer.Option("--enable-server-load-tracking", help="Count requests in flight for /load.")
    ] = False,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(min=1, help="Answer 503 beyond so many running and waiting requests.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="FAIRSHARE_ENGINE_API_KEY", help="Key for /v1 paths.")] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may still take after SIGTERM.")
    ] = 0.0,
    silent_sigterm: Annotated[
        bool,
        typer.Option("--silent-sigterm", help="Leave running requests open and silent on SIGTERM, as vLLM often does."),
    ] = False,
    dev_mode: Annotated[bool, typer.Option("--dev-mode", help="Open /server_info (VLLM_SERVER_DEV_MODE).")] = False,
    kind: Annotated[
        Literal["vllm", "sglang"], typer.Option(help="Which server it stands for; the options below are SGLang's.")
    ] = "vllm",
    enable_priority_scheduling: Annotated[
        bool, typer.Option("--enable-priority-scheduling", help="Without it, priorities are silently ignored.")
    ] = False,
    schedule_low_priority_values_first: Annotated[
        bool, typer.Option("--schedule-low-priority-values-first", help="Lower numbers go first.")
    ] = False,
    priority_scheduling_preemption_threshold: Annotated[
        int, typer.Option(min=0, help="A waiting request displaces one that is worse by more than this.")
    ] = 10,
    disable_priority_preemption: Annotated[
        bool, typer.Option("--disable-priority-preemption", help="A waiting request displaces nobody.")
    ] = False,
    retraction_policy: Annotated[
        Literal["length", "priority"], typer.Option(help="Who gives way when the KV cache is full.")
    ] = "length",
) -> None:
    """A stand-in for a vLLM server, or for an SGLang server: same rules, same answers, pseudo-text."""
    import uvloop

    from fairshare.engine.scheduler import Policy, SchedulerConfig
    from fairshare.engine.server import EngineSettings
    from fairshare.engine.sglang import SglangOptions

    sglang = SglangOptions(
        enable_priority_scheduling=enable_priority_scheduling,
        schedule_low_priority_values_first=schedule_low_priority_values_first,
        priority_scheduling_preemption_threshold=priority_scheduling_preemption_threshold,
        disable_priority_preemption=disable_priority_preemption,
        retraction_policy=retraction_policy,
    )
    if kind == "vllm" and sglang != SglangOptions():
        raise typer.BadParameter("the options of SGLang's priorities belong to --kind sglang")
    if kind == "sglang":
        policy = "priority" if enable_priority_scheduling else "fcfs"
    num_blocks = kv_tokens // block_size
    longest = (num_blocks - 1) * block_size
    try:
        settings = EngineSettings(
            model_names=tuple(served_model_name or (model,)),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=min(4096, longest) if max_model_len is None else max_model_len,
                policy=Policy(policy),
                prefix_caching=prefix_caching,
                step_seconds=step_ms / 1e3,
                token_seconds=token_us / 1e6,
            ),
            sglang=sglang if kind == "sglang" else None,
            api_key=api_key,
            prompt_tokens_details=enable_prompt_tokens_details,
            request_id_headers=enable_request_id_headers,
            load_tracking=enable_server_load_tracking,
            max_num_queued_reqs=max_num_queued_reqs,
            shutdown_timeout_seconds=shutdown_timeout,
            silent_sigterm=silent_sigterm,
            dev_mode=dev_mode,
        )
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    try:
        uvloop.run(_serve(settings, host, port))
    except OSError as problem:
        reason = (problem.strerror or str(problem)).lower()
        raise OperatorError(f"the engine cannot listen on {host} port {port} ({reason}); choose another port") from None


async def _serve(settings: "EngineSettings", host: str, port: int) -> None:
    import asyncio
    import signal

    from fairshare.engine.server import EngineServer

    server = EngineServer(settings, host=host, port=port)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await server.start()
    print(f"ready {server.url}", flush=True)
    await told.wait()
    await server.terminate()
