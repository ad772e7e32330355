"""Write the gallery's reports: of the stored study that ships with raypar, and of two that its tests have.

python docs/gallery.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


class Report(NamedTuple):
    """One report of the gallery."""

    name: str
    title: str
    text: str
    figure: str  # key of the figure that the gallery shows


REPORTS = (
    Report(
        "quickstart",
        "The quick start",
        "Two batch sizes on one and on two workers, repeated until settled: a real run, that of `raypar demo`.",
        "speedup",
    ),
    Report(
        "scaling",
        "Strong scaling on four nodes",
        "Two batch sizes on 1 to 16 workers, with cost and energy, a trial that failed and one that was retried. The "
        "times are made up.",
        "speedup",
    ),
    Report(
        "search",
        "A search",
        "Sixteen random points of three hyperparameters, of which a scheduler stopped some early. The results are "
        "made up.",
        "main_effect",
    ),
)


def reports() -> dict[str, str]:
    """Return the gallery's files by name: ``quickstart.html`` and ``quickstart.svg``, and those of the others."""
    from raypar.cli.demo import demo_uri
    from tests.golden import studies

    files = {}
    with studies() as folder:
        for report in REPORTS:
            files |= _files(report, folder, demo_uri(folder))
    return files


def _files(report: Report, folder: Path, uri: str) -> dict[str, str]:
    from raypar.analysis.question import current_results
    from raypar.execution.stored import read_study
    from raypar.reporting.figures import figures_of
    from raypar.reporting.html import Origin, html_report
    from raypar.reporting.vega import Figure, static_svg
    from raypar.reporting.view import StudyView

    study = read_study(report.name, uri, folder)
    results = current_results(study.question, study.results).results
    figures = {each.key: each for each in figures_of(study.analysis, results) if isinstance(each, Figure)}
    page = html_report(StudyView(study.analysis), results, Origin(study.tags, study.description, study.source))
    return {f"{report.name}.html": page, f"{report.name}.svg": static_svg(figures[report.figure])}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in reports().items():
        (folder / name).write_text(content, encoding="utf-8")
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
