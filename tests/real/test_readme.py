"""README's studies, run by README's commands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SCRIPT = Path(__file__).parents[1] / "golden" / "scripts" / "torchrun_script.py"
ELSEWHERE = ("ui", "doctor", "improve")  # tested elsewhere


@pytest.mark.ray
def test_the_study_in_the_readme_runs_as_printed(cli):
    (study,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    cli.write("mine.py", study)
    shown = run_commands(cli, README.split(study)[1])
    assert list(shown) == ["plan", "study", "report", "recommend"]
    assert "12 trials" in shown["plan"] and "[12/12]" in shown["study"]
    assert "mine: 4 points, 12 trials" in shown["report"] and "Does a wider network pay off" in shown["report"]
    accuracies = [int(share) for share in re.findall(r"(\d+)\.\d %", shown["recommend"])]
    assert max(accuracies) >= 95
    cli.wait_for_its_processes()


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_the_readmes_commands_for_a_script_run_as_printed(cli):
    cli.write("train.py", SCRIPT.read_text(encoding="utf-8"))
    shown = run_commands(cli, README.split("## Your own script")[1])
    assert list(shown) == ["study", "why"]
    assert "[6/6]" in shown["study"] and "Does a second worker pay off for train.py?" in shown["study"]
    assert "Each step at num_workers=2 takes" in shown["why"]
    cli.wait_for_its_processes()


def run_commands(cli, text):
    """Run the commands of a text's first block but those that are tested elsewhere; return their outputs by name."""
    (block, *_) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    commands = [line.split() for line in re.findall(r"^raypar (.*?)(?:  +#.*)?$", block, re.MULTILINE)]
    return {words[0]: cli.done(*words) for words in commands if words[0] not in ELSEWHERE}
