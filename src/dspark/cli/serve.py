"""`dspark serve`: an OpenAI-compatible server with metrics and a live page."""

import difflib
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli import options
from dspark.core.errors import ConfigError


def use_file(context: typer.Context, file: Path | None) -> Path | None:
    """Makes a file's values the defaults of this command's flags. ConfigError for a bad file."""
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as a TOML file: {error}") from None
    own = ("config", "help", "debug")
    parameters = {p.name.replace("_", "-"): p.name for p in context.command.params if p.name}
    names = [name for name in parameters if name not in own]
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"
            raise ConfigError(f"{file} has the unknown key {key!r}{hint}")
        if isinstance(value, dict | list):
            raise ConfigError(f"{key} in {file} must be one value, as on the command line")
    context.default_map = {parameters[key]: value for key, value in values.items()}
    return file


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Settings, named like these flags; flags that are given win.",
            is_eager=True,
            callback=use_file,
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 lets the system choose.")] = 8000,
    target: options.Target = None,
    draft: options.Draft = "auto",
    draft_length: options.DraftLength = None,
    policy: options.Policy = None,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate",
            help="Recalibrate the confidences on what is served, and verify one round in "
            "a hundred whole for it.",
        ),
    ] = False,
    weights: options.Weights = None,
    device: options.Device = "cpu",
    cuda_graphs: options.CudaGraphs = None,
    threads: options.Threads = None,
    max_requests: Annotated[
        int, typer.Option(help="Requests that decode at once; more wait in a queue.")
    ] = 32,
    many_requests: options.ManyRequests = False,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused with 429.")
    ] = 256,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of all requests together that the cache holds. "
            "Default: half of the memory that is free, or what the requests can need.",
            show_default=False,
        ),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model. Default: its name.", show_default=False),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="API keys, one a line. Default: the environment's DSPARK_API_KEYS, else no check.",
            show_default=False,
        ),
    ] = None,
    default_tokens: Annotated[
        int, typer.Option(help="New tokens of a chat request that names no limit.")
    ] = 1024,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Longest prompt. Default: what fits the context.", show_default=False),
    ] = None,
    max_choices: Annotated[int, typer.Option(help="Most answers to one request.")] = 16,
    max_body_kib: Annotated[int, typer.Option(help="Largest request body, in KiB.")] = 1024,
    requests_per_minute: Annotated[int, typer.Option(help="Per API key; 0 is no limit.")] = 0,
    concurrent_requests: Annotated[int, typer.Option(help="Per API key; 0 is no limit.")] = 0,
    receive_timeout: Annotated[
        float, typer.Option(help="Seconds that a client may be silent while it sends a request.")
    ] = 30.0,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds that a request may take in all.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get after SIGTERM or Ctrl-C.")
    ] = 30.0,
    pipeline: Annotated[
        bool,
        typer.Option("--pipeline", help="Write texts in a thread while the next step computes."),
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write what users ask to the log.")
    ] = False,
    debug: options.Debug = False,
) -> None:
    """Serve the model: OpenAI's API, metrics, and a live page."""
    from dspark.recipes.llm import LLM
    from dspark.recipes.progress import Progress
    from dspark.recipes.serve import EngineConfig, ServerConfig, require_serve_extra
    from dspark.recipes.serve import serve as run

    require_serve_extra()
    settings = ServerConfig(
        host=host,
        port=port,
        model_name=model_name,
        api_keys=api_keys,
        default_tokens=default_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_choices=max_choices,
        max_body_kib=max_body_kib,
        requests_per_minute=requests_per_minute,
        concurrent_requests=concurrent_requests,
        receive_timeout=receive_timeout,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        log_prompts=log_prompts,
    )
    engine = EngineConfig(
        max_requests=max_requests,
        max_waiting=max_waiting,
        cache_tokens=cache_tokens,
        pipeline=pipeline,
    )
    progress = Progress()
    load = partial(
        LLM,
        target,
        draft=draft,
        draft_length=draft_length,
        policy=policy,
        recalibrate=recalibrate,
        weights=weights,
        device=device,
        cuda_graphs=cuda_graphs,
        threads=threads,
        many_requests=many_requests,
        progress=progress,
    )
    run(load, settings, engine, progress.say)
