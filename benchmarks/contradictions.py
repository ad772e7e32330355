"""Contradictions between the views of a study: random studies, each read in every view.

Random studies of 1 to 12 points and 1 to 8 repeats: with and without a baseline, searches, studies that ran until they
were settled; with noise from none to 30 %, disturbed by others or not, with failed, stopped and diverged trials, with
trials of different work, with a metric that differs or not. Each is shown as a report (short and verbose), as Markdown,
as a page without its drawings, and by `raypar recommend`. A contradiction is: two views with different answers or
recommended points; a claim about times ("faster", "slower", "the fastest") that another view denies, that its interval
doesn't support, or that stands beside the sentence that times can't be trusted; a recommended point that is excluded.
"""

from __future__ import annotations

import html
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
from common import begin, parser_for, print_bar, progress
from rich.console import Console

from raypar.analysis.analyse import StudyAnalysis, analyse
from raypar.analysis.comparison import Outcome
from raypar.analysis.question import Question
from raypar.analysis.recommend import Constraints, Decision, recommend
from raypar.reporting import html as page
from raypar.reporting.console import print_report
from raypar.reporting.export import answer_markdown, markdown_of
from raypar.reporting.recommend import RecommendView, print_recommendation
from raypar.reporting.view import StudyView
from raypar.study.conditions import Conditions
from raypar.study.space import Value
from raypar.study.trial import Failure, FailureKind, TrialResult, TrialSpec, TrialState, point_label

NUM_STUDIES = 1000
CONFIG = {"num_workers": 1, "cpus_per_worker": 1, "device": "cpu", "batch_size": 64, "epochs": 3, "lr": 0.1}
SPACES: tuple[dict[str, tuple[Value, ...]], ...] = (
    {"num_workers": (1, 2)},
    {"num_workers": (1, 2, 4, 8)},
    {"batch_size": (32, 256), "num_workers": (1, 2)},
    {"batch_size": (32, 64, 128), "num_workers": (1, 2, 4)},
    {"optimizer": ("sgd", "adam")},
    {"optimizer": ("sgd", "adam", "lion"), "lr": (0.1, 0.01)},
    {"lr": (0.1, 0.03, 0.01)},
    {"lr": (0.1,)},
)
ENDS = {TrialState.FAILED: 0.04, TrialState.STOPPED: 0.02, TrialState.DIVERGED: 0.04}

VALUE = r"\w+=\S*[^\s.,:;]"
LABEL = rf"((?:{VALUE} ?)+?)"
RECOMMENDED = re.compile(rf"Recommended: {LABEL}(?= \(|[,:])")
LEADING = re.compile(rf"Leading: {LABEL}(?= \(|,)")
FASTEST = re.compile(rf"{LABEL} is the fastest:")
DIRECTED = re.compile(rf"(\w+ workers|{VALUE}) (?:is|are) (faster|slower) than (\S+?)(?: at {LABEL})?: \d\S*×")
ON_TIMES = re.compile(r"(?<!may be )\b(?:faster|slower|is the fastest|Recommended:|pays? |paid )")


@dataclass(frozen=True)
class Sample:
    """A random study."""

    question: Question
    results: Sequence[TrialResult]


def random_study(rng: np.random.Generator) -> Sample:
    """Return a study with random points, effects and noise."""
    space = SPACES[rng.integers(len(SPACES))]
    keys = list(space)
    points: list[dict[str, Value]] = [{}]
    for key, values in space.items():
        points = [{**point, key: value} for point in points for value in values]
    is_search = bool(rng.random() < 0.15)
    num_repeats = 1 if is_search else int(rng.integers(1, 9))
    baseline: dict[str, Value] = {}
    if not is_search and rng.random() < 0.7:
        key = keys[-1] if "num_workers" in keys or rng.random() < 0.5 else keys[0]
        baseline = {key: space[key][0]}
    question = Question(
        "random",
        baseline,
        tuple(keys),
        points=() if is_search else tuple(points),
        num_repeats=num_repeats,
        is_search=is_search,
        text="What is it worth?" if rng.random() < 0.5 else "",
        mode=str(rng.choice(["max", "max", "min"])),
        max_repeats=12 if not is_search and rng.random() < 0.3 else None,
        price_per_node_hour=2.5 if rng.random() < 0.2 else None,
    )
    cv, block_cv = float(rng.choice([0.0, 0.01, 0.05, 0.3])), float(rng.choice([0.0, 0.1]))
    metric_sd, metric_effect = float(rng.choice([0.0, 0.002, 0.01])), float(rng.choice([0.0, 0.0, 0.03]))
    disturbed = float(rng.choice([0.0, 0.0, 0.3, 1.0]))
    is_unequal = bool(rng.random() < 0.1)
    log_times = rng.normal(0, float(rng.choice([0.0, 0.05, 0.7])), len(points))
    metrics = 0.9 + rng.normal(0, metric_effect, len(points))
    results = []
    for repeat in range(num_repeats):
        block = rng.normal(0, block_cv)
        for i in rng.permutation(len(points)):
            point = points[i]
            time_s = 4.0 * float(np.exp(log_times[i] + block + rng.normal(0, cv)))
            accuracy = float(np.clip(metrics[i] + rng.normal(0, metric_sd), 0, 1))
            num_samples = 180_000 + 20_000 * int(i) * is_unequal
            taken = 0.5 if rng.random() < disturbed else 0.001
            state = TrialState.FINISHED
            for end, share in ENDS.items():
                state = end if rng.random() < share else state
            spec = TrialSpec("random", "mnist_mlp", point, {**CONFIG, **point}, repeat, seed=repeat)
            results.append(_result(spec, state, time_s, accuracy, num_samples, taken, float(len(results))))
    return Sample(question, results)


