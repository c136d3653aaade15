"""A4: the reference keeps every law, and the law meant for each mistake catches it.

The mistakes are those of students and of the field.
"""

import doctest
import importlib.util
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch

import tinyspec
from tests.grade.tiny import ASSIGNMENTS_FOLDER, load_reference
from tinyspec.errors import TinyspecError
from tinyspec.grade import (
    a2_walk,
    a4_draft,
    a4_heads,
    a4_ranks,
    a4_trained,
    bundle,
    grading,
    report,
)
from tinyspec.grade.assignments import A1
from tinyspec.grade.assignments import A4 as ASSIGNMENT
from tinyspec.grade.child import MAX_TENSOR, NotPlain, from_json, to_json
from tinyspec.grade.grading import PUBLIC, TaskResult, judge_task
from tinyspec.grade.process import Limits
from tinyspec.grade.starter import make_readme, make_starter
from tinyspec.grade.task import Cases
from tinyspec.lm.heads import FrozenTarget, read_head
from tinyspec.speculative.drafting.medusa import predict_by_head
from tinyspec.speculative.treedraft import build_static_tree

FOLDER = ASSIGNMENTS_FOLDER / "A4"
SOURCE = (FOLDER / "reference.py").read_text(encoding="utf-8")
HANDOUT = (FOLDER / "handout.md").read_text(encoding="utf-8")
TASKS = {task.name: task for task in ASSIGNMENT.tasks}
REFERENCE = load_reference("A4")
SLOW = Limits(task=600.0, call=60.0)  # for functions that are right, on a machine that is busy


def judge(name: str, function: Any, cases: Cases = PUBLIC) -> TaskResult:
    return judge_task(TASKS[name], function, cases)


def edit_source(*changes: tuple[str, str]) -> str:
    """Return the reference with some lines exchanged."""
    text = SOURCE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def test_the_examples_in_the_docstrings() -> None:
    found = doctest.testmod(REFERENCE)
    assert found.attempted == 4 and not found.failed


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("cases", [PUBLIC, Cases(seed=5, times=2)], ids=["public", "other"])
@pytest.mark.slow
def test_the_reference_holds_every_law(name: str, cases: Cases) -> None:
    result = judge(name, getattr(REFERENCE, name), cases)
    assert result.score == TASKS[name].points, report.explain_result(result)


@pytest.mark.parametrize("name", TASKS)
def test_what_returns_nothing_holds_no_law(name: str) -> None:
    assert judge(name, lambda *given: None).score == 0


def test_other_cases_are_other_cases() -> None:
    for draws in (
        a4_ranks.draw_tables,
        a4_draft.draw_point_trees,
        lambda cases: [(ids, n) for _, ids, _, n in a4_heads.draw_batches(cases, False)],
        lambda cases: [texts[0][0] for _, texts in a4_ranks.draw_held_out(cases, (6,))],
        lambda cases: [text for _, _, text, _ in a4_draft.draw_drafts_of_heads(cases)],
    ):
        public, again, final = (str(list(draws(cases))) for cases in (PUBLIC, PUBLIC, Cases(1, 10)))
        assert public == again
        assert len(final) > 2 * len(public) and not final.startswith(public[:-1])


# ---------------------------------------------------------------------- the hand-out, the starter


def test_the_hand_out_has_the_tasks_and_their_points() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in HANDOUT.splitlines()
        if line.startswith("| A4.")
    ]
    assert [(row[0], int(row[2])) for row in rows] == [
        (task.title, task.points) for task in ASSIGNMENT.tasks
    ]
    assert all(f"{task.name}(" in row[1] for row, task in zip(rows, ASSIGNMENT.tasks, strict=True))


def test_the_examples_by_hand() -> None:
    weights = {
        "rows": torch.eye(2),
        "blocks.0.layers.0.weight": torch.zeros(2, 2),
        "blocks.0.layers.0.bias": torch.tensor([0.0, 2.0]),
    }
    said = REFERENCE.head_logits(weights, torch.tensor([1.0, -1.0]), 0)
    assert torch.allclose(said, torch.tensor([1.0, 0.7616]), atol=1e-4)
    table = tuple(tuple(Fraction(1, x) for x in row) for row in ((2, 4), (1, 8)))
    table = (table[0], (Fraction(3, 4), table[1][1]))
    paths = {(0,): 8, (0, 0): 6, (1,): 4, (1, 0): 3}
    assert all(a4_ranks.path_chance(table, path) == Fraction(n, 16) for path, n in paths.items())
    assert a4_ranks.greatest_worth(table, 3) == Fraction(9, 8)
    assert all(f"{least:.1%}" in HANDOUT for least in a4_trained.LEAST_RIGHT)


