"""A user's question is answered within one search of the documentation: its section is among the first results.

The site searches with lunr (BM25, where a word of a title weighs as much as a thousand of the text). The same is done
here on the pages' Markdown, so that no site has to be built.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TITLE_BOOST = 1000
NUM_SHOWN = 3
K1, B = 1.2, 0.75  # lunr's
STOP_WORDS = frozenset(
    {"a", "an", "and", "does", "for", "how", "is", "my", "of", "on", "or", "the", "to", "what", "with"}
)
# A question as a user may type it, and the section that answers it.
QUESTIONS = {
    "two machines ssh": "clusters.md: Two machines over SSH",
    "run on two machines": "clusters.md: Two machines over SSH",
    "mlflow server with a password": "mlflow.md: A server with a password",
    "mlflow password": "mlflow.md: A server with a password",
    "stop pinning": "studies.md: CPU affinity: how to stop pinning",
    "turn off pinning": "studies.md: CPU affinity: how to stop pinning",
    "cpu affinity": "studies.md: CPU affinity: how to stop pinning",
    "my own DataLoader": "studies.md: Your own DataLoader",
    "custom dataloader": "studies.md: Your own DataLoader",
    "paired": 'measuring.md: What "paired" means',
    "what does paired mean": 'measuring.md: What "paired" means',
    "Ray Tune": "other_tools.md: Ray Tune",
    "optuna": "other_tools.md: Optuna",
    "hyperfine": "other_tools.md: hyperfine",
    "pytorch lightning": "other_tools.md: Lightning",
    "W&B sweeps": "other_tools.md: W&B sweeps",
    "asv": "other_tools.md: asv",
}


@dataclass(frozen=True)
class Section:
    """Part of a page below one heading, with the stems in its title and in its text."""

    name: str
    title: Counter[str]
    text: Counter[str]


def stems(text):
    words = (re.sub(r"^\W+|\W+$", "", word) for word in re.split(r"[\s\-]+", text.lower()))
    return Counter(re.sub(r"(?<=\w{3})(ing|ed|es|s|e)$", "", word) for word in words if word and word not in STOP_WORDS)


@cache
def sections():
    found = []
    for path in sorted(DOCS.glob("*.md")):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for part in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
            title, _, below = part.partition("\n")
            found.append(Section(f"{path.name}: {title}", stems(title), stems(below)))
    return found


def relevance(of, field):
    """Return each section's BM25 score for the stems in one of its fields."""
    every = [getattr(section, field) for section in sections()]
    mean = sum(each.total() for each in every) / len(every)
    scores = [0.0] * len(every)
    for stem in of:
        num_with = sum(stem in each for each in every)
        rarity = math.log(1 + (len(every) - num_with + 0.5) / (num_with + 0.5))
        for i, each in enumerate(every):
            scores[i] += rarity * each[stem] * (K1 + 1) / (each[stem] + K1 * (1 - B + B * each.total() / mean))
    return scores


def results(query):
    by_field = (relevance(stems(query), field) for field in ("title", "text"))
    scores = [TITLE_BOOST * title + text for title, text in zip(*by_field, strict=True)]
    ranked = sorted(zip(scores, sections(), strict=True), key=lambda each: -each[0])
    return [section.name for score, section in ranked if score > 0]


@pytest.mark.parametrize("query", QUESTIONS)
def test_a_search_finds_the_section_that_answers_the_question(query):
    assert QUESTIONS[query] in results(query)[:NUM_SHOWN]


def test_a_search_without_an_answer_finds_nothing():
    assert results("zebra crossing") == []
