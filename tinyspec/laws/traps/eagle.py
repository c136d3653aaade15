"""EAGLE (Li et al. 2024): a layer on pairs of token and state, continued on its own outputs."""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional as F

from tinyspec.decoding.rng import Seeded
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, collect_evidence, expect_equal
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.stage import Stage
from tinyspec.laws.traps import Build, Trap, begin_decoder, card
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting.eagle import EagleDrafter, StaticEagleDrafter, eagle_loss
from tinyspec.technique import Card, find_technique

PLANTED = "a head that is fitted to a text drafts all of it"
PLACED = feature_laws.DRAFT_OF_TRAINING
OF_TEXT = feature_laws.DRAFT_OF_TEXT

CYCLE = (0, 1, 2, 0, 3, 1)  # the token alone does not say which one follows: 0, 1 or 0, 3
TOKENS = 96  # of the text that is fitted: noise on the states falls with its length
DRAFTED = 5


@cache
def reciting_target(seed: int) -> tuple[Model, tuple[int, ...]]:
    """Return a network that was trained to write a cyclic text, and the text."""
    config = Config(
        vocab_size=4, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24,
        max_positions=128,
    )  # fmt: skip
    text = (CYCLE * TOKENS)[:TOKENS]
    begun = Model.random(config, seed, torch.float64, scale=0.3).weights
    weights = {name: w.clone().requires_grad_() for name, w in begun.items()}
    model, ids = Model(config, weights), torch.tensor([text])
    optimizer: Any = torch.optim.LBFGS(weights.values(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model.training_logits(ids)[0, 3:-1], ids[0, 4:])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    return Model(config, {name: w.detach() for name, w in weights.items()}), text


@collect_evidence(PLANTED)
def fitted_head_drafts_the_text(build: Build) -> Iterator[int]:
    """Check that a head that its loss has fitted to its target's text drafts it, on any state."""
    eagle = find_technique("eagle")
    for seed in (2, 3):
        target, text = reciting_target(seed)
        model = feature_laws.fit_head(eagle, target, text)
        for n in range(len(CYCLE), TOKENS - DRAFTED, 5):
            decoder = begin_decoder(build, [model], text[:n])
            sampling = decoder.sampling
            tree = decoder.drafter.propose(decoder.context, DRAFTED, sampling, Seeded(0))
            expected = text[n : n + DRAFTED]
            expect_equal(PLANTED, expected, tuple(tree.tokens), cycle=CYCLE, tokens=n)
            yield DRAFTED


def random_target(seed: int, vocabulary: int) -> Model:
    """Return a small network with a random head."""
    return add_random_head(small_network(seed, vocabulary), find_technique("eagle"), seed)


def drafts_follow_training(build: Build) -> Evidence:
    """Check law F2 on random heads, down to the fourth token of a draft."""
    return feature_laws.check_random_heads(find_technique("eagle"), partial(build, nodes=16))


@collect_evidence(OF_TEXT)
def drafts_depend_on_the_text_alone(build: Build) -> Iterator[int]:
    """Check law F1 on random heads: rows of the past leave no trace."""
    make = partial(build, nodes=6)
    yield feature_laws.draft_is_function_of_text(make, random_target).branches


@collect_evidence(JOINT)
def siblings_are_drawn_as_declared(eagle: Card) -> Iterator[int]:
    """Check the joint distribution of two tokens, where siblings are sampled."""
    for seed in range(2):
        stage = Stage(eagle, {"nodes": 3}, deep=True, vocabulary=3, seed=seed, prompt=(0, 1))
        expected, got = stage.reference().distribution(2, stage.prompt), stage.distribution(2)
        stage.judge(expected, got, stage.prompt, NETWORK_TOLERANCE)
        yield got.branches


TRAPS = [
    Trap(PLANTED, fitted_head_drafts_the_text, card("eagle")),
    Trap(PLACED, drafts_follow_training, card("eagle")),
    Trap(OF_TEXT, drafts_depend_on_the_text_alone, card("eagle")),
    Trap(JOINT, siblings_are_drawn_as_declared, lambda: find_technique("eagle")),
]

_eagle = partial(Toy, technique="eagle")
_pairs = partial(_eagle, function=EagleDrafter._join_pairs, law=PLACED)
JOINED = "torch.cat((embedded, torch.stack(list(states))), dim=-1)"

TOYS = [
    _eagle(
        "a layer trained on the state that it reads",
        "true = states[:, 1:]",
        "true = states[:, :-1]",
        eagle_loss,
        law=PLANTED,
    ),
    _eagle(
        "the token beside its own state",
        "self._run_rows(self.following[first:n], states,",
        "self._run_rows(([0] + self.following)[first:n], states,",
        EagleDrafter._run_pairs,
        law=PLACED,
    ),
    _pairs("tokens alone", JOINED, JOINED.replace("list(states))", "list(states)) * 0")),
    _pairs("states alone", JOINED, JOINED.replace("(embedded,", "(embedded * 0,")),
    _eagle(
        "the final norm on a guessed state",
        "self.head.compute_logits(guessed)",
        "self.head.compute_logits(torch.nn.functional.rms_norm(guessed, guessed.shape[-1:]))",
        EagleDrafter.run_nodes,
        law=PLACED,
    ),
    _eagle(
        "rows of guessed states are kept",
        "self.stack.cut(len(self.states))  # the",
        "pass  # the",
        EagleDrafter.propose,
        law=OF_TEXT,
    ),
    _eagle(
        "the most likely tokens, declared as samples",
        "return sample_siblings(sampling.probs(row, history), k, rng)",
        """q = sampling.probs(row, history)
return [(token, q) for token in rank_tokens(sampling, row, history, k)]""",
        StaticEagleDrafter.draw_siblings,
        law=JOINT,
    ),
]
