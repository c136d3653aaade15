"""A Prop for the tests: it also runs in the child process."""

from tinyspec.grade.child import Prop


class Counter(Prop):
    """Counts from a number on."""

    def __init__(self, start: int) -> None:
        super().__init__(start=start)
        self.start = self.total = start

    def add(self, step: int) -> None:
        if len(self.trace) == 3:
            raise ValueError("no more than 3 steps")
        self.total += step
        self.note(step)
