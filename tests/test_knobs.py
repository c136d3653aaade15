"""Every knob of every card: its bounds, values that are no values, and runs at the bounds."""

import math
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinyspec.errors import TinyspecError
from tinyspec.technique import Card, Knob, load_techniques

CARDS = {
    name: card for name, card in load_techniques().items() if "plugins" not in card.build.__module__
}
KNOBS = [(card, knob) for card in CARDS.values() for knob in card.knobs]
NUMBERS = [(card, knob) for card, knob in KNOBS if type(knob.default) in (int, float)]
every = pytest.mark.parametrize(
    ("card", "knob"), KNOBS, ids=[f"{card.name} {knob.name}" for card, knob in KNOBS]
)
numeric = pytest.mark.parametrize(
    ("card", "knob"), NUMBERS, ids=[f"{card.name} {knob.name}" for card, knob in NUMBERS]
)  # fmt: skip

NO_VALUES: list[Any] = [
    *(b"4", {}, object(), np.array([1, 2]), np.array([[True]]), torch.tensor([1, 2]), 1j,
    Decimal(4)),
    *("\x00", "a\nb", "9" * 20, "9" * 5000, "x" * 10**6, print, type, lambda: 4),
]  # fmt: skip
NO_NUMBERS: list[Any] = [
    *(math.nan, math.inf, -math.inf, np.float32("nan"), 10**400, -(10**400), 2**63, -(2**63)),
    *("nan", "inf", "", None, [4], (4,), True, False, Fraction(10**400)),
]


def refuse(card: Card, knob: Knob, value: Any) -> str:
    """Return the one line of the error for a value; it names the knob."""
    with pytest.raises(TinyspecError, match=f"^{knob.name} is ") as error:
        card.settings({knob.name: value})
    said = str(error.value)
    assert "\n" not in said and len(said) < 400
    return said


@numeric
def test_every_number_has_bounds(card: Card, knob: Knob) -> None:
    assert knob.low is not None and math.isfinite(knob.low)
    assert knob.high is not None and math.isfinite(knob.high)
    assert knob.low <= knob.default <= knob.high or knob.default == knob.beyond
    assert card.settings({knob.name: knob.high})[knob.name] == knob.high
    for outside in (knob.low - 1, knob.high + 1, 2 * knob.high + 1):
        assert f"from {knob.low} to {knob.high}" in refuse(card, knob, outside)


@numeric
def test_what_is_no_number_is_an_error(card: Card, knob: Knob) -> None:
    for value in NO_NUMBERS:
        if str(value) != str(knob.beyond):
            refuse(card, knob, value)
    if isinstance(knob.default, int):
        for value in (knob.default + 0.5, np.float64(0.5), Fraction(1, 2), "1.5"):
            refuse(card, knob, value)


@numeric
def test_numbers_of_numpy_are_numbers(card: Card, knob: Knob) -> None:
    for kind in (np.int64, np.float64):
        value = card.settings({knob.name: kind(knob.high)})[knob.name]
        assert value == knob.high and type(value) is type(knob.default)


@every
def test_what_is_no_value_is_an_error(card: Card, knob: Knob) -> None:
    for value in NO_VALUES:
        if knob.beyond is None or type(value) is not str:  # "9" * 5000 is infinity, as 1e999 is
            refuse(card, knob, value)


def test_a_knob_of_a_plugin_may_have_no_bound() -> None:
    knob = Knob("width", 4, "of anything")
    assert knob.check(10**9) == 10**9
    for value in (math.nan, math.inf):
        with pytest.raises(TinyspecError, match=r"^width is (nan|inf): it must be a "):
            knob.check(value)


RUN_AT_THE_BOUNDS = """
import resource, sys, warnings
from dataclasses import asdict
from pathlib import Path
import torch
import tinyspec
from tests.zoo import TEXT, tiny_zoo
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.policies import Pending
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.speculative.drafting.datastore import build_datastore
from tinyspec.technique import load_techniques

warnings.simplefilter("ignore")
folder = Path(sys.argv[1])
zoo = tiny_zoo(folder)
big, small = tinyspec.load(zoo.big), tinyspec.load(zoo.small)
(folder / "text.txt").write_text(TEXT)
build_datastore(folder / "store", [folder / "text.txt"], big.tokenizer)
sizes = dict(d_model=8, n_heads=2, d_ff=8, encoder_layers=1, decoder_layers=1, max_positions=24)
config = Seq2SeqConfig(20, **sizes)
teacher = Seq2Seq.create(config, torch.Generator().manual_seed(0))
filler = Seq2Seq.create(
    Seq2SeqConfig(20, **sizes, extra={"trained_for": "specdec"}), torch.Generator().manual_seed(2)
)
virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (virtual + (8 << 30),) * 2)  # threads reserve much of it
begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in sys.argv[2:]:
    card = load_techniques()[name]
    highest = {k.name: k.high for k in card.knobs if type(k.default) in (int, float)}
    if name == "rest":
        highest["datastore"] = str(folder / "store")
    layers = {"exit": 0, "layer": 0, "min_exit": 0, "shallow": 0, "warmup": 1}  # that must follow
    highest |= {k: big.config.n_layers - n for k, n in layers.items() if k in highest}
    highest |= {"sample": 8192} if "sample" in highest else {}  # more are read from a file
    highest |= {"k": 16} if name == "spectr" else {}  # 16 drafts of 64 tokens: 1024 nodes
    if card.kind == "refine":
        own, settings = {**sizes, **card.translator.shape}, card.translator.settings()
        extra = {"trained_for": name, **asdict(settings)}
        one_to_one = lambda sources, targets: [list(range(len(target))) for target in targets]
        extra |= card.translator.counts(settings, [([5, 6, 7], [8, 9, 10])] * 3, one_to_one)
        config = card.translator.equip(Seq2SeqConfig(20, **own, extra=extra), settings)
        model = Seq2Seq.create(config, torch.Generator().manual_seed(1))
        judge = {"teacher": teacher} if card.teacher else {}
        done = tinyspec.translate(model, [5, 6, 7], **judge, **highest)
        print(name, "ran" if done.tokens is not None else "")
        continue
    if card.kind == "policy":
        waiting = Pending(0, "model", 1, 99, is_prefill=True, held=0)
        print(name, "ran" if card.policy(**highest).pick([waiting]) == {0: 99} else "")
        continue
    if card.fills_masks:
        done = tinyspec.translate(teacher, [5, 6, 7], method=name, draft=filler, **highest)
        print(name, "ran" if done.tokens else "")
        continue
    done = tinyspec.generate(
        add_random_head(big, card, 0), "the cat sat on the mat and the", method=name, draft=small, max_new_tokens=8, **highest
    )
    print(name, "ran" if len(done.tokens) == 8 or done.finish_reason == "eos" else done)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun
print("in a gigabyte" if grown < 1 << 20 else f"in {grown} kilobytes")
"""


@pytest.mark.slow
def test_every_technique_runs_at_its_bounds_in_a_gigabyte(tmp_path: Path) -> None:
    """All numbers of a card at their highest at once, on models of two layers and one layer."""
    names = [name for name, card in CARDS.items() if card.kind != "analysis"]
    done = subprocess.run(
        [sys.executable, "-c", RUN_AT_THE_BOUNDS, str(tmp_path), *names],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[1],
    )
    ran = [line for line in done.stdout.splitlines() if line]  # training a tokenizer prints others
    assert ran == [*(f"{name} ran" for name in names), "in a gigabyte"], done.stderr[-2000:]
