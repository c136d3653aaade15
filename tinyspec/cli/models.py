"""tinyspec models and tinyspec data: what is on this machine, and how to get more."""

import json
from pathlib import Path

import click

from tinyspec.cli import base
from tinyspec.cli.base import OUTPUT_FOLDER, flag, option

QUANTISED_KINDS = ("q8_0", "q4_0", "q4_1")  # as in lm/quantised.py
HEAD_FORMATS = ("speculators", "vllm-medusa", "vllm-eagle")  # as in lm/head_formats.py


@click.group("models", cls=base.Group)
def models() -> None:
    """Models: list them, fetch one, read its card.

    \b
    Examples:
      tinyspec models list
      tinyspec models fetch smollm2
      tinyspec models card storyteller
    """


@models.command("list")
@flag("--json", "as_json", help="A JSON list on standard output.")
def list_models(as_json: bool) -> None:
    """Every model known by name: bundled, fetched before, or to be fetched.

    A checkpoint folder in Hugging Face's format, a .gguf file and a hub id (org/name) serve as
    --model too.

    \b
    Examples:
      tinyspec models list
      tinyspec models list --json
    """
    from tinyspec.models import list_known

    known = list_known()
    if as_json:
        entries = [
            {"name": m.name, "state": m.state, "path": m.path and str(m.path), "summary": m.summary}
            for m in known
        ]
        click.echo(json.dumps(entries))
        return
    rows = [(model.name, model.state, model.summary) for model in known]
    base.print_table(("model", "state", "summary"), rows)


@models.command("fetch")
@click.argument("name")
@base.quiet_option
def fetch_model(name: str, quiet: bool) -> None:
    """Bring model NAME into the cache; prints the folder it is in. One that is here stays as it is.

    The download is verified, and an interrupted one leaves no half model. TINYSPEC_CACHE names
    another cache folder.

    \b
    Examples:
      tinyspec models fetch smollm2
    """
    from tinyspec.models import FETCHABLE, fetch_known, list_known

    here = next((known.path for known in list_known() if known.name == name), None)
    click.echo(fetch_known(name, progress=not quiet) if here is None else here)
    if not quiet:
        said = f"{name} was here already" if here is not None else f"{name} is here now"
        trial = f'generate --model {name} --chat --method auto "Name three rivers."'
        then = trial if name in FETCHABLE else f"models card {name}"
        click.echo(f"{said}; next: tinyspec {then}", err=True)


@models.command("card")
@click.argument("name")
def card_of_model(name: str) -> None:
    """What is known of model NAME: data, training, licence, samples.

    \b
    Examples:
      tinyspec models card storyteller
      tinyspec models card path/to/folder
    """
    from tinyspec.models import read_card

    text = read_card(name)
    out = base.console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text))
    else:
        click.echo(text.rstrip("\n"))


@click.command("export", cls=base.Command)
@click.argument("head")
@option("--format", required=True, type=click.Choice(HEAD_FORMATS), help="Whose format.")
@option("--out", required=True, type=OUTPUT_FOLDER, help="A new folder.")
@option("--target", help="The head's model: name or folder. [default: the one that HEAD names]")
@option(
    "--verifier",
    help="speculators: where its loader finds the model, a folder or a hub id. "
    "[default: the model's name]",
)
def export(head: str, format: str, out: Path, target: str | None, verifier: str | None) -> None:
    """Write a trained HEAD, a name or folder, in the format of another program.

    EAGLE-3 heads in the format of the speculators package, heads of Medusa and EAGLE in those of
    vLLM. The model must be here: its checksum is compared, and rows that a head shares with it are
    written out. --head reads such folders too, also those of other programs.

    \b
    Examples:
      tinyspec export storyteller-medusa --format vllm-medusa --out medusa-for-vllm
      tinyspec export my-eagle3 --format speculators --verifier org/model --out my-speculator
      tinyspec generate --method medusa --head medusa-for-vllm "Once upon a time"
    """
    from tinyspec.pairing import export_head

    click.echo(export_head(head, format, out, target, verifier))


