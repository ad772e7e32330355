"""Changes of settings that make a script faster, in a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from raypar import units
from raypar.analysis.improve import Change, best_of, changes_of, with_repeated
from raypar.reporting.documents import Document
from raypar.reporting.text import Column, print_line, print_paragraph, print_table
from raypar.reporting.why import WhyView, not_observed, outcome_of
from raypar.study.script_settings import settings_of
from raypar.study.trial import point_label

if TYPE_CHECKING:
    from rich.console import Console

    from raypar.analysis.analyse import StudyAnalysis
    from raypar.study.observation import ObservedRank

FindCalls: TypeAlias = Callable[[Collection[str]], Iterable[str]]

MAX_SITES = 3
LOADER, DDP, OPTIMIZER = "DataLoader", "DistributedDataParallel", "optimizer"
MODEL, BEFORE, START, EVALUATION = "model", "before torch", "start", "evaluation"
# By setting: where the script changes, and what is written there.
IN_SCRIPT: Mapping[str, tuple[str, str]] = {
    "loader_workers": (LOADER, "num_workers={}"),
    "pin_memory": (LOADER, "pin_memory={}"),
    "persistent_workers": (LOADER, "persistent_workers={}"),
    "prefetch_factor": (LOADER, "prefetch_factor={}"),
    "evaluation_batches": (EVALUATION, ""),
    "fused_optimizer": (OPTIMIZER, "fused={}"),
    "compile": (MODEL, "model.compile()"),
    "channels_last": (MODEL, "model.to(memory_format=torch.channels_last)"),
    "cudnn_benchmark": (START, "torch.backends.cudnn.benchmark = {}"),
    "tf32": (START, 'torch.set_float32_matmul_precision("high")'),
    "expandable_segments": (BEFORE, 'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:{}"'),
    "threads": (START, "torch.set_num_threads({})"),
    "bucket_cap_mb": (DDP, "bucket_cap_mb={}"),
    "gradient_as_bucket_view": (DDP, "gradient_as_bucket_view={}"),
    "static_graph": (DDP, "static_graph={}"),
}
# By place, with what is called there and what is written.
EDITS: Mapping[str, str] = {
    LOADER: "Change {call}: {text}.",
    DDP: "Change {call}: {text}.",
    OPTIMIZER: "Change {call}: {text}.",
    MODEL: "Add where the model is made: {text}.",
    BEFORE: "Add before torch is imported: {text}.",
    START: "Add at the start of the script: {text}.",
    EVALUATION: "Evaluate less often, or on fewer batches of {call}.",
}


@dataclass(frozen=True)
class ImproveView(Document):
    """Changes of a script's settings, and what each of them brought.

    Attributes:
        study: its name.
        changes: the fastest first.
        calls: calls in the script by what is changed there, with file and line if known.
        why: the verdict on the unchanged script.
        sentences: the answer.
    """

    kind = "improve"
    shown = "study changes calls why sentences"
    study: str
    changes: Sequence[Change]
    calls: Mapping[str, str]
    why: Sequence[str]
    is_observed: bool = True

    @classmethod
    def of(
        cls, analysis: StudyAnalysis, sites_of: FindCalls = lambda _: (), repeated: StudyAnalysis | None = None
    ) -> ImproveView:
        """Return the view of an analysis of all trials.

        Args:
            repeated: analysis of the changes that were repeated; None: all trials support claims.
            sites_of: finds the calls of one of some classes in the script, as ``/path/train.py:41``.
        """
        evidence = analysis.evidence
        verdict = WhyView.of(analysis, only_unchanged=True)
        ranks = [rank for answer in verdict.points for rank in answer.ranks[:1]]
        calls = _calls(ranks, sites_of)
        sentences = verdict.sentences if verdict.points else tuple(map(not_observed, verdict.not_observed))
        changes = changes_of(evidence)
        if repeated is not None:
            changes = with_repeated(changes, changes_of(repeated.evidence))
        return cls(evidence.question.study_name, changes, calls, sentences, bool(verdict.points))

    @cached_property
    def recommendation(self) -> tuple[str, ...]:
        """The recommended changes, and what to write in the script."""
        if not self.is_observed:
            return ("No setting was tried, because no steps of the unchanged script were observed.",)
        if not self.changes:
            return ("No setting is worth trying: none of them shortens a part that takes much time.",)
        best = best_of(self.changes)
        if not best:
            return ("No change of settings makes it faster with confidence.",)
        return tuple(line for change in best for line in self._recommended(change))

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The recommendation, then the other changes."""
        best = best_of(self.changes)
        return (*self.recommendation, *(_about(change) for change in self.changes if change not in best))

    def _recommended(self, change: Change) -> Iterator[str]:
        losses = "same losses" if change.has_same_losses else "losses not comparable"
        yield f"Recommended: {_words(change)}, {outcome_of(change.comparison)}, {losses}."
        if pays_off_after_s := change.pays_off_after_s:
            yield (
                f"It adds {units.rough_seconds(change.start_s)} to each start, so it pays off for a training that "
                f"takes more than {units.rough_seconds(pays_off_after_s)} unchanged."
            )
        by_place: dict[str, list[str]] = {}
        for key, value in settings_of(change.settings).items():
            place, text = IN_SCRIPT[key]
            by_place.setdefault(place, []).append(text.format(value))
        for place, texts in by_place.items():
            yield EDITS[place].format(call=self.calls.get(place, ""), text=", ".join(texts))


