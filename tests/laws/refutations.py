"""What lesson 09 and the page of mistakes print: each sampler is refuted with this case.

tests/test_tutorials.py runs their cells, and compares. Seconds are written as `# s`.
"""

SOFTMAX = """\
broken: joint distribution
  p = [[0, 1], [0, 1]]
  q = [[1, 0]]
  draft = [0]
  compared = the distribution of the first token
expected [0, 1]
got      [0.268941, 0.731059]
"""
MENDED = """\
joint distribution: kept in 690 cases, 4483 outcomes, # s (in floating point, to 4e-16; V 2-8, gamma 1-5)
"""
ONE_NUMBER = """\
broken: joint distribution
  p = [[1/2, 1/2], [1/2, 1/2], [0, 1]]
  q = [[0, 1], [0, 1]]
  draft = [1, 1]
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 1/4, (1, 1): 1/4}
got      {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 0, (1, 1): 1/2}
"""
AT_MOST = """\
broken: impossible token
  p = [[0, 1], [0, 1]]
  q = [[1, 0]]
  draft = [0]
  uniforms = the first one drawn is exactly 0.0, which a generator may return
  hint = accept where u < p / q, not where u <= p / q; corners=False leaves this case out
expected no token 0: p forbids it
got      [0, 1]
"""
LIKELIEST = """\
broken: truthful drafter
  q = [[1/2, 1/2]]
  gamma = 1
  drafted before = []
  declared = [1/2, 1/2]
expected tokens drawn from the declared distribution
got      [1, 0]
"""
DOORS = (
    "joint distribution: kept in 690 cases, 4483 outcomes, # s (in floating point, to 4e-16; V 2-8, gamma 1-5)\n",
    "joint distribution: kept in 630 cases, 3552 outcomes, # s (a chain drawn from q, its distributions declared; exactly; "
    "V 2-4, gamma 1-5, 7 sampling settings)\n  the same on float64 rows: 638 cases\n",
    "joint distribution: kept in 171 cases, 2235 outcomes, # s (a chain without distributions: each token is judged as a point "
    "mass; exactly; V 2-4, gamma 1-4, 7 sampling settings)\n",
    "joint distribution: kept in 177 cases, 3589 outcomes, # s (siblings drawn from q, independently; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    "joint distribution: kept in 177 cases, 1354 outcomes, # s (siblings drawn from q without replacement; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    "joint distribution: kept in 219 cases, 2667 outcomes, # s (drawn siblings, point masses and probes side by side; exactly; "
    "V 2-4, gamma 1-4, 2-4 siblings, 7 sampling settings)\n",
    """\
rng.gumbel cannot be enumerated: draw with rng.random(), rng.uniform(), rng.choice(n, p=row), \
rng.integers() or rng.multinomial()
""",
)
COUNTED_EVERYWHERE = """\
broken: joint distribution
  p = [[0, 1], [0, 1], [0, 1]]
  q = [[1, 0], [1/2, 1/2]]
  draft = {(0, 0): 1/2, (0, 1): 1/2}
  output of each draft = {(0, 0): {(1,): 1}, (0, 1): {(0, 1): 1}}
  compared = the distribution of the first token
expected [0, 1]
got      [1/2, 1/2]
"""
ROW_BEHIND = """\
broken: joint distribution
  p = [[0, 1], [1, 0]]
  q = [[1/2, 1/2]]
  draft = {(0,): 1/2, (1,): 1/2}
  output of each draft = {(0,): {(0,): 1}, (1,): {(1, 0): 1}}
  compared = the distribution of the first token
expected [0, 1]
got      [1/2, 1/2]
"""
BONUS_OF_THE_DRAFT = """\
broken: joint distribution
  p = [[0, 1], [1, 0]]
  q = [[0, 1]]
  draft = [1]
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(1, 0): 1, (1, 1): 0}
got      {(1, 0): 0, (1, 1): 1}
"""
NOISE_KEPT = """\
broken: joint distribution
  p = {any context: [1/2, 1/2]}
  q = {any context: [0, 1]}
  gamma = 1
  n = 2
  compared = the distribution of the first 2 tokens (a shorter round is continued by sampling from p)
expected {(0, 0): 1/4, (0, 1): 1/4, (1, 0): 1/4, (1, 1): 1/4}
got      {(0, 0): 1/2, (0, 1): 0, (1, 0): 1/4, (1, 1): 1/4}
"""
ONLY_THE_SURE = """\
broken: presence
  q = [[1/3, 2/3]]
  gamma = 1
  drafted before = []
  declared = [1/3, 2/3]
expected tokens drawn from the declared distribution, kept whatever they are
got      [0, 1]
"""
PRINTED = {
    "09_prove_your_own": [SOFTMAX, MENDED, ONE_NUMBER, AT_MOST, LIKELIEST, *DOORS],
    "what_others_got_wrong": [
        COUNTED_EVERYWHERE,
        ROW_BEHIND,
        BONUS_OF_THE_DRAFT,
        NOISE_KEPT,
        ONLY_THE_SURE,
    ],
}
