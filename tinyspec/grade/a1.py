"""Assignment A1: speculative sampling, from the warper to the loop with its two caches. Hand-out: tutorials/assignments/A1."""

from tinyspec.grade import a1_laws, a1_loop, a1_round
from tinyspec.grade.task import Assignment, Task

ASSIGNMENT = Assignment(
    "A1",
    "Speculative sampling",
    (
        Task(
            "warp",
            "A1.1 The warper",
            20,
            (a1_laws.a_law, a1_laws.temperature, a1_laws.top_k, a1_laws.top_p, a1_laws.order),
        ),
        Task("acceptance", "A1.2 The acceptance", 10, (a1_laws.probability, a1_laws.shared)),
        Task("residual", "A1.3 The residual", 15, (a1_laws.rest, a1_laws.beyond, a1_laws.whole, a1_laws.equal)),
        Task("verify", "A1.4 One round", 25, (a1_round.tokens, a1_round.bonus, a1_round.kept, a1_round.joint)),
        Task(
            "generate",
            "A1.5 The loop",
            30,
            (a1_loop.stops, a1_loop.joint, a1_loop.caches, a1_loop.calls, a1_loop.frugal),
        ),
    ),
)
