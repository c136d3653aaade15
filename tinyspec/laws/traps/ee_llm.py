"""EE-LLM (Chen et al. 2024): a list that is run again with a cap, and exact gradients of stages."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from tinyspec.decoding.rng import Seeded
from tinyspec.early_exit import ee_llm
from tinyspec.early_exit.ee_llm import ProbableRule, backpropagate_stage, stage_gradients
from tinyspec.early_exit.exits import restart_tokens
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.exit_laws import (
    EXIT_PROMPT,
    SURE_EXITS,
    exit_of_token,
    follows_sure_exits,
)
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import SAMPLED, Build, Trap, begin_decoder, card
from tinyspec.lm.blocks import Blocks

THE_LIST = "each pass runs the list and the newest token from layer 1, until one reaches the top"
STAGES = "the gradients of the stages are those of the whole model (arXiv 2312.04916, section 3)"

TOKENS, CAP, DEPTH = 14, 3, 4
WITHIN = 1e-12


@collect_evidence(THE_LIST)
def the_list_is_run_again(build: Build) -> Iterator[int]:
    """Check the rows and layers of every round with two exits."""
    models: list[Any] = [TableModel(seed, 4, DEPTH, zeros=False) for seed in range(3)]
    models += [small_network(seed, layers=DEPTH) for seed in range(2)]
    for seed, model in enumerate(models):
        threshold = 0.4 if isinstance(model, TableModel) else 0.7
        knobs: dict[str, Any] = {"exits": "1,2", "threshold": threshold, "cap": CAP}
        decoder = begin_decoder(build, [model], EXIT_PROMPT, SAMPLED, TOKENS, **knobs)
        waiting = 0
        while not decoder.finished:
            text = list(decoder.context)
            calls = decoder.step(Seeded(seed).split("round", decoder.rounds)).calls
            layers = exit_of_token(model, text, (1, 2), threshold, CAP)
            expected = (waiting + 1) * layers
            got = int(sum(call.row_layers for call in calls))
            case = {"model": repr(model), "text": text, "waiting": waiting, **knobs}
            expect_equal(THE_LIST, expected, got, **case, counted="layers of all rows")
            waiting = 0 if layers == DEPTH else waiting + 1
            yield 1


@collect_evidence(STAGES)
def stages_have_the_gradients_of_the_whole(gradients: Callable[..., Any]) -> Iterator[int]:
    """Check the gradient of every weight against one backward pass through the whole model.

    The embedding is tied to the head, so that several stages have copies of it.
    """
    for seed, stages in product(range(2), (1, 2, 3, 4)):
        model = small_network(seed, vocabulary=5, layers=DEPTH)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, (3, 7), generator=generator)
        inputs, targets = ids[:, :-1], ids[:, 1:]
        for weights in ((0.25, 0.5, 0.0, 1.0), (0.1, 0.0, 0.2, 1.0), (0.0, 0.0, 0.0, 1.0)):
            own = {name: weight.clone().requires_grad_() for name, weight in model.weights.items()}
            whole = Blocks(model.config, own)
            states = whole.layer_states(inputs)
            total: Any = sum(
                w * F.cross_entropy(whole.compute_logits(x).flatten(0, 1), targets.flatten())
                for w, x in zip(weights, states, strict=True)
            )
            total.backward()
            found = gradients(model.config, model.weights, inputs, targets, weights, stages)
            for name, weight in own.items():
                expected, got = weight.grad, found[name]
                assert expected is not None
                apart = float((expected - got).abs().max())
                if apart > WITHIN:
                    case = {"model": model.name, "stages": stages, "exit weights": weights}
                    case["the gradient of"] = name
                    accuse(STAGES, f"within {WITHIN}", f"{apart:.3g} apart", **case)
            yield 1


TRAPS = [
    Trap(SURE_EXITS, follows_sure_exits, card("ee_llm")),
    Trap(THE_LIST, the_list_is_run_again, card("ee_llm")),
    Trap(STAGES, stages_have_the_gradients_of_the_whole, lambda: stage_gradients),
]

_ee_llm = partial(Toy, technique="ee_llm")

TOYS = [
    _ee_llm("states that are copied up", '"restart"', '"copy"', ee_llm.ee_llm, law=SURE_EXITS),
    _ee_llm(
        "only the last token is run again",
        "session.restart(positions)",
        """session.fill_cache("copy", positions[:-1])
session.restart(positions[-1:])""",
        restart_tokens,
        law=SURE_EXITS,
    ),
    _ee_llm(
        "a list without a cap",
        "return self.layers if self.n_waiting(position) < self.cap else ()",
        "return self.layers",
        ProbableRule.layers_of,
        law=SURE_EXITS,
    ),
    _ee_llm(
        "the gap in place of the greatest probability",
        "row[top_k_tokens(row, 1)[0]] >= self.threshold",
        "(lambda row: row[0] - row[1])(sorted(row)[::-1]) >= self.threshold",
        ProbableRule.should_exit,
        law=SURE_EXITS,
    ),
    _ee_llm(
        "the list goes on from its exits",
        '"restart"',
        '"postpone"',
        ee_llm.ee_llm,
        law=THE_LIST,
    ),
    _ee_llm(
        "a stage knows its own losses alone",
        "loss if gradient is None else loss + (gradient.detach() * output).sum()",
        "loss + 0 * output.sum()",
        backpropagate_stage,
        law=STAGES,
    ),
    _ee_llm(
        "the copies of the head are not added up",
        "total[name] += 0 if copy.grad is None else copy.grad",
        "total[name] = total[name] if copy.grad is None else copy.grad",
        stage_gradients,
        law=STAGES,
    ),
]
