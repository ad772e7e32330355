"""Errors that a user can cause, each with a hint."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from textwrap import indent

from raypar.units import counted, size

EXIT_BAD_INPUT = 2
MAX_SUGGESTIONS = 3
MAX_SHORT = 5  # characters of a short word, in which one wrong character is a large share
MIN_PART = 3  # characters of a partial name that is recognised
TRAIN_PACKAGES = ("torch", "torchvision")  # of the extra `train`


class RayparError(Exception):
    """Error that the user can fix. ``str()`` is the message to show, the hint included.

    Attributes:
        message: what is wrong, with the value.
        hint: the fix, or where to look; may be None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.hint}" if self.hint else self.message


class DataError(RayparError):
    """Absent, half-downloaded or corrupt data set."""


class StoreError(RayparError):
    """Tracking store that can't be read or written."""


class ClusterError(RayparError):
    """Ray that can't be started or reached, or lacks resources that a trial needs."""


class NotForTraining(RayparError):
    """Missing package that training needs, as on a client that only submits and reads."""

    def __init__(self, what: str) -> None:
        super().__init__(what, hint="pip install 'raypar[train]'")


def is_for_training(error: BaseException) -> bool:
    """Return True if an import failed for a package of `raypar[train]`."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in TRAIN_PACKAGES


def check_for_training(why: str) -> None:
    """Raise NotForTraining if torch is not installed; `why` names the need: "trials train with it"."""
    if importlib.util.find_spec("torch") is None:
        raise NotForTraining(f"torch is not in this environment, and {why}")


class DoesNotFit(RayparError):
    """Trial that needs more memory than it may take."""


class BrokeOff(RayparError):
    """Loss of the cluster or store of a running study. Finished trials are kept."""

    @classmethod
    def by(cls, error: RayparError) -> BrokeOff:
        return cls(error.message, hint=error.hint)


class Shown(str):
    """Text that a message shows for a value, without quotes."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Mistake:
    """One thing wrong with a study: field, value, problem and fix."""

    field: str
    value: object
    problem: str
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.field} = {shortened(self.value)}: {self.problem}"
        return f"{text}\n      → {self.hint}" if self.hint else text


class StudyError(RayparError):
    """All the mistakes of one study.

    Attributes:
        mistakes: each with its field, value, problem and fix.
        where: the study file; None: not from a file.
        of: the invalid study; None: unknown.
    """

    def __init__(self, mistakes: Iterable[Mistake], *, where: Path | str | None = None, of: object = None) -> None:
        self.mistakes: tuple[Mistake, ...] = tuple(mistakes)
        self.where, self.of = where, of
        count = len(self.mistakes)
        head = f"{where}: " if where else ""
        head += "1 mistake in the study" if count == 1 else f"{count} mistakes in the study"
        super().__init__("\n".join([head, *(f"  {m}" for m in self.mistakes)]))

    def at(self, where: Path | str) -> StudyError:
        """Return the same mistakes with the file they are in."""
        return StudyError(self.mistakes, where=where)


def shortened(value: object, most: int = 200) -> str:
    """Return the value's ``repr``, cut in the middle if it is longer; its type if ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:  # a faulty repr of the user's, or an integer with more digits than Python prints
        return f"<{type(value).__name__}>"
    return cut(text, most)


def cut(text: str, most: int = 500) -> str:
    """Return the text; if it is longer than `most`, with its middle omitted: ``head … 7.90 MB omitted … tail``."""
    if len(text) <= most:
        return text
    head, tail = most // 2, most // 4
    num_bytes = len(text[head : len(text) - tail].encode(errors="surrogatepass"))
    return f"{text[:head]} … {size(num_bytes)} omitted … {text[len(text) - tail :]}"


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, or a note if that raises."""
    try:
        return str(error)
    except Exception as raised:
        return f"(no message: its __str__ raised {type(raised).__name__})"


def one_for_all(errors: Sequence[RayparError]) -> RayparError:
    """Return one error for several mistakes, each with its hint."""
    if len(errors) == 1:
        return errors[0]
    lines = (f"{each.message}\n    → {each.hint}" if each.hint else each.message for each in errors)
    return RayparError("\n".join([f"{len(errors)} mistakes", *(indent(text, "  ") for text in lines)]))


class WorkloadError(RayparError):
    """Mistakes in the data or model of a workload, which keep every trial from training."""

    @classmethod
    def of(cls, workload: str, mistakes: Sequence[Mistake]) -> WorkloadError:
        """Return one error for all mistakes of the workload of this name."""
        head = f"workload {workload}: {counted(len(mistakes), 'mistake')} in its data and model"
        return cls("\n".join([head, *(f"  {m}" for m in mistakes)]))


def closest(word: str, choices: Iterable[str]) -> list[str]:
    """Return up to three choices that a misspelt or partial word may stand for, the closest first."""
    ratios = {choice: _closeness(word.lower(), choice.lower()) for choice in choices}
    close = (choice for choice, ratio in ratios.items() if ratio)
    return sorted(close, key=lambda choice: (-ratios[choice], choice))[:MAX_SUGGESTIONS]


def _closeness(word: str, choice: str) -> float:
    """Return the share of equal characters; 0 if the two are not close.

    Parts that both names begin or end with don't count: ``hidden_size`` is not close to ``pipeline_size``.
    """
    if _looks_like(word, choice):
        return 1.0
    parts, others = re.split(r"[\W_]+", word), re.split(r"[\W_]+", choice)
    for at in (0, -1):
        while len(parts) > 1 and len(others) > 1 and parts[at] == others[at]:
            del parts[at], others[at]
    text, other = "_".join(parts), "_".join(others)
    matcher, least = SequenceMatcher(None, text, other), 0.75 if max(len(text), len(other)) <= MAX_SHORT else 0.8
    if len(word) >= MIN_PART and (choice.startswith(word) or re.search(rf"[\W_]{re.escape(word)}$", choice)):
        least = 0.0
    return ratio if matcher.real_quick_ratio() >= least and (ratio := matcher.ratio()) >= least else 0.0


def _looks_like(word: str, choice: str) -> bool:
    """Return True if a word equals a choice except for look-alike letters and invisible characters."""
    seen = "".join(char for char in unicodedata.normalize("NFKC", word) if unicodedata.category(char) != "Cf")
    alike = (one == other or not one.isascii() for one, other in zip(seen, choice, strict=False))
    return not word.isascii() and len(seen) == len(choice) and all(alike)


def odd_characters(word: str, choice: str) -> str:
    """Return the names of a word's non-ASCII characters that its closest choice lacks."""
    odd = dict.fromkeys(char for char in word if not char.isascii() and char not in choice)
    names = [f"U+{ord(char):04X} {unicodedata.name(char, '')}".strip() for char in odd]
    return f" (the word contains {', '.join(names[:MAX_SUGGESTIONS])})" if names else ""


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` if some choices are close, else all choices."""
    every = sorted(choices)
    if close := closest(word, every):
        return f"did you mean {' or '.join(map(repr, close))}?{odd_characters(word, close[0])}"
    return "choose from: " + ", ".join(every)
