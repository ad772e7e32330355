"""Draw docs/quickstart.svg, the picture in README: what `raypar demo` prints.

python docs/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from raypar.cli.demo import STUDY, demo_folder, demo_uri
from raypar.execution.stored import read_study
from raypar.reporting.console import print_report
from raypar.reporting.view import StudyView

PICTURE = Path(__file__).with_name("quickstart.svg")
WIDTH = 80


def picture() -> str:
    """Return the report of the stored study in a terminal, as SVG."""
    folder = demo_folder()
    study = read_study(STUDY, demo_uri(folder), folder)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(file=nowhere, record=True, width=WIDTH, force_terminal=True, color_system="truecolor")
        console.print("$ raypar demo", style="bold", highlight=False)
        print_report(StudyView(study.analysis), console)
    svg = console.export_svg(title="raypar")
    # Drop the link to a web font, so that viewing the picture needs no network.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
