"""Every error that a user can cause or mend, under one base so that the command line catches one thing.

A message says where, what was found, what was expected, and what to do next.
"""

from collections.abc import Iterable


class LlmtoolError(Exception):
    """Something the user can mend. The command line prints the message without a traceback and exits with 2."""


class BadCheckpoint(LlmtoolError):
    """The files of a checkpoint are damaged, incomplete or hostile."""


class BadData(LlmtoolError):
    """A data set cannot be read, or an item of it is not what the task needs."""


class UnknownLayout(LlmtoolError):
    """A layout word, or one of its keys or values, is not one we know; or a folder holds no layout we know."""


class UnknownPreset(LlmtoolError):
    """A name that should be a preset, or a path to a file, is neither."""


class BadRun(LlmtoolError):
    """A choice of a training run is not one we know, not of its type, or impossible."""


class MissingFact(LlmtoolError):
    """A fact that the conversion needs is neither in the files nor given by the user."""


class Contradiction(LlmtoolError):
    """Two sources of one fact disagree: a flag against a file, or a file against another."""


class CannotHold(LlmtoolError):
    """The target layout has no place for something that the model has."""


class BadTarget(LlmtoolError):
    """The output path cannot be written as asked."""


class OutOfMemory(LlmtoolError):
    """A batch does not fit on the devices."""


class MissingExtra(LlmtoolError):
    """An optional dependency is not installed."""


class Problems(LlmtoolError):
    """Several faults of one thing. Carries every one of them (``problems``), not the first alone."""

    def __init__(self, title: str, problems: Iterable[str], shown: int = 10):
        self.problems = list(problems)
        head = self.problems[:shown]
        more = len(self.problems) - len(head)
        lines = [f"  - {problem}" for problem in head] + ([f"  - and {more} more of the kind"] if more else [])
        super().__init__("\n".join([title, *lines]))


class PlanError(Problems):
    """A conversion cannot be planned."""


class BadItems(BadData, Problems):
    """Items of a data set are not what the task needs."""


class BadState(BadCheckpoint, Problems):
    """A saved train state is not one of the run that wants to go on from it."""


class BadChoices(BadRun, Problems):
    """Choices of a training run are impossible, alone or beside one another."""