def print_improve(console: Console, view: ImproveView) -> None:
    """Print the verdict, a table of the changes, and the recommendation."""
    for sentence in view.why:
        print_paragraph(console, sentence)
    if view.changes:
        print_line(console, "")
        print_table(console, _columns(view.changes))
    if view.why or view.changes:
        print_line(console, "")
    for sentence in view.recommendation:
        print_paragraph(console, sentence)


def _calls(ranks: Sequence[ObservedRank], sites_of: FindCalls) -> dict[str, str]:
    """Return the calls that settings change: ``DataLoader(…) at train.py:41``."""
    loaders = [loader for rank in ranks for loader in rank.loaders if loader.site]
    optimizers = sorted({name for rank in ranks for name in rank.optimizers})
    return {
        LOADER: "DataLoader(…)" + _at(each.site for each in loaders if each.is_trained_on),
        EVALUATION: "DataLoader(…)" + _at(each.site for each in loaders if not each.is_trained_on),
        DDP: "DistributedDataParallel(…)" + _at(sites_of(("DistributedDataParallel", "DDP"))),
        OPTIMIZER: f"{' and '.join(optimizers) or 'optimizer'}(…)" + _at(sites_of(optimizers)),
    }


def _shown(site: str) -> str:
    """Return file and line of a call, relative to the current folder if the file is there or below."""
    path = Path(site)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def _at(sites: Iterable[str]) -> str:
    named = list(dict.fromkeys(map(_shown, sites)))
    return f" at {units.listed(named, MAX_SITES, word='and')}" if named else ""


def _words(change: Change) -> str:
    at = f" ({point_label(change.point)})" if change.point else ""
    return change.settings.replace(" ", " and ") + at


def _about(change: Change) -> str:
    if change.failure:
        return f"{_words(change)} failed: {change.failure.rstrip('.')}."
    losses = ", but the losses change: not recommended" if change.is_faster and change.has_same_losses is False else ""
    return f"{_words(change)}: {outcome_of(change.comparison)}{losses}."


_LOSSES = {True: "same", False: "differ", None: "not comparable"}


def _columns(changes: Sequence[Change]) -> list[Column]:
    cells = {
        "change": [_words(change) for change in changes],
        "speedup": [units.ratio_interval(change.comparison.estimate) for change in changes],
        "outcome": ["failed" if change.failure else str(change.comparison.outcome) for change in changes],
        "losses": [units.MISSING if change.failure else _LOSSES[change.has_same_losses] for change in changes],
    }
    return [Column(head, each) for head, each in cells.items()]
