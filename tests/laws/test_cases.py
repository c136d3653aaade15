"""What readers' functions are tried on: small first, the same each time, shrunk to the smallest."""

from fractions import Fraction as F

from tinyspec.laws.checking.cases import CheckCase, SmallModel, round_cases, shrink_case


def test_cases_come_in_order_of_vocabulary_and_gamma_and_are_the_same_each_time() -> None:
    cases = list(round_cases(0))
    assert cases == list(round_cases(0))
    assert cases != list(round_cases(1))
    kinds = list(dict.fromkeys((case.vocabulary, case.gamma) for case in cases))
    assert kinds == sorted(kinds)
    for case in cases:
        assert all(sum(law) == 1 for law in (*case.p.probs, *case.q.probs))


def test_shrinking_ends_at_the_smallest_broken_case() -> None:
    def law(*weights: int) -> tuple[F, ...]:
        return tuple(F(x, sum(weights)) for x in weights)

    case = CheckCase(SmallModel((law(3, 2), law(1, 4))), SmallModel((law(2, 3),)), 1, 2)
    smallest = shrink_case(case, lambda c: c.q.probs[0][0] > 0 and c.p.probs[0][1] > 0)
    assert smallest.size == 3
    assert smallest.q.probs[0][0] > 0 and smallest.p.probs[0][1] > 0


def test_a_law_by_text_differs_where_the_texts_differ() -> None:
    rows = tuple((F(i, 9), F(9 - i, 9)) for i in range(7))
    model = SmallModel(rows, "text")
    shown = model.shown(2)
    assert len(shown) == 7
    assert len({tuple(row) for row in shown.values()}) == 7
    assert sum(model.joint(3).values()) == 1
