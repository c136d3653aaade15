"""A proof in several processes finds what it finds in one, in the same order."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.zoo import failed, run
from tinyspec.laws import prove
from tinyspec.laws.evidence import Evidence
from tinyspec.laws.prove import (
    FIVE_SECONDS,
    ProofPiece,
    State,
    list_pieces,
    report_technique,
    run_jobs,
)
from tinyspec.technique import find_technique, load_plugin

pytest.importorskip("joblib", reason="several processes need joblib: pip install -e .[test]")

CARDS = [find_technique("layerskip"), find_technique("sarathi")]
BIASED = '''
"""A drafter whose verifier accepts everything.

Paper: none.
"""

from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.verify import Verdict
from tinyspec.technique import Guarantee, technique


def accept_all(tree, p, rng):
    path = tuple(tree.chain_nodes("it"))
    return Verdict(path, rng.draw(p[path[-1] if path else -1]))


@technique(title="x", summary="x", paper="x", family="drafting", guarantee=Guarantee.EXACT, drafts=1)
def accepts_all(request):
    return request.decoder(ModelDrafter(request.drafts[0], 2), accept_all)
'''


def reports(cards: Any, n_jobs: int, state: State | None = None) -> list[dict[str, Any]]:
    """What a short proof says, without the seconds."""
    state = State(None, "short") if state is None else state
    if n_jobs > 1:
        run_jobs(cards, FIVE_SECONDS, state, n_jobs)
    found = [report_technique(card, FIVE_SECONDS, state) for card in cards]
    for one in found:
        one["proved"] = [{**evidence, "seconds": 0} for evidence in one["proved"]]
    return found


def test_the_evidence_is_the_same_for_any_number_of_processes() -> None:
    assert reports(CARDS, 1) == reports(CARDS, 2)


@pytest.mark.slow
def test_the_evidence_is_the_same_on_ray() -> None:
    ray = pytest.importorskip("ray", reason="pip install 'tinyspec[cluster]'")
    state = State(None, "short")
    try:
        run_jobs(CARDS, FIVE_SECONDS, state, 2, on_ray=True)
    finally:
        ray.shutdown()
    assert not list_pieces(CARDS, FIVE_SECONDS, state, by_seed=False)
    assert reports(CARDS, 1, state) == reports(CARDS, 1)


@pytest.mark.usefixtures("own_registry")
def test_a_broken_law_of_a_file_is_reported_as_in_one_process(tmp_path: Path) -> None:
    file = tmp_path / "accepts_all.py"
    file.write_text(BIASED)
    (card,) = load_plugin(file)
    alone, together = reports([card], 1), reports([card], 2)
    assert alone == together and alone[0]["broken"]


def test_what_is_known_is_not_run_again() -> None:
    state = State(None, "short")
    assert list_pieces(CARDS, FIVE_SECONDS, state, by_seed=False)
    run_jobs(CARDS, FIVE_SECONDS, state, 2)
    assert not list_pieces(CARDS, FIVE_SECONDS, state, by_seed=False)


class Killed(ProofPiece):
    """The first time that it runs, its process is killed."""

    def answer(self) -> tuple[str, str, Evidence | None]:
        flag = Path(self.key)
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.method, self.key, Evidence("a law", 1)


def test_a_proof_goes_on_when_a_worker_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, key = State(None, "short"), str(tmp_path / "flag")

    def list_killed(cards: Any, profile: Any, state: State, by_seed: bool) -> list[ProofPiece]:
        job = Killed("x", None, FIVE_SECONDS, 0, key)
        return [] if state.known("x", key) else [job]

    monkeypatch.setattr(prove, "list_pieces", list_killed)
    monkeypatch.setattr(ProofPiece, "answer", lambda job: job.answer())
    run_jobs([], FIVE_SECONDS, state, 2)
    assert state.known("x", key) == Evidence("a law", 1)


def test_the_command_proves_in_two_processes(tmp_path: Path) -> None:
    kept = str(tmp_path / "state.json")
    done = run("laws", "sarathi", "--seeds", "2", "--jobs", "2", "--resume", kept, "-q")
    assert done.exit_code == 0 and "sarathi: 2 seeds" in done.stdout
    assert Path(kept).exists()
    assert "--jobs" in failed(run("laws", "sarathi", "--jobs", "0"))
    assert "give --jobs N" in failed(run("laws", "sarathi", "--ray"))
