"""REST: a datastore of any texts, the longest match in it, and a tree of what followed."""

import gzip
import json
import lzma
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.table import Table, exact_distribution
from tests.zoo import Zoo, run, tiny_zoo
from tinyspec import generate, load
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import Reciter
from tinyspec.laws.museum import find_toy
from tinyspec.laws.traps import rest as traps
from tinyspec.speculative.drafting.datastore import (
    HEADER,
    PIECE,
    build_datastore,
    index_texts,
    open_datastore,
    write_datastore,
)
from tinyspec.speculative.drafting.rest import RestDrafter, retrieve_continuations
from tinyspec.technique import Request, find_technique

CARD = find_technique("rest")
GREEDY = SamplingParams(temperature=0.0)


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3)


@given(TEXTS, st.lists(st.integers(0, 2), max_size=5), st.integers(1, 9))
def test_printed_algorithm_is_what_runs(
    texts: list[list[int]], text: list[int], nodes: int
) -> None:
    drafter = RestDrafter([index_texts(texts)], 1, 4, 3, 5000, nodes, 0.0)
    tree = drafter.propose(text, 99, GREEDY, Seeded(0))
    paths = [tree.tokens_on(tree.path(node)) for node in range(len(tree.tokens))]
    assert paths == retrieve_continuations(texts, text, 1, 4, 3, nodes)


def test_trap_the_longest_match_decides() -> None:
    traps.prefers_the_longest(CARD.make)


def test_trap_the_tree_is_the_heaviest_beginnings_by_brute_force() -> None:
    assert traps.is_the_heaviest(CARD.make).cases == 60


def test_trap_two_continuations_keep_the_distribution() -> None:
    traps.distribution_of_two_continuations(CARD.make)


def test_released_sampling_branch_has_the_bias_of_the_docstring() -> None:
    """Once a path, and anew after a miss."""

    def biased() -> Decoder:
        request = Request(Constant(3), references=[[2, 0, 2, 1, 2, 0]])
        return CARD.make(request, shortest=1, length=1)

    with find_toy("rest", "a draw a path").applied():
        found = exact_distribution(biased, 1, (2,))
    assert [round(float(found[(token,)]), 4) for token in range(3)] == [0.675, 0.255, 0.07]


class Constant(Table):
    def row(self, context: Any) -> list[int]:
        return [5, 3, 2]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), GREEDY, SamplingParams(temperature=0.5, top_k=2)], ids=str
)
def test_the_joint_distribution_is_the_targets_at_any_temperature(sampling: SamplingParams) -> None:
    references = [[0, 1, 2, 0, 0, 1], [1, 1, 2]]
    plain = exact_distribution(
        lambda: Decoder(Table(3), BaseDrafter(), verify_tree, sampling=sampling), 3
    )
    assert (
        exact_distribution(
            lambda: CARD.make(
                Request(Table(3), sampling=sampling, references=references), shortest=1
            ),
            3,
        )
        == plain
    )


def proposed(texts: list[list[int]], context: list[int], max_draft_depth: int = 99) -> Any:
    given: Any = {
        "shortest": 2,
        "longest": 16,
        "length": 10,
        "matches": 5000,
        "nodes": 64,
        "price": 0.0,
    }
    return RestDrafter([index_texts(texts)], **given).propose(
        context, max_draft_depth, GREEDY, Seeded(0)
    )


def test_without_a_match_or_room_the_step_is_plain() -> None:
    assert not proposed([[1, 2, 3]], [9, 2]).tokens
    assert not proposed([[1, 2, 3]], [1, 2], max_draft_depth=0).tokens
    assert not proposed([[1, 2]], [1, 2]).tokens  # nothing follows
    assert not proposed([[1, 2, 3]], [2]).tokens  # shorter than the shortest match


def test_where_matches_fail_again_and_again_it_falls_silent_and_the_whole_tree_does_not() -> None:
    """The references go on from each pair of the text in another way than the text does."""
    poem = [1, 2, *[3, 4] * 30]
    references = [[3, 4, 1], [4, 3, 2], [3, 4, 2]]
    for price, low, high in ((0.25, 0, 25), (0.0, 80, 999)):
        stop = StoppingCriteria(max_new_tokens=60)
        request = Request(
            Reciter(poem).session(), sampling=GREEDY, stop=stop, references=references
        )
        d, drafted = CARD.make(request, price=price), 0
        d.extend(poem[:2])
        while not d.finished:
            drafted += len(d.step(Seeded(d.rounds)).tree.tokens)
        assert low <= drafted <= high and d.new == poem[2:]


