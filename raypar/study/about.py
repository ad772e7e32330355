"""What a study asks, as Markdown for people who come across it in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypar.study.space import Choice, Domain, Grid
from raypar.study.study import Study
from raypar.units import value_of


def about(study: Study, command: Sequence[str] = ()) -> str:
    """Question, workload, space, baseline, repeats, metric, fixed hyperparameters and the command that ran it last."""
    workload = study.workload
    what = "; ".join(text for text in (workload.description, workload.dataset) if text)
    facts = {
        "Trains": f"`{workload.name}`" + (f" ({what})" if what else ""),
        "Sweeps": "; ".join(f"`{key}` {domain_text(domain)}" for key, domain in study.space.items()) or "nothing",
        "Runs": _runs(study),
        "Compares with": _pairs(study.baseline) + " (else alike)" if study.baseline else "",
        "Judges by": f"{study.metric} (the {'higher' if study.mode == 'max' else 'lower'} the better)",
        "Holds fixed": _pairs(study.config),
        "Run by": f"`{' '.join(command)}`" if command else "",
    }
    lines = "\n".join(f"- **{name}:** {text}" for name, text in facts.items() if text)
    return f"{study.description}\n\n{lines}" if study.description else lines


def _runs(study: Study) -> str:
    points = len(study.points())
    if study.is_search:
        return f"{study.num_trials * points} trials, whose points are drawn"
    return f"{points} point{'s' * (points > 1)} × {study.num_repeats} repeat{'s' * (study.num_repeats > 1)}, timed"


def domain_text(domain: Domain) -> str:
    """``1, 2, 4`` for a grid; what a search draws from as a study file says it: ``loguniform(0.001, 1)``."""
    match domain:
        case Grid(values):
            return ", ".join(map(value_of, values))
        case Choice(values):
            return f"choice({', '.join(map(value_of, values))})"
        case _:
            return f"{type(domain).__name__.lower()}({value_of(domain.low)}, {value_of(domain.high)})"


def _pairs(chosen: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}` {value_of(value)}" for key, value in chosen.items())
