"""What a submission raised, in words: one clause for the report, and a few words for its table.

Runs in the child beside the submission: standard library alone.
"""

import os
import traceback


class Enough(BaseException):
    """Ends a run; not an Exception, so that the submission does not catch it by accident."""


def describe(error: BaseException, folder: str) -> dict[str, str]:
    """Return {"problem": clause, "summary": a few words}; the subject of both is the function or
    the file.

    "problem" is like "raises ZeroDivisionError: division by zero (submission.py, line 154)", and
    "summary" like "raised ZeroDivisionError at line 154". Lines are those of the files in the
    folder.
    """
    kind = str(type(error).__name__)[:60]
    try:
        words = str(error)[:300]
    except BaseException:
        words = "(whose text cannot be read)"
    if isinstance(error, Enough):
        return {"problem": words, "summary": words}
    if isinstance(error, NotImplementedError):
        problem = f"is not written yet ({words})" if words else "is not written yet"
        return {"problem": problem, "summary": f"is not written yet ({kind})"}
    if isinstance(error, SystemExit):
        problem = f"ends the program (sys.exit{' ' if words else ''}{words})"
        return {"problem": problem, "summary": problem}
    if isinstance(error, ModuleNotFoundError):
        words += ", and there is Python's standard library alone"
    if isinstance(error, SyntaxError) and error.filename:
        words = str(error.msg)[:300]
    file, line = locate(error, folder)
    problem = (
        f"raises {kind}{': ' if words else ''}{words}{f' ({file}, line {line})' if file else ''}"
    )
    summary = f"raised {kind}{f' at line {line}' if file else ''}"
    return {
        "problem": problem,
        "summary": f"{summary} of {file}" if file not in ("", "submission.py") else summary,
    }


def locate(error: BaseException, folder: str) -> tuple[str, int | None]:
    """Return the file of the folder and the line where this was raised; ("", None) where it was
    raised elsewhere.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return os.path.basename(str(error.filename)), error.lineno
    file, line = "", None
    trail = traceback.walk_tb(error.__traceback__)
    for frame in traceback.StackSummary.extract(trail, limit=-200, lookup_lines=False):
        if frame.filename.startswith(folder):
            file, line = os.path.basename(frame.filename), frame.lineno
    return file, line
