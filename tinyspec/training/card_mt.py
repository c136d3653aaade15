"""The card of a translation model: README.md and loss.svg, written by code from the recipe and the
log alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.training.card import describe_device, draw_curve
from tinyspec.training.recipe_mt import TranslationRecipe
from tinyspec.training.train import TrainingResult

SHOWN = 5  # examples on a card: the first valid sentences
WHAT = {
    "teacher": "It writes from left to right: the autoregressive teacher of the others, and what they are compared with. "
    "Its figure is greedy decoding's",
    "nat": "It says all words at once, after a guess of how many each source word gives (`nat`). Its figure is that of one "
    "pass with the most probable fertilities",
    "mask_predict": "It fills in what is masked, again and again (`mask_predict`). Its figure is that of four iterations "
    "over two lengths",
}


def write_card(
    out: Path,
    model: Seq2Seq,
    recipe: TranslationRecipe,
    ended: TrainingResult,
    final: Mapping[str, float],
    translate: Callable[[Seq2Seq, Sequence[Sequence[int]]], list[list[int]]],
    held: Sequence[tuple[str, str]],
    device: torch.device,
) -> None:
    """Write README.md and loss.svg into `out`. `held`: valid sentences, of which the first are
    shown.
    """
    series = {
        "training loss": [(e["tokens"], e["loss"]) for e in ended.log if "loss" in e],
        "valid loss": [(e["tokens"], e["valid_loss"]) for e in ended.log if "valid_loss" in e],
    }
    svg = draw_curve(
        {name: line for name, line in series.items() if line},
        "tokens seen",
        f"training of {recipe.name}",
    )
    (out / "loss.svg").write_text(svg, encoding="utf-8")
    shown = held[:SHOWN]
    made = translate(model, [model.tokenizer.encode(english) for english, _ in shown])
    examples = "\n".join(
        f"| {english} | {model.tokenizer.decode(ids)} | {german} |"
        for (english, german), ids in zip(shown, made, strict=True)
    )
    c = model.config
    extra = "".join(
        said
        for there, said in (
            (c.positional, ", positional attention"),
            (c.fertilities, f", fertilities below {c.fertilities}"),
            (c.lengths, f", a LENGTH token for lengths below {c.lengths}"),
        )
        if there
    )
    if recipe.distill is None:
        targets = "people's translations"
    else:
        how = "greedily" if recipe.distill.beam == 1 else f"with a beam of {recipe.distill.beam}"
        targets = f"what `{Path(recipe.teacher).name}` says to the same sentences, {how}"
    if recipe.finetune:
        targets += (
            f"; it is `{Path(recipe.finetune).name}`, fine-tuned by its teacher's word-level laws"
        )
    lent = f"; its {', '.join(recipe.inherit)} began as the teacher's" if recipe.inherit else ""
    machine = describe_device(device)
    text = f"""# {recipe.name}

English to German, captions of pictures. {WHAT[recipe.method]}.

- **shape**: {c.encoder_layers} + {c.decoder_layers} layers of {c.d_model}, {c.n_heads} heads, MLP of {c.d_ff}, joint vocabulary
  of {c.vocab_size} (byte-level BPE), {c.max_positions} positions{extra}
- **parameters**: {c.parameters():,}, stored in bfloat16
- **quality**: BLEU {final["valid_bleu"]:.2f} on Multi30k's {len(held):,} valid sentences (sacrebleu, raw text, case
  kept); the test sentences are measured by `tinyspec bench translation`
- **data**: Multi30k task 1 (Elliott et al. 2016), 29,000 pairs, for research; trained on {targets}{lent}
- **text**: composed Unicode (NFC), runs of white space as one space, case kept; output is plain text
- **training**: {ended.tokens:,} source tokens in {ended.step:,} steps, {ended.seconds / 60:.1f} minutes on {machine};
  the best weights by BLEU on the valid sentences
- **licence**: weights MIT

Made by `recipe.toml`, with this command (log in `log.jsonl`):

    tinyspec data fetch multi30k
    tinyspec train mt --recipe models/{recipe.name}/recipe.toml --out models/{recipe.name}

![training curve](loss.svg)

## Examples

The first valid sentences, unedited.

| English | translation | a person's |
|---|---|---|
{examples}
"""
    (out / "README.md").write_text(text, encoding="utf-8")