def test_after_glances_in_vain_the_store_is_asked_in_every_fourth_round_alone() -> None:
    class Counting:
        asked = 0

        def search(self, *limits: Any) -> Any:
            self.asked += 1
            return index_texts([[1, 2, 3]]).search(*limits)

    given: Any = {"shortest": 2, "longest": 16, "length": 10, "matches": 5000, "nodes": 64}
    for price, context, rounds in (
        (0.25, [8, 9], 8 + 32 // 4),
        (0.25, [1, 2], 2 * 40),
        (0.0, [8, 9], 40),
    ):
        store: Any = Counting()
        drafter = RestDrafter([store], price=price, **given)
        drafter.trust.first[2] = 1.0
        for _ in range(40):
            drafter.propose(context, 99, GREEDY, Seeded(0))
        assert store.asked == rounds


def test_a_draft_keeps_to_the_room_and_to_its_document() -> None:
    assert proposed([[1, 2, 3, 4, 5]], [1, 2], max_draft_depth=2).tokens == [3, 4]
    assert proposed([[1, 2, 3], [4, 5]], [1, 2]).tokens == [3]
    assert not proposed([[7, 1], [2, 3]], [1, 2]).tokens  # a match neither crosses a border


def test_of_a_file_and_references_the_longer_match_decides(tmp_path: Path) -> None:
    write_datastore(tmp_path / "store", [[1, 2, 3, 4], [5, 6, 7]])
    request = Request(Reciter([8, 2, 3, 9]).session(), references=[[8, 2, 3, 9], [5, 6, 1]])
    drafter: Any = CARD.make(request, datastore=str(tmp_path / "store")).drafter
    assert drafter.propose([8, 2, 3], 9, GREEDY, Seeded(0)).tokens == [9]
    assert drafter.propose([1, 2, 3], 9, GREEDY, Seeded(0)).tokens == [4]
    assert drafter.propose([5, 6], 9, GREEDY, Seeded(0)).tokens == [7]


# ---------------------------------------------------------------------- the file


def test_a_file_says_what_was_written_whatever_the_size_of_an_id(tmp_path: Path) -> None:
    texts = [[1, 70_000, 2**31 - 1], [70_000, 4464], [], [9]]  # 4464 is 70000 in 16 bits
    assert write_datastore(tmp_path / "store", texts, "print", 2**31) == 8
    store, kept = open_datastore(tmp_path / "store"), index_texts([text for text in texts if text])
    assert (
        store.tokens.tolist()
        == kept.tokens.tolist()
        == [1, 70_000, 2**31 - 1, -1, 70_000, 4464, -1, 9]
    )
    assert store.order.tolist() == kept.order.tolist()
    assert (store.fingerprint, store.vocabulary) == ("print", 2**31)
    assert store.search([1, 70_000], 2, 16, 10, 9, 9).tokens == [2**31 - 1]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_is_mapped_once_and_a_rebuilt_one_anew(tmp_path: Path) -> None:
    path = tmp_path / "store"
    write_datastore(path, [[1, 2, 3]])
    first, again = open_datastore(path), open_datastore(path)
    assert np.shares_memory(first.tokens, again.tokens) and np.shares_memory(
        first.order, again.order
    )
    write_datastore(path, [[4, 5, 6]])  # as long as the one before
    rebuilt = open_datastore(path)
    assert rebuilt.tokens.tolist() == [4, 5, 6] and first.tokens.tolist() == [1, 2, 3]
    with open(path, "r+b") as file:  # as `cp` over it would: the same inode, other contents
        file.seek(HEADER)
        np.array([7], "<i4").tofile(file)
    assert open_datastore(path).tokens.tolist() == [7, 5, 6]


def test_opening_ten_million_tokens_reads_none_of_them(tmp_path: Path) -> None:
    n, path = 10_000_000, tmp_path / "store"
    write_datastore(path, [[1, 2]])
    head = path.read_bytes()[:HEADER].replace(b'"tokens": 2', b'"tokens": %d' % n)
    path.write_bytes(head[:HEADER])
    with open(path, "r+b") as file:
        file.truncate(HEADER + 8 * n)  # a hole: nothing of it is on the disk

    def count_page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = count_page_faults()
    store = open_datastore(path)
    opened = count_page_faults()
    assert len(store.tokens) == n and not store.tokens.any()
    assert opened - before < 100 < count_page_faults() - opened, "reading them costs page faults"


def test_an_interrupted_build_leaves_what_was_there(tmp_path: Path) -> None:
    write_datastore(tmp_path / "store", [[1, 2]])

    def stop(what: str, done: int, whole: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_datastore(tmp_path / "store", [[3, 4]], tell=stop)
    assert open_datastore(tmp_path / "store").tokens.tolist() == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_that_is_no_datastore_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(TinyspecError, match="there is no datastore here; build one"):
        open_datastore(path)
    path.write_text("hello")
    with pytest.raises(TinyspecError, match="not a datastore of this version"):
        open_datastore(path)
    write_datastore(path, [[1, 2, 3]])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(TinyspecError, match=r"damaged datastore \(4119 bytes for 3 tokens\)"):
        open_datastore(path)
    path.write_bytes(whole.replace(b'"tokens"', b'"tokans"'))
    with pytest.raises(TinyspecError, match="damaged"):
        open_datastore(path)
    path.write_bytes(whole[:-4] + np.int32(77).tobytes())
    with pytest.raises(TinyspecError, match="damaged"):
        open_datastore(path).search([3], 1, 2, 3, 9, 9)


def test_texts_without_tokens_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(TinyspecError, match="no tokens"):
        write_datastore(tmp_path / "store", [[], []])
    with pytest.raises(TinyspecError, match="reference 2 of 2 is empty: leave it out"):
        CARD.make(Request(Table(3), references=[[1], []]))


def test_without_any_store_the_error_says_how_to_build_one() -> None:
    with pytest.raises(TinyspecError, match="tinyspec data datastore STORE FILES"):
        CARD.make(Request(Table(3)))
    with pytest.raises(TinyspecError, match="lower shortest, or raise longest"):
        CARD.make(Request(Table(3), references=[[1]]), shortest=5, longest=3)


# ---------------------------------------------------------------------- from files, for users


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return tiny_zoo(tmp_path_factory.mktemp("zoo"))


def test_documents_come_from_text_and_json_lines_packed_or_not(zoo: Zoo, tmp_path: Path) -> None:
    model = load(zoo.big)
    long = "".join(f"line {number} of the log\n" for number in range(2 * PIECE // 12))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "", "the dog"))
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    files, progress = sorted(tmp_path.iterdir()), list[tuple[str, int, int]]()
    build_datastore(
        tmp_path / "store", files, model.tokenizer, tell=lambda *one: progress.append(one)
    )
    store = open_datastore(tmp_path / "store")
    documents = "".join(f"{token} " for token in store.tokens.tolist()).split("-1 ")
    texts = [model.tokenizer.decode([int(token) for token in one.split()]) for one in documents]
    assert texts == [long, "the cat", "the dog", "the cat", "the dog"]
    assert {what for what, _, _ in progress} == {"reading texts", "sorting places"}
    assert all(done <= whole for _, done, whole in progress) and progress[-1][1:] == (32, 32)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", b"\xff\xfe", "not a text in UTF-8"),
        ("a.gz", b"no gzip", "not a text in UTF-8"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: no JSON object with the field 'text'; --field"),
        ("a.jsonl", b'{"text": 3}\n', "holds no text"),
        ("a.txt", b"", "no tokens"),
    ],
)
def test_files_that_are_no_texts_raise_a_one_line_error(
    zoo: Zoo, tmp_path: Path, name: str, content: bytes, error: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TinyspecError, match=error):
        build_datastore(tmp_path / "store", [tmp_path / name], load(zoo.big).tokenizer)


def test_a_user_builds_a_datastore_and_generates_with_it(zoo: Zoo, tmp_path: Path) -> None:
    text, store = tmp_path / "log.txt", str(tmp_path / "log.store")
    plain = generate(load(zoo.big), "the cat sat", max_new_tokens=24)
    text.write_text("and the cat sat on the mat. the cat sat" + plain.text)
    made = run("data", "datastore", store, str(text), "--model", zoo.big)
    assert made.exit_code == 0 and "tokens" in made.output
    ours = run(
        "generate",
        "the cat sat",
        "-m",
        zoo.big,
        "--method",
        "rest",
        "--datastore",
        store,
        "-n",
        "24",
        "--json",
    )
    result = json.loads(ours.stdout)
    assert result["tokens"] == plain.tokens
    assert result["stats"]["target_calls"] <= plain.stats.target_calls


def test_a_datastore_of_another_tokenizer_raises_a_one_line_error(zoo: Zoo, tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("the cat sat on the mat")
    store = str(tmp_path / "log.store")
    assert (
        run("data", "datastore", store, str(tmp_path / "log.txt"), "--model", zoo.other).exit_code
        == 0
    )
    refused = run("generate", "the cat", "-m", zoo.big, "--method", "rest", "--datastore", store)
    assert (
        refused.exit_code == 2
        and "another tokenizer" in refused.stderr
        and refused.stderr.count("\n") == 1
    )


def test_ids_beyond_the_vocabulary_raise_an_error(tmp_path: Path) -> None:
    write_datastore(tmp_path / "store", [[1, 70_000]])
    with pytest.raises(TinyspecError, match="ids up to 70000"):
        CARD.make(Request(Reciter([1, 2]).session()), datastore=str(tmp_path / "store"))


@pytest.mark.parametrize("tokens", [0, 1])
def test_nothing_or_one_token_is_made_where_that_is_asked_for(zoo: Zoo, tokens: int) -> None:
    made = generate(
        load(zoo.big), [1, 2], max_new_tokens=tokens, method="rest", references=[[1, 2, 3]]
    )
    assert len(made.tokens) == tokens


def test_an_end_of_text_inside_a_block_ends_the_text() -> None:
    poem = [1, 2, 3, 4, 5]
    stop = StoppingCriteria(eos=frozenset({4}), max_new_tokens=9)
    d = CARD.make(Request(Reciter(poem).session(), sampling=GREEDY, stop=stop, references=[poem]))
    d.extend(poem[:2])
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert d.new == [3, 4] and d.rounds == 1
