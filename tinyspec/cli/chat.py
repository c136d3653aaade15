"""tinyspec chat: a conversation."""

import io
import sys
from typing import TYPE_CHECKING, Any

import click

from tinyspec.cli import base
from tinyspec.cli.base import flag, option
from tinyspec.errors import TinyspecError

if TYPE_CHECKING:
    from tinyspec.lm.model import Model

Message = dict[str, str]  # "role" and "content"

HELP = "/reset forgets the conversation, /stats shows the last answer's figures, /quit ends"


@click.command("chat", cls=base.KnobCommand)
@option("--model", "-m", default="smollm2", help="A model with a chat template.")
@option("--method", default="auto", help="See `tinyspec methods`.")
@base.draft_option
@base.head_option
@base.knob_option
@option("--system", help="The system message.")
@base.sampling_options
@base.where_options
@flag("--stats", help="Print figures after every answer.")
@click.pass_context
def chat(ctx: click.Context, /, method: str, system: str | None, stats: bool, **given: Any) -> None:
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
      tinyspec chat --model path/to/folder -t 0.7 --top-p 0.9 --system "Answer in one sentence."
    """
    from tinyspec.generation import check_options

    chosen = base.GenerateOptions.take(ctx, given, method)
    target, drafts = chosen.load()
    if not target.tokenizer.has_chat:
        raise TinyspecError(
            f"{target.name} has no chat template: use `tinyspec generate`, or a chat model "
            "such as smollm2"
        )
    opening = [{"role": "system", "content": system}] if system else []
    options = {"method": method, "draft": drafts, **chosen.settings, **chosen.knobs[0]}
    check_options(**options)
    Conversation(target, opening, options, stats).run()


class Conversation:
    """Messages so far, and what to answer them with. Turn i uses seed + i."""

    def __init__(
        self, model: "Model", opening: list[Message], options: dict[str, Any], stats: bool
    ):
        self.model, self.opening, self.options, self.stats = model, opening, options, stats
        self.messages = list(opening)
        self.figures = "nothing was answered yet"

    def run(self) -> None:
        """Answer messages until the input ends."""
        if terminal := sys.stdin.isatty():
            import readline  # noqa: F401  # input() then edits lines and remembers them

            context = f"{self.model.config.max_positions} tokens of context"
            click.echo(f"{self.model.name}, {context}. {HELP}.", err=True)
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # `encode` refuses what is no text
        while True:
            try:
                message = input("> " if terminal else "").strip()
            except EOFError:
                return
            if message in ("/quit", "/exit"):
                return
            if message == "/reset":
                self.messages = list(self.opening)
                click.echo("(a new conversation)", err=True)
            elif message == "/stats":
                click.echo(self.figures, err=True)
            elif message.startswith("/"):
                click.echo(f"(there is no {message.split()[0]}: {HELP})", err=True)
            elif message:
                try:
                    self.answer(message)
                except TinyspecError as error:
                    click.echo(f"({error}; your message was not added)", err=True)

    def answer(self, message: str) -> None:
        """Answer one message. One that the context has no room for is taken back."""
        from tinyspec.generation import prompt_ids, start_generation

        asked = [*self.messages, {"role": "user", "content": message}]
        ids, room = prompt_ids(self.model, asked), self.model.config.max_positions
        if len(ids) >= room:
            click.echo(
                f"(the conversation would have {len(ids)} tokens, the context holds {room}: "
                "/reset forgets it; your message was not added)",
                err=True,
            )
            return
        running = start_generation(self.model, ids, **self.options)
        base.print_stream(running, escapes=True)
        click.echo()
        result = running.result()
        self.options["seed"] += 1
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        self.figures = base.describe_figures(self.model, result)
        if result.finish_reason == "context":
            full = f"the context of {room} tokens is full"
            click.echo(f"(cut: {full}; /reset forgets the conversation)", err=True)
        if self.stats:
            click.echo(self.figures, err=True)
