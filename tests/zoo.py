"""Small models for the tests of commands, and a runner.

The models are folders with random weights and a tokenizer that is trained on the spot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from click.testing import CliRunner, Result
from tokenizers import decoders, models, pre_tokenizers, trainers

from tinyspec.cli import main
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.lm.tokenizer import Tokenizer

TEXT = (
    "the cat sat on the mat and the dog sat on the log, and then the cat and the dog ran "
    "to the house. "
) * 4
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}a:{% endif %}"
)


class Zoo(NamedTuple):
    """A target whose card names its draft, the draft, and a model with another vocabulary, as
    folders.
    """

    big: str
    small: str
    other: str


def tiny_zoo(folder: Path) -> Zoo:
    """Write the three models below `folder`."""
    names = Zoo(*(str(folder / name) for name in Zoo._fields))
    for name, size, layers in ((names.big, 300, 2), (names.small, 300, 1), (names.other, 280, 1)):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            [TEXT], trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet)
        )
        config = Config(
            vocab_size=backend.get_vocab_size(), d_model=32, n_layers=layers, n_heads=2,
            n_kv_heads=1, head_dim=16,
            d_ff=48, max_positions=96, extra={"draft": names.small} if name == names.big else {},
        )  # fmt: skip
        weights = Model.random(config, scale=0.3).weights
        Model(
            config, weights, Tokenizer(backend, {}, TEMPLATE if name == names.big else None), "m"
        ).save(name)
    return names


def run(*args: str, stdin: str | None = None) -> Result:
    """A command, in this process."""
    return CliRunner().invoke(main, list(args), input=stdin)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond 100 bytes: the rest of it is refused, as by a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failed(result: Result) -> str:
    """The one line of an error."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("tinyspec: ")
    return lines[0]