def _result(
    spec: TrialSpec, state: TrialState, time_s: float, accuracy: float, num_samples: int, taken: float, at: float
) -> TrialResult:
    if state is TrialState.FAILED:
        return TrialResult(spec, state, started_at=at, failure=Failure(FailureKind.ERROR, "boom"))
    is_whole = state is TrialState.FINISHED
    return TrialResult(
        spec,
        state,
        started_at=at,
        wall_s=time_s + 1,
        train_time_s=time_s if is_whole else None,
        throughput_samples_per_s=num_samples / time_s if is_whole else None,
        reports=({"epoch": 3, "accuracy": accuracy},) if is_whole else (),
        conditions=Conditions.from_stored({"cores": [[0]], "foreign_cpu_share": [taken]}),
    )


def views_of(analysis: StudyAnalysis, sample: Sample) -> dict[str, str]:
    """Return the text of each view, without line breaks."""

    def printed(show: object, *arguments: object, **options: object) -> str:
        console = Console(file=io.StringIO(), width=400)
        assert callable(show)
        show(*arguments, console, **options) if show is print_report else show(console, *arguments)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    view, advice = StudyView(analysis), recommend(sample.question, sample.results, Constraints())
    with patch.object(page, "static_svg", return_value=""), patch.object(page, "_chart_script", return_value=""):
        markup = page.html_report(view, sample.results, page.Origin({}))
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", markup, flags=re.DOTALL)
    views = {
        "report": printed(print_report, view),
        "verbose report": printed(print_report, view, verbose=True),
        "recommend": printed(print_recommendation, RecommendView(advice)),
        "Markdown": markdown_of(view, {}),
        "MLflow": answer_markdown(view, 20),
        "page": html.unescape(re.sub(r"<[^>]+>", " ", body)),
    }
    return {name: re.sub(r"\s+", " ", text).replace(" ,", ",").replace(" :", ":") for name, text in views.items()}


def contradictions(sample: Sample) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    analysis = analyse(sample.question, sample.results)
    verdict, advice = analysis.verdict, recommend(sample.question, sample.results, Constraints())
    views = views_of(analysis, sample)
    for name, text in views.items():
        if name != "recommend" and re.sub(r"\s+", " ", verdict.answer) not in text:
            yield f"{name}: lacks the answer: {verdict.answer}"
        if verdict.doubt and (claim := ON_TIMES.search(text)):
            yield f"{name}: a claim on times that can't be trusted: {text[claim.start() - 40 : claim.end() + 40]}"
    yield from _different(views, RECOMMENDED, "recommended")
    yield from _different(views, FASTEST, "the fastest")
    recommended = {label.strip() for text in views.values() for label in RECOMMENDED.findall(text)}
    leading = {label.strip() for text in views.values() for label in LEADING.findall(text)}
    if recommended and leading and not sample.question.is_search:
        yield f"recommended {recommended}, and leading {leading}"
    if recommended and advice.decision in (Decision.UNCLEAR, Decision.NONE):
        yield f"recommended {recommended}, which is {advice.decision}"
    excluded = {point_label(c.point) for c in advice.candidates if c.exclusion}
    if wrong := recommended & excluded:
        yield f"recommended and excluded: {wrong}"
    yield from _wrong_directions(analysis, views)
    fastest = {label.strip() for text in views.values() for label in FASTEST.findall(text)}
    for text in views.values():
        for sentence in re.findall(r"([^.]*?) are too close to call", text):
            if wrong := [label for label in fastest if f"{label} " in f"{sentence} "]:
                yield f"the fastest, and too close to call: {wrong}"


def _different(views: Mapping[str, str], pattern: re.Pattern[str], what: str) -> Iterator[str]:
    labels = {name: {label.strip() for label in pattern.findall(text)} for name, text in views.items()}
    if len(set.union(*labels.values())) > 1:
        yield f"{what}: {labels}"


def _wrong_directions(analysis: StudyAnalysis, views: Mapping[str, str]) -> Iterator[str]:
    """Yield the claims on a point and its baseline that are not the outcome of their comparison."""
    outcomes = {(c.who, c.base, c.setting): c.outcome for c in analysis.verdict.comparisons}
    for name, text in views.items():
        for who, direction, base, setting in DIRECTED.findall(text):
            outcome = outcomes.get((who, base, setting.strip()))
            if outcome is not None and outcome is not Outcome(direction):
                yield f"{name}: {who} is {direction} than {base} at {setting}, which is {outcome}"


def main() -> None:
    parser = parser_for(__doc__, rounds=NUM_STUDIES, quick_rounds=100)
    args = begin(parser)
    rng, num_wrong, kinds = np.random.default_rng(0), 0, Counter[str]()
    for i in range(args.rounds):
        found = list(contradictions(random_study(rng)))
        num_wrong += bool(found)
        kinds.update(text.partition(":")[0] for text in found)
        for text in found[:3]:
            progress(f"study {i}: {text}")
    print_bar(f"studies of {args.rounds} with a contradiction", float(num_wrong), "{:.0f}".format, at_most=0)


if __name__ == "__main__":
    main()
