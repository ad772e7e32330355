"""Commands as workloads: any program with hyperparameters in braces, and the rules that read its output."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import PurePath
from string import Formatter

from raypar.errors import Mistake


@dataclass(frozen=True)
class PlaceValues:
    """Values of the other names in braces on a machine. The defaults are for a command that is only checked.

    Attributes:
        num_nodes: number of machines.
        node_rank: number of this machine, from 0.
        workers_per_node: workers on each machine.
        master_addr: address of the first machine.
        master_port: free port on the first machine.
        seed: the trial's seed.
        repeat: number of the repeat, from 0.
        output_dir: empty folder, whose files are kept with the trial.
    """

    num_nodes: int = 1
    node_rank: int = 0
    workers_per_node: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    seed: int = 0
    repeat: int = 0
    output_dir: str = "output"

    def with_config(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return the value of each name in braces: these, and a trial's hyperparameters."""
        return {**config, **vars(self)}


PLACES = frozenset(each.name for each in fields(PlaceValues))
MAX_WORD_BYTES = 128 * 1024 - 1  # of one argument, on Linux


# Parts of a regular expression: escapes, character classes, and the brackets of groups.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?P<|\?)?|\)")


@dataclass(frozen=True)
class Command:
    """A program to run as a trial, once on each machine.

    Attributes:
        template: the command line, with hyperparameters and `PLACES` in braces; literal braces are doubled. A text is
            split into words like in a shell before values are filled in, so a value never becomes two words.
        shell: hand the text to ``/bin/sh``; values are quoted.
        metrics: name to a regular expression whose first group is the value, searched in each line of output.
        tensorboard: folder of event files to read at the end, with braces like the template; empty: none.
        folder: working folder, relative to the study file's folder, with braces like the template; empty: that folder.
        fresh_process: start new interpreters even where forks would do (`raypar.train.script_launch`).
    """

    template: str | tuple[str, ...]
    shell: bool = False
    metrics: Mapping[str, str] = field(default_factory=dict)
    tensorboard: str = ""
    folder: str = ""
    fresh_process: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the template; with a shell, its whole text. Raises ValueError if a quote is not closed."""
        if not isinstance(self.template, str):
            return tuple(map(str, self.template))
        return (self.template,) if self.shell else tuple(shlex.split(self.template))

    @property
    def names(self) -> tuple[str, ...]:
        """Hyperparameters in braces, in order; none if the template is faulty."""
        try:
            names = [name for text in (*self.words, self.tensorboard, self.folder) for name in _names(text)]
        except (ValueError, AttributeError):
            return ()
        return tuple(name for name in dict.fromkeys(names) if name not in PLACES)

    @property
    def scripts(self) -> tuple[str, ...]:
        """Paths of scripts among its words, relative to the study's folder."""
        return self._from_study(path for path in self._paths if not PurePath(path).is_absolute())

    @property
    def _paths(self) -> list[str]:
        return [word for word in self._split() if word.endswith(".py") and word[0] != "-"]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths, relative to the study's folder, of possible Python files: its scripts, and modules after ``-m``."""
        words = self._split()
        modules = (f"{word.replace('.', '/')}.py" for flag, word in pairwise(words) if flag == "-m")
        return (*self.scripts, *self._from_study(modules))

    def _split(self) -> Sequence[str]:
        """Return its words as a shell would see them; none if the template is faulty."""
        try:
            return shlex.split(self.template) if isinstance(self.template, str) else self.words
        except ValueError:
            return ()

    def _from_study(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the paths with the command's folder, without those that are known only in a trial."""
        return tuple(str(PurePath(self.folder, path)) for path in paths if "{" not in self.folder + path)

    @property
    def title(self) -> str:
        """Name of the Python file, or else of the program."""
        program = self.template.split() if isinstance(self.template, str) else self.template
        words = self._paths or self.files or program
        return PurePath(str(words[0])).name if words else "command"

    def is_per_cent(self, name: str) -> bool:
        """Return whether a metric's expression has a percent sign after its first group, the value."""
        pattern = self.metrics.get(name) if isinstance(self.metrics, Mapping) else None
        if not isinstance(pattern, str):
            return False
        depth = 0
        for part in _PARTS.finditer(pattern):
            if part[0].startswith("("):
                depth += depth > 0 or part[0] != "(?"
            elif part[0] == ")" and depth:
                depth -= 1
                if not depth:
                    return bool(re.match(r"(?:\\s[*+?]?|\s|\(\?:)*%", pattern[part.end() :]))
        return False

    def filled(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """Return the command line of a trial.

        Args:
            values: value of each name in braces.
        """
        if self.shell:
            values = {name: shlex.quote(str(value)) for name, value in values.items()}
            return ("/bin/sh", "-c", *(word.format_map(values) for word in self.words))
        return tuple(word.format_map(values) for word in self.words)

    def problem(self, config: Mapping[str, object]) -> str:
        """Return why it can't be started with a trial's hyperparameters; empty if it can."""
        values = PlaceValues().with_config(config)
        try:
            for text in (*self.words, self.tensorboard, self.folder):
                text.format_map(values)
            words = self.filled(values)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError) as error:
            used = ", ".join(f"{name}={config[name]!r}" for name in _names_or_none(text) if name in config)
            return f"can't be filled in with {used}: {error}"
        filled = [*words, *(text.format_map(values) for text in (self.tensorboard, self.folder))]
        if not words[0].strip():
            return "begins with an empty word"
        if any("\0" in text for text in filled):
            return "holds a null character"
        if (size := max(len(word.encode(errors="surrogatepass")) for word in filled)) > MAX_WORD_BYTES:
            return f"has a word of {size:,} bytes; at most {MAX_WORD_BYTES:,} are allowed"
        return ""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield its mistakes that can be found before any trial."""
        where = "workload.command"
        hint = 'such as "python train.py --lr {lr}"'
        texts = self.template if isinstance(self.template, tuple) else (self.template,)
        if not texts or not isinstance(texts[0], (str, PurePath)) or not str(texts[0]).strip():
            yield Mistake(where, self.template, "must be a command line", hint=hint)
            return
        try:
            words = self.words
        except ValueError as error:
            yield Mistake(where, self.template, f"can't be split into words: {error}", hint="close the quote")
            return
        for text in (*words, self.tensorboard, self.folder):
            try:
                _names(text)
            except ValueError as error:
                yield Mistake(where, text, str(error), hint="write {name}; a literal brace is written twice: {{ }}")
        for name, pattern in self.metrics.items():
            try:
                wrong = "" if re.compile(pattern).groups else "has no group for the value"
            except (re.error, TypeError) as error:
                wrong = f"is not a regular expression: {error}"
            if wrong:
                yield Mistake(f"workload.metrics[{name!r}]", pattern, wrong, hint=r'such as r"loss[ =:]+([0-9.e+-]+)"')


def _names(text: str) -> list[str]:
    """Return the names in braces. Raises ValueError if braces are unbalanced or hold anything but a plain name."""
    names: list[str] = []
    for _, name, form, _ in Formatter().parse(text):
        if name is not None and not name.isidentifier():
            raise ValueError(f"{{{name}}} is not the name of a hyperparameter")
        if name is not None:
            names += [name, *_names(form or "")]  # a width may be a hyperparameter too: {lr:{width}}
    return names


def _names_or_none(text: str) -> list[str]:
    try:
        return _names(text)
    except ValueError:
        return []


# A complete printed number, with sign, thousands separators and exponent.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+])?"
    r"(?:(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
)


def number_in(pattern: re.Pattern[str], line: str) -> float | None:
    """Return the number that the first group of an expression matches in a line; None if there is none.

    The whole number is read even if the group matches only a part: 1.25e-05, not the 1.25 of ``([0-9.]+)``.
    """
    if not (match := pattern.search(line)) or match[1] is None:
        return None
    at = match.start(1) + len(match[1]) - len(match[1].lstrip())
    whole = next((number for number in _NUMBER.finditer(line) if number.start() <= at < number.end()), None)
    text = whole[0].replace(",", "") if whole else match[1]
    try:
        return float(text)
    except ValueError:
        return None
