"""Assignment A1: speculative sampling, from the warper to the loop with its two caches. Hand-out:
tutorials/assignments/A1.
"""

from tinyspec.grade import a1_laws, a1_loop, a1_round, a1_stage
from tinyspec.grade.task import Assignment, GradedLaw, Task

ASSIGNMENT = Assignment(
    "A1",
    "Speculative sampling",
    (
        Task(
            "warp",
            "A1.1 The warper",
            (
                GradedLaw(3, a1_laws.A_LAW, a1_laws.a_law),
                GradedLaw(4, a1_laws.TEMPERATURE, a1_laws.temperature),
                GradedLaw(4, a1_laws.TOP_K, a1_laws.top_k),
                GradedLaw(5, a1_laws.TOP_P, a1_laws.top_p),
                GradedLaw(4, a1_laws.ORDER, a1_laws.order),
            ),
        ),
        Task(
            "acceptance",
            "A1.2 The acceptance",
            (
                GradedLaw(2, a1_laws.PROBABILITY, a1_laws.probability),
                GradedLaw(5, a1_laws.OVER, a1_laws.over),
                GradedLaw(3, a1_laws.UNDER, a1_laws.under, needs=(a1_laws.OVER,)),
            ),
        ),
        Task(
            "residual",
            "A1.3 The residual",
            (
                GradedLaw(2, a1_laws.REST, a1_laws.rest),
                GradedLaw(5, a1_laws.BEYOND, a1_laws.beyond),
                GradedLaw(6, a1_laws.WHOLE, a1_laws.whole, needs=(a1_laws.REST,)),
                GradedLaw(2, a1_laws.EQUAL, a1_laws.equal),
            ),
        ),
        Task(
            "verify",
            "A1.4 One round",
            (
                GradedLaw(3, a1_round.TOKENS, a1_round.tokens),
                GradedLaw(5, a1_round.BONUS, a1_round.bonus),
                GradedLaw(7, a1_round.KEPT, a1_round.kept),
                GradedLaw(10, a1_round.JOINT, a1_round.joint, needs=(a1_round.KEPT,)),
            ),
            uses=("acceptance", "residual"),
        ),
        Task(
            "generate",
            "A1.5 The loop",
            (
                GradedLaw(6, a1_stage.STOPS, a1_loop.stops),
                GradedLaw(9, a1_loop.JOINT, a1_loop.joint),
                GradedLaw(6, a1_loop.CACHES, a1_loop.caches),
                GradedLaw(3, a1_loop.READ, a1_loop.calls),
                GradedLaw(6, a1_loop.CALLS, a1_loop.frugal),
            ),
            uses=("warp", "acceptance", "residual", "verify"),
        ),
    ),
)