def test_the_starter_has_the_training_and_says_what_may_be_imported() -> None:
    assert "the standard library and torch are all there is." in make_readme(ASSIGNMENT)
    assert make_starter(ASSIGNMENT).count(": write me") == 8


# ---------------------------------------------------------------------- oracles


def test_a_head_is_the_one_that_the_library_trains() -> None:
    generator = a4_heads.make_generator(1)
    weights = a4_heads.draw_heads(2, 3, 5, generator)
    states = a4_heads.draw_halves((2, 4, 3), generator)
    target = FrozenTarget(None, weights["rows"], weights["rows"])  # type: ignore[arg-type]
    for depth in range(2):
        expected = predict_by_head(weights, target, torch.zeros(0), states[:, None], depth)
        assert torch.allclose(a4_heads.compute_logits(weights, states, depth), expected)


def test_the_best_tree_is_the_one_that_the_library_builds() -> None:
    for table, n in a4_ranks.draw_tables(PUBLIC):
        falling = tuple(tuple(sorted(row, reverse=True)) for row in table)
        tree = build_static_tree(n, falling) if n else ()  # type: ignore[arg-type]
        paths = list[tuple[int, ...]]()
        for parent, rank in tree:
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        worth = sum(a4_ranks.path_chance(falling, path) for path in paths)
        assert worth == a4_ranks.greatest_worth(falling, n) == a4_ranks.greatest_worth(table, n)


# ---------------------------------------------------------------------- mistakes


LABELS = "        labels = ids[:, depth + 2 :]\n"
TYPICAL = """row = p_rows[here + 1]
        pairs = list(zip(parents, tokens, strict=True))
        likely = [t for up, t in pairs if up == here and row[t] * 4 >= 1]
        token = likely[0] if likely else chance.draw(row)"""
