"""A study whose file or modules have changed since: what is run, what is kept, and what is said of it."""

from __future__ import annotations

import re
from pathlib import Path

from commands import Cli

STUDY = '''
"""How wide should it be?"""
from dataclasses import replace
from parts import network
from raypar import Study, grid
from raypar.workloads import digits

mine = replace(digits, name="mine", model=lambda config: network())
study = Study(workload=mine, space={"batch_size": grid(128, 256)}, num_repeats=1)
'''
PARTS = """
def network():
    import torch
    return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
"""


def test_points_that_a_study_gains_are_run_and_changed_code_is_named(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.write("s.py", STUDY)
    cli.write("parts.py", PARTS)
    first = cli.run("study", "s.py", "--no-ray")
    assert (first.returncode, first.stderr) == (0, "")
    cli.write("s.py", "# Which?\n" + STUDY.replace("grid(128, 256)", "grid(256, 512)"))
    cli.write("parts.py", PARTS.replace("def network():", 'def network():\n    """16 units."""'))
    same = cli.run("plan", "s.py")
    assert "done already: 1; to run: 1" in same.stdout and "other code" not in same.stdout

    cli.write("parts.py", PARTS.replace("16", "24"))
    more = cli.run("resume", "s")
    assert (more.returncode, more.stderr) == (0, "")
    assert more.stdout.startswith("1 trial in the store ran other code: parts.py changed since.")
    assert re.findall(r"batch_size=(\d+) #1  trained", more.stdout) == ["512"]
    told = " ".join(more.stdout.split())
    assert "1 of 2 trials ran other code than the latest one: parts.py changed in between." in told
