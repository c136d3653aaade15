"""tinyspec serve: an OpenAI-compatible server on this machine."""

from collections.abc import Sequence
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import option
from tinyspec.cli.command import parse_literal
from tinyspec.errors import TinyspecError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command("serve", cls=base.KnobCommand)
@base.model_option
@option(
    "--method",
    default="suffix_decoding",
    help="For requests without a method: see `tinyspec methods`.",
)
@base.draft_option
@base.head_option
@base.knob_option
@option("--policy", default="sarathi", help="Which requests share a pass: see above.")
@option(
    "--policy-knob",
    "policy_knobs",
    multiple=True,
    metavar="NAME=VALUE",
    help="A knob of the policy; may be repeated.",
)
@option("--host", default="127.0.0.1", help="The address to listen on.")
@option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any that is free.")
@option("--max-live", type=base.POSITIVE, default=16, help="Texts that run at once.")
@option("--max-queued", type=click.IntRange(0), default=64, help="Texts that wait for a place.")
@option(
    "--max-slots",
    type=base.POSITIVE,
    help="Positions of the cache for all running texts. [default: no limit]",
)
@option("--api-key", envvar="TINYSPEC_API_KEY", help="Key of the clients. [default: nothing]")
@option("--device", default="cpu", help="cpu, cuda, or cuda:0.")
@option("--dtype", help="float32, bfloat16, float16, float64. [default: as stored]")
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    model: str,
    method: str,
    draft: list[str],
    head: list[str],
    knob: tuple[str, ...],
    policy: str,
    policy_knobs: tuple[str, ...],
    host: str,
    port: int,
    api_key: str | None,
    device: str,
    dtype: str | None,
    **limits: Any,
) -> None:
    """Serve a model to OpenAI clients. Requests share forward passes, and drafts.

    A greedy text is the one that `tinyspec generate` writes, whoever else is served; a sampled one
    too, as far as its seed decides it (see `tinyspec methods`). Ctrl-C or SIGTERM lets running
    requests finish for 30 s; a second one cuts them.

    \b
    GET  /                      a chat that colours accepted, recovered and bonus tokens
    GET  /health, /metrics      whether it is ready; counters for Prometheus
    GET  /v1/models             the model, and the methods that a request may name
    POST /v1/completions        a prompt, or several
    POST /v1/chat/completions   messages, for a model with a chat template

    \b
    Answered:  model, prompt, messages, max_tokens, max_completion_tokens, temperature, top_p,
               top_k, min_p, repetition_penalty, seed, stop, stream, stream_options.include_usage,
               logprobs (of the text's own tokens), prediction (a text to copy from)
    Own field: "tinyspec": {"method": ..., "knobs": {...}, "draft": ...}
    Not:       n, best_of, echo, suffix, penalties, logit_bias, tools, response_format,
               top_logprobs: only the value that asks for nothing. Anything else is error 400.
    The cache of an earlier request is not used again (no prefix caching).

    \b
    Policies:  lockstep    run all that wait
               fcfs        in the order of arrival (budget, chunk)
               aligned     keep unequal drafts in step (patience)
               sarathi     those that decode, then chunks of prompts (budget, least)

    \b
    Examples:
      tinyspec serve
      tinyspec serve --model smollm2 --method llma --port 8080
      tinyspec serve --policy sarathi --policy-knob budget=128 --max-live 8
      curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "Once upon a time"}'
    """
    try:
        from tinyspec.serve.app import make_server, open_socket
    except ModuleNotFoundError as error:
        raise TinyspecError(f"serve needs {error.name}: pip install 'tinyspec[serve]'") from error
    from tinyspec.generation import load_model
    from tinyspec.lm.host import share_one_heap
    from tinyspec.serve.engine import ServingEngine
    from tinyspec.technique import find_policy, find_technique

    share_one_heap()
    chosen = find_policy(policy, **read_policy_knobs(policy_knobs))
    knobs = base.read_knobs(ctx, knob, [method])
    base.assign_heads(head, [method], knobs)
    if api_key == "":
        raise TinyspecError("--api-key is empty: give a key, or leave it out")
    # Any request may use a draft, so those that the model's card names are loaded now.
    target, drafts = base.load_all(model, draft, [method, "speculative_decoding"], device, dtype)
    engine = ServingEngine(load_model(target), drafts, method, knobs[0], chosen, **limits)
    if find_technique(method).of_batch:
        click.echo(f"{method} runs a first batch: no request has to wait for its plan", err=True)
        engine.run_first_batch()
    listening = open_socket(host, port)
    name = f"[{host}]" if ":" in host else host
    click.echo(
        f"{engine.name} is served at http://{name}:{listening.getsockname()[1]} "
        f"(method {method}, policy {policy}); Ctrl-C stops it",
        err=True,
    )
    if host not in LOOPBACK:
        keyless = "" if api_key else ", without a key (--api-key)"
        click.echo(
            f"warning: {host} is not only this machine: whoever reaches it can use the "
            f"model{keyless}, and nothing is encrypted",
            err=True,
        )
    make_server(engine, api_key).run(sockets=[listening])


def read_policy_knobs(pairs: Sequence[str]) -> dict[str, Any]:
    """Return knobs given as NAME=VALUE."""
    knobs = dict[str, Any]()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise TinyspecError(f"--policy-knob {pair}: write NAME=VALUE, such as budget=128")
        knobs[name.strip().replace("-", "_")] = parse_literal(value.strip())
    return knobs