MISTAKES = {
    "no residual": (
        "head_logits",
        ("(h + torch.nn.functional.silu(inner))", "torch.nn.functional.silu(inner)"),
        a4_heads.BEGIN,
    ),
    "one block for all heads": (
        "head_logits",
        ('block = f"blocks.{depth}.layers.0"', 'block = "blocks.0.layers.0"'),
        a4_heads.BLOCK,
    ),
    "the block turned": (
        "head_logits",
        ('weights[f"{block}.weight"]', 'weights[f"{block}.weight"].T'),
        a4_heads.BLOCK,
    ),
    "ReLU": ("head_logits", ("functional.silu", "functional.relu"), a4_heads.BLOCK),
    "no bias": ("head_logits", (', weights[f"{block}.bias"]', ""), a4_heads.BLOCK),
    "trained one token early": (
        "medusa_loss",
        (LABELS, LABELS.replace("depth + 2 :", "depth + 1 : -1")),
        a4_heads.PERFECT,
    ),
    "all heads trained on one token": (
        "medusa_loss",
        (LABELS, LABELS.replace("depth + 2 :", "2 : ids.shape[1] - depth")),
        a4_heads.PERFECT,
    ),
    "no decay": ("medusa_loss", ("0.8 ** (depth + 1) * entropy", "entropy"), a4_heads.LOSS),
    "the decay of the head before": (
        "medusa_loss",
        ("0.8 ** (depth + 1) * entropy", "0.8**depth * entropy"),
        a4_heads.LOSS,
    ),
    "a mean of nothing": ("medusa_loss", ("if labels.numel():", "if True:"), a4_heads.SHORT),
    "up the gradient": ("fit_heads", ("w -= rate", "w += rate"), a4_heads.FITTED),
    "the first batch alone": (
        "fit_heads",
        ("batches[step % len(batches)]", "batches[0]"),
        a4_heads.FITTED,
    ),
    "a target that is trained, too": (
        "fit_heads",
        ('for name, w in fitted.items() if name != "rows"]', "for name, w in fitted.items()]"),
        a4_heads.FROZEN,
    ),
    "candidates up to a rank": (
        "rank_table",
        ("right[rank] += 1", "right[rank:] = [x + 1 for x in right[rank:]]"),
        a4_ranks.MEASURED,
    ),
    "measured one token early": (
        "rank_table",
        ("labels = ids[depth + 2 :]", "labels = ids[depth + 1 : -1]"),
        a4_ranks.MEASURED,
    ),
    "the first text alone": ("rank_table", ("in texts:", "in texts[:1]:"), a4_ranks.POOLED),
    "a node too many": ("best_tree", ("len(tree) < n:", "len(tree) <= n:"), a4_ranks.IS_TREE),
    "level by level": (
        "best_tree",
        ("key=lambda path: path[0]", "key=lambda path: (-path[1], path[0])"),
        a4_ranks.BEST,
    ),
    "a chain first": (
        "best_tree",
        ("key=lambda path: path[0]", "key=lambda path: (-path[3], path[0])"),
        a4_ranks.BEST,
    ),
    "the last chance for the product": ("best_tree", ("worth * chance", "chance"), a4_ranks.BEST),
    "read one position early": ("propose", ("states[-1]", "states[-2:][0]"), a4_draft.PLACED),
    "one head for all depths": ("propose", ("states[-1], depth", "states[-1], 0"), a4_draft.PLACED),
    "the first candidate alone": ("propose", ("True)[rank]", "True)[0]"), a4_draft.PLACED),
    "more after the end": ("propose", ("if token not in ends:", "if True:"), a4_draft.ENDS),
    "one level too deep": ("propose", ("if depth >= room:", "if depth > room:"), a4_draft.ENDS),
    "a path from the bottom": (
        "verify",
        ("return path, token", "return path[::-1], token"),
        a2_walk.PATH,
    ),
    "typical acceptance": ("verify", ("token = chance.draw(p_rows[here + 1])", TYPICAL),
    a2_walk.JOINT),
    "the root's row everywhere": ("verify", ("p_rows[here + 1]", "p_rows[0]"), a2_walk.JOINT),
    "nothing accepted": ("verify", ("if (here, token) not in pairs:", "if True:"), a2_walk.KEPT),
}  # fmt: skip
"""Task, old and new text, and the law that must catch it."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught_by_the_law_meant_for_it(name: str) -> None:
    task, change, law = MISTAKES[name]
    space: dict[str, Any] = {"__name__": "wrong", "__file__": str(FOLDER / "reference.py")}
    exec(compile(edit_source(change), "wrong.py", "exec"), space)
    space |= {helper: getattr(REFERENCE, helper) for helper in TASKS[task].uses}
    result = judge(task, space[task])
    assert result.score < TASKS[task].points
    broken = [verdict.law.sentence for verdict in result.verdicts if verdict.status == "broken"]
    assert broken[:1] == [law], report.explain_result(result)


def test_a_draft_without_a_state_costs_its_law_alone() -> None:
    """The reference without its test for an empty text raises."""
    space: dict[str, Any] = {"__name__": "wrong", "__file__": ""}
    exec(compile(edit_source((" if len(states) else ()", "")), "wrong.py", "exec"), space)
    result = judge("propose", space["propose"])
    assert [verdict.status for verdict in result.verdicts] == ["holds", "holds", "not judged"]


def shifted_heads() -> dict[str, torch.Tensor]:
    """Return the trained heads, each in the place of the one before it."""
    found = dict(REFERENCE.trained_heads())
    for part in ("weight", "bias"):
        for depth in range(2):
            later = found[f"blocks.{depth + 1}.layers.0.{part}"]
            found[f"blocks.{depth}.layers.0.{part}"] = later
    return found


def untrained_heads() -> dict[str, torch.Tensor]:
    return {
        name: w if name == a4_trained.CHECKSUM else torch.zeros_like(w)
        for name, w in REFERENCE.trained_heads().items()
    }


def heads_with(**changed: Any) -> dict[str, Any]:
    return {**REFERENCE.trained_heads(), **changed}


WEIGHT = "blocks.0.layers.0.weight"
SAVED = {
    "untrained": (untrained_heads, a4_trained.FIRST_RIGHT),
    "one token off": (shifted_heads, a4_trained.FIRST_RIGHT),
    "another target's": (lambda: heads_with(target=torch.tensor(7)), a4_trained.TRAINED),
    "no target's": (lambda: {}, a4_trained.TRAINED),
    "another shape": (lambda: heads_with(**{WEIGHT: torch.zeros(2, 2)}), a4_trained.TRAINED),
    "no number": (
        lambda: heads_with(**{WEIGHT: torch.full((192, 192), torch.nan)}),
        a4_trained.TRAINED,
    ),
    "one head": (
        lambda: {k: w for k, w in heads_with().items() if k[:8] in ("target", "blocks.0")},
        a4_trained.TRAINED,
    ),
    "a list": (lambda: [1, 2], a4_trained.TRAINED),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.slow
def test_heads_that_were_not_trained_for_it_are_refused(name: str) -> None:
    make, law = SAVED[name]
    result = judge("trained_heads", make)
    first = next(verdict for verdict in result.verdicts if verdict.evidence is None)
    assert first.law.sentence == law
    assert result.score == (3 if law == a4_trained.FIRST_RIGHT else 0)


# ---------------------------------------------------------------------- through the child process


def test_a_parameter_is_a_tensor_too() -> None:
    """A training may return its weights as torch.nn.Parameter."""
    plain = from_json(to_json({"rows": torch.nn.Parameter(torch.ones(2))}))
    assert type(plain["rows"]) is torch.Tensor and torch.equal(plain["rows"], torch.ones(2))


def write_submission(folder: Path, source: str) -> Path:
    (folder / "submission.py").write_text(source, encoding="utf-8")
    shutil.copy(FOLDER / "heads.pt", folder)
    return folder


@pytest.mark.slow
def test_the_reference_through_the_child_process(tmp_path: Path) -> None:
    graded = grading.grade_folder(ASSIGNMENT, write_submission(tmp_path, SOURCE), limits=SLOW)
    assert graded.score == graded.max_score == 100, graded.problem


@pytest.mark.slow
def test_each_mistake_costs_in_its_own_task_alone(tmp_path: Path) -> None:
    names = ("the block turned", "trained one token early", "up the gradient")
    names += ("candidates up to a rank", "level by level", "read one position early")
    names += ("the root's row everywhere",)
    wrong = edit_source(*(MISTAKES[name][1] for name in names))
    graded = grading.grade_folder(ASSIGNMENT, write_submission(tmp_path, wrong), limits=SLOW)
    broken = {
        result.task.name: result.first_broken.law.sentence
        for result in graded.results
        if result.first_broken is not None
    }
    assert broken == {task: law for task, _, law in (MISTAKES[name] for name in names)}
    loss = graded.results[1]
    assert loss.helpers == ["head_logits"]
    assert "\n".join(report.describe_counterexample(loss)) in HANDOUT


@pytest.mark.slow
def test_a_submission_has_torch_and_nothing_else(tmp_path: Path) -> None:
    for first in ("import torch._dynamo\n", "import tinyspec.lm\n"):
        folder = write_submission(tmp_path, first + SOURCE)
        graded = grading.grade_folder(ASSIGNMENT.select(["best_tree"]), folder, limits=SLOW)
        assert graded.score == 0
        assert "and torch alone" in graded.problem, first


def test_the_bundle_holds_the_model_that_its_laws_load(tmp_path: Path) -> None:
    for assignment in (ASSIGNMENT, A1):
        bundle.write_bundle(assignment, tmp_path / "out.zip", 7)
        with ZipFile(tmp_path / "out.zip") as packed:
            found = "tinyspec/_models/storyteller/model.safetensors" in packed.namelist()
            assert found is (assignment is ASSIGNMENT)
            assert not any(name.endswith(".pt") for name in packed.namelist())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.tensor([[1, -2], [3, 4]]),
        torch.tensor([True, False]),
        torch.tensor([1.0, float("nan"), -float("inf")], dtype=torch.bfloat16),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, requires_grad=True) * 2,
    ],
)
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    got = from_json(to_json({"x": [tensor]}))["x"][0]
    assert got.dtype == tensor.dtype and got.shape == tensor.shape
    assert torch.equal(got.nan_to_num(), tensor.detach().nan_to_num())


def test_a_large_tensor_and_a_damaged_one_are_refused() -> None:
    with pytest.raises(NotPlain, match="a tensor of more than 4 MB"):
        to_json(torch.zeros(MAX_TENSOR // 4 + 1))
    for packed in (["float32", [2], "AAAA"], ["float32", [3], "AAAAAA=="], ["shape", [], ""], [1]):
        with pytest.raises(NotPlain):
            from_json({"x": packed})


# ---------------------------------------------------------------------- the training


@pytest.mark.slow
def test_the_training_saves_what_the_grader_and_the_library_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training of two steps: the heads fit the storyteller, and have not learned anything."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submission", REFERENCE)
    spec = importlib.util.spec_from_file_location("train", FOLDER / "train.py")
    assert spec is not None and spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    vars(train).update(TEXTS=24, HELD=8, BATCH=8, STEPS=2)
    train.main()
    saved = torch.load("heads.pt")
    result = judge("trained_heads", lambda: saved)
    assert [verdict.status for verdict in result.verdicts][:2] == ["holds", "broken"]
    assert read_head(tmp_path / "head").settings["heads"] == 3
    plain, drafted = (
        tinyspec.generate("storyteller", "Once upon a time", max_new_tokens=24, **named)
        for named in ({}, {"method": "medusa", "head": tmp_path / "head", "nodes": 4})
    )
    assert plain.tokens == drafted.tokens
    other = tinyspec.load("apprentice")
    with pytest.raises(TinyspecError, match="was trained on storyteller"):
        tinyspec.generate(other, "Once", method="medusa", head=tmp_path / "head")
