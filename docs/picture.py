"""Draw docs/quickstart.svg, the picture in README, from a study that was run in the current folder.

raypar study studies/quickstart.py && python docs/picture.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from raypar.analysis.analyse import analyse
from raypar.analysis.question import question_from_dict
from raypar.report.console import print_report
from raypar.track.store import Store, default_tracking_uri

STUDY = "quickstart"
WIDTH = 84


def main() -> None:
    folder = Path.cwd()
    store = Store(default_tracking_uri(folder), folder)
    analysis = analyse(question_from_dict(store.question(STUDY)), store.results(STUDY))
    console = Console(record=True, width=WIDTH, force_terminal=True)
    console.print("$ raypar study studies/quickstart.py", style="bold", highlight=False)
    print_report(analysis, console)
    svg = console.export_svg(title="raypar")
    # Drop the link to a web font, so that viewing the picture needs no network.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    Path(__file__).with_name("quickstart.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
