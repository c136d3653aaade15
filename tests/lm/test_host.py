"""What decoding does between two forward passes leaves torch's threads asleep.

Awake, they would spin on the cores that the compiled kernels need next. The copies that numpy makes
instead equal torch's.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinyspec import _core
from tinyspec.lm.host import copy_tensor, make_zeros, stack_rows, to_numpy, view_as_ints

DECODE = """
import os, sys, time
from dataclasses import replace
import torch
import tinyspec
from tests.lm.small import LLAMA
from tinyspec.laws.exact.models import add_random_head
from tinyspec.lm.forward import Cache
from tinyspec.lm.model import Model
from tinyspec.technique import find_technique

torch.set_num_threads(2)
before = set(os.listdir("/proc/self/task"))
torch.ones(1 << 20) + 1  # wakes torch's pool
pool = set(os.listdir("/proc/self/task")) - before
assert pool, "torch has no pool here"
config = replace(LLAMA, vocab_size=50_000, max_positions=512)
model = Model.random(config, seed=0, dtype=torch.bfloat16)
small = replace(config, n_layers=1, tied=False, head_ids=tuple(range(0, 50_000, 6)))
draft = Model.random(small, seed=1, dtype=torch.bfloat16)

def ticks():
    spent = 0
    for thread in pool:
        fields = open(f"/proc/self/task/{thread}/stat").read().rpartition(")")[2].split()
        spent += int(fields[11]) + int(fields[12])
    return spent

larger = replace(config, n_heads=8, n_kv_heads=8, head_dim=64, d_model=512)
wide = Model.random(larger, seed=0, dtype=torch.bfloat16)
for case in sys.argv[1:]:
    method, temperature = case.removesuffix(" few").split(":")
    growing = method == "growing"
    knobs = {"draft": draft} if not growing and find_technique(method).drafts else {}
    card = None if growing else find_technique(method)
    if case.endswith(" few"):  # a head of a draft vocabulary
        settings = replace(card.trained.small, draft_vocab=8_000)
        card = replace(card, trained=card.trained._replace(small=settings))
    used = model if growing else add_random_head(model, card, 0)
    for seconds in (0.1, 0.0):  # the first time for what is made once
        time.sleep(seconds)
        begun = ticks()
        for seed in range(3):
            if growing:  # much to read at once, a cache that grows with the output, and a copy
                tinyspec.generate(wide, list(range(5, 125)), max_new_tokens=16, seed=seed)
                Cache(wide.config, wide.dtype, wide.device, 128).clone()
            else:
                tinyspec.generate(used, list(range(5, 25)), method=method, max_new_tokens=16,
                                  seed=seed,
                                  temperature=float(temperature), **knobs)
    print(case, ticks() - begun)
"""
CASES = (
    *(
        "autoregressive:0",
        "token_recycling:0",
        "lookahead_jacobi:0",
        "jacobi:0",
        "speculative_decoding:0",
    ),
    *(
        "multi_candidate:0",
        "spectr:0",
        "speculative_contrastive:0",
        "speculative_decoding:0.8",
        "sequoia:0.8",
    ),
    *("medusa:0", "hydra:0", "redrafter:0", "eagle:0.8", "eagle2:0", "kangaroo:0", "bita:0"),
    *("medusa:0 few", "eagle2:0 few", "kangaroo:0 few"),
    *("growing:0", "specinfer:0.8", "block_verification:0.8", "gumbel_coupling:0.8", "staged:0.8"),
)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="needs Linux, which counts the time of each thread"
)
@pytest.mark.skipif(
    _core.compute is None, reason="needs the compiled kernels: without them torch's threads compute"
)
def test_decoding_leaves_the_threads_of_torch_asleep() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", DECODE, *CASES],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert not ran.returncode, ran.stderr
    awake = {
        case: 10 * int(ticks)
        for case, ticks in (line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    }
    assert list(awake) == list(CASES)
    assert {case: ms for case, ms in awake.items() if ms > 10} == {}, (
        "milliseconds that torch's threads were awake"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_copies_are_those_of_torch(dtype: torch.dtype) -> None:
    rows = [torch.randn(7).to(dtype) for _ in range(3)]
    assert torch.equal(stack_rows(rows), torch.stack(rows)) and stack_rows(rows).dtype == dtype
    assert torch.equal(torch.from_numpy(to_numpy(rows[0])).double(), rows[0].double())
    store = make_zeros((2, 5), dtype, torch.device("cpu"))
    assert torch.equal(store, torch.zeros(2, 5, dtype=dtype)) and store.dtype == dtype
    store.copy_(torch.randn(2, 5))
    seen = view_as_ints(store)
    assert seen is not None
    seen[:, 0] = seen[:, 3]
    assert torch.equal(store[:, 0], store[:, 3]), "the same memory, bit for bit"
    twin = copy_tensor(store)
    assert torch.equal(twin, store) and twin.dtype == dtype
    store.zero_()
    assert twin.any(), "in memory of its own"


HEAPS = """
import ctypes, tempfile, threading
from tinyspec.lm.host import share_one_heap

share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
together = threading.Barrier(8)


def take():
    libc.malloc(ctypes.c_size_t(1000))
    together.wait(60)


threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(open(file.name).read().count("<heap nr="))
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="heaps are counted by glibc"
)
@pytest.mark.slow
def test_threads_that_start_later_share_one_heap() -> None:
    """Else eight threads have eight more of them, and a server's memory grows."""
    done = subprocess.run(
        [sys.executable, "-c", HEAPS],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "1", done.stderr
