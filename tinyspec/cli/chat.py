"""tinyspec chat: a conversation."""

import sys
from typing import Any

import click

from tinyspec.cli import base
from tinyspec.errors import TinyspecError

HELP = "/reset forgets the conversation, /stats shows the last answer's figures, /quit ends"


@click.command("chat", cls=base.KnobCommand)
@base.options(
    click.option(
        "--model", "-m", default="smollm2", show_default=True, help="A model with a chat template."
    ),
    click.option("--method", default="llma", show_default=True, help="See `tinyspec methods`."),
    base.draft_option,
    base.knob_option,
    click.option("--system", help="The system message."),
    base.sampling_options,
    base.where_options,
    click.option("--stats", is_flag=True, help="Print figures after every answer."),
)
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    model: str,
    method: str,
    draft: list[str],
    knob: tuple[str, ...],
    system: str | None,
    seed: int,
    device: str,
    dtype: str | None,
    stats: bool,
    **sampling: Any,
) -> None:
    """Talk to a chat model, turn by turn.

    \b
    /reset   forget the conversation
    /stats   calls, acceptance and time of the last answer
    /quit    end (so does Ctrl-D)
    Ctrl-C stops an answer and keeps what there is of it; at the prompt it ends the conversation.

    \b
    Examples:
      tinyspec models fetch smollm2
      tinyspec chat
      tinyspec chat --model path/to/folder --temperature 0.7 --top-p 0.9 --system "Be brief."
    """
    knobs = base.given_knobs(ctx, knob)
    base.settle(ctx, knobs, [method])
    target, small = base.load_all(model, draft, [method], device, dtype)
    if not target.tokenizer.has_chat:
        raise TinyspecError(
            f"{target.name} has no chat template: use `tinyspec generate`, or a chat model such as smollm2"
        )
    opening = [{"role": "system", "content": system}] if system else []
    options = {"method": method, "draft": small, **sampling, **knobs}
    _Conversation(target, opening, options, seed, stats).run()


class _Conversation:
    """Messages so far, and what to answer them with. Turn i uses seed + i."""

    def __init__(
        self,
        model: Any,
        opening: list[dict[str, str]],
        options: dict[str, Any],
        seed: int,
        stats: bool,
    ):
        self.model, self.opening, self.options, self.seed, self.stats = (
            model,
            opening,
            options,
            seed,
            stats,
        )
        self.messages = list(opening)
        self.turn = 0
        self.figures = "nothing was answered yet"

    def run(self) -> None:
        if terminal := sys.stdin.isatty():
            import readline  # noqa: F401  # input() then edits lines and remembers them

            click.echo(
                f"{self.model.name}, {self.model.config.max_positions} tokens of context. {HELP}.",
                err=True,
            )
        while True:
            try:
                said = input("> " if terminal else "").strip()
            except EOFError:
                return
            if said in ("/quit", "/exit"):
                return
            if said == "/reset":
                self.messages = list(self.opening)
                click.echo("(a new conversation)", err=True)
            elif said == "/stats":
                click.echo(self.figures, err=True)
            elif said.startswith("/"):
                click.echo(f"(there is no {said.split()[0]}: {HELP})", err=True)
            elif said:
                self.answer(said)

    def answer(self, said: str) -> None:
        """One turn. A message that the context has no room for is taken back, and said so."""
        from tinyspec.generation import TextStreamer, prompt_ids, start
        from tinyspec.show.display import describe_layers, statistics, visible

        asked = [*self.messages, {"role": "user", "content": said}]
        ids, room = prompt_ids(self.model, asked), self.model.config.max_positions
        if len(ids) >= room:
            click.echo(
                f"(the conversation would have {len(ids)} tokens, the context holds {room}: /reset forgets it; "
                "your message was not added)",
                err=True,
            )
            return
        running = start(self.model, ids, seed=self.seed + self.turn, **self.options)
        growing = TextStreamer(running)
        try:
            for piece in growing:
                click.echo(visible(piece), nl=False)
        except KeyboardInterrupt:
            running.close("interrupted")
            click.echo(growing.rest(), nl=False)
        click.echo()
        result = running.result()
        self.turn += 1
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        layers = describe_layers(result.trace.layers_run, self.model.config.n_layers)
        self.figures = statistics(result.stats, result.finish_reason, layers)
        if result.finish_reason == "context":
            click.echo(
                f"(cut: the context of {room} tokens is full; /reset forgets the conversation)",
                err=True,
            )
        if self.stats:
            click.echo(self.figures, err=True)
