"""Run pieces of work in several processes, on this machine or on a Ray cluster."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from tinyspec.errors import TinyspecError

P = TypeVar("P")
R = TypeVar("R")
ATTEMPTS = 3  # to go on after a worker was killed
PIECES = 8  # that each process is given at once; their results are then kept


def run_pieces(
    run: Callable[[P], R], pieces: Sequence[P], n_jobs: int = 1, on_ray: bool = False
) -> Iterator[R]:
    """Yield the result of each piece, in the order of the pieces, for any number of processes.

    run     its module must be one that a process can import; what it is given is copied there
    n_jobs  processes, of one thread each; 1: this process runs all
    on_ray  on the nodes of the Ray cluster that is connected

    If a worker of this machine is killed, the results before are kept, and the rest is started
    again. Raises TinyspecError if joblib or Ray is missing, or workers are killed again and again.
    """
    if n_jobs == 1:
        if on_ray:
            raise TinyspecError("--ray needs a number of processes: give --jobs N")
        yield from map(run, pieces)
        return
    try:
        from joblib import Parallel, delayed
        from joblib.externals.loky.process_executor import TerminatedWorkerError
    except ImportError:
        raise TinyspecError("--jobs needs joblib: pip install 'tinyspec[cluster]'") from None
    done = attempts = 0
    with _choose_workers(on_ray):
        while group := pieces[done : done + PIECES * n_jobs]:
            try:  # no backend but loky yields results one by one
                results = Parallel(n_jobs)(delayed(_run_on_one_thread)(run, one) for one in group)
            except TerminatedWorkerError:
                attempts += 1
                if attempts == ATTEMPTS:
                    raise TinyspecError(
                        f"workers were killed {ATTEMPTS} times, perhaps for lack of memory: give "
                        "fewer --jobs"
                    ) from None
                continue
            yield from results
            done += len(group)


def _run_on_one_thread(run: Callable[[P], R], piece: P) -> R:
    import torch

    torch.set_num_threads(1)
    return run(piece)


def _choose_workers(on_ray: bool) -> AbstractContextManager[Any]:
    """Return the context in which joblib starts its workers."""
    if not on_ray:
        return nullcontext()
    try:
        from joblib import parallel_config
        from ray.util.joblib import register_ray
    except ImportError:
        raise TinyspecError("--ray needs Ray: pip install 'tinyspec[cluster]'") from None
    register_ray()  # type: ignore[no-untyped-call, unused-ignore]  # Ray need not be there
    workers: AbstractContextManager[Any] = parallel_config(backend="ray")
    return workers