@click.command("quantize", cls=base.Command)
@click.argument("model")
@option("--to", "kind", required=True, type=click.Choice(QUANTISED_KINDS), help="Bits a weight.")
@option("--out", required=True, type=OUTPUT_FOLDER, help="A new folder.")
@base.quiet_option
def quantize(model: str, kind: str, out: Path, quiet: bool) -> None:
    """Write MODEL, a name or path, with its matrices rounded to 8.5, 4.5 or 5 bits a weight.

    This is lossy: it prints the perplexity before and after, on books that no model here has seen,
    if they are on this machine. The folder has the weights twice, as model.gguf and expanded to
    bfloat16. model.gguf is loaded where it is faster to multiply quantised weights; the results are
    the same, bit for bit. Each matrix needs rows of a multiple of 32. Heads and exits in the folder
    of MODEL are left out.

    \b
    Examples:
      tinyspec quantize storyteller --to q8_0 --out storyteller-q8
      tinyspec race --model storyteller-q8
    """
    from tinyspec.lm.gguf_export import quantise_model
    from tinyspec.lm.model import Model
    from tinyspec.models import load
    from tinyspec.training.tuned import measure_perplexity, read_held_out_text

    before = load(model)
    found = quantise_model(before, kind, out)
    after = Model(found.config, found.weights, found.tokenizer, found.name)
    if not quiet and before.has_tokenizer:
        documents, where = read_held_out_text(before, [], None)
        for when, one in (("before", before), ("after", after)) if documents else ():
            click.echo(f"perplexity {when}: {measure_perplexity(one, documents):.3f}", err=True)
        click.echo(f"on {where}" if documents else "no books here: no perplexity", err=True)
    click.echo(out)


@click.group("data", cls=base.Group)
def data() -> None:
    """Texts for training and benchmarks.

    \b
    Examples:
      tinyspec data fetch
      tinyspec data datastore tales.store --model storyteller books/*.txt
      TINYSPEC_DATA=my/folder tinyspec train lm --recipe recipe.toml --out model
    """


@data.command("fetch")
@click.argument("names", nargs=-1)
@base.quiet_option
def fetch_data(names: tuple[str, ...], quiet: bool) -> None:
    """Bring texts into the data folder: all of them, or those NAMED; prints where they are.

    Checksums are verified, what is there stays, and an interrupted fetch goes on. TINYSPEC_DATA
    names another folder.

    \b
    Examples:
      tinyspec data fetch
      tinyspec data fetch classics spec_bench
    """
    from rich.console import Console

    from tinyspec.hub.data_sets import fetch_data_sets

    for path in fetch_data_sets(names, console=None if quiet else Console(stderr=True)):
        click.echo(str(path))


@data.command("datastore")
@click.argument("out", type=base.OutputPath(parents=True))
@click.argument("files", nargs=-1, required=True, type=base.INPUT_FILE)
@option("--model", "-m", default="storyteller", help="The model whose tokens it is made of.")
@option("--field", default="text", help="Where the text stands in a line of a .jsonl file.")
@base.quiet_option
def index_files(out: Path, files: tuple[Path, ...], model: str, field: str, quiet: bool) -> None:
    """Index FILES into the datastore OUT, for `--method rest --datastore OUT`.

    A .jsonl file holds a document a line, any other is one document of plain text; both may be .gz
    or .xz. The datastore serves every model with the same tokenizer. Of ten million tokens it takes
    80 MB.

    \b
    Examples:
      tinyspec data datastore tales.store --model storyteller books/*.txt
      tinyspec data datastore code.store --model smollm2 functions.jsonl.gz --field content
      tinyspec generate "Once upon a time" --method rest --datastore tales.store
    """
    from tinyspec.models import load
    from tinyspec.speculative.drafting.datastore import build_datastore

    tokenizer = load(model).tokenizer
    with base.show_command_progress(quiet) as advance:
        tokens = build_datastore(out, files, tokenizer, field, advance)
    click.echo(f"{out}: {tokens} tokens")
