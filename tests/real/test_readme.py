"""README's studies, run by README's commands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SCRIPT = Path(__file__).parents[1] / "golden" / "scripts" / "plain_script.py"
ELSEWHERE = ("ui", "doctor")  # tested elsewhere


@pytest.mark.ray
def test_the_study_in_the_readme_runs_as_printed(cli):
    (study,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    cli.write("mine.py", study)
    (block, *_) = re.findall(r"```sh\n(.*?)```", README.split(study)[1], re.DOTALL)
    commands = re.findall(r"^raypar (.*?)(?:  +#.*)?$", block, re.MULTILINE)
    shown = {words.split()[0]: cli.done(*words.split()) for words in commands if words.split()[0] not in ELSEWHERE}
    assert list(shown) == ["plan", "study", "report", "recommend"]
    assert "12 trials" in shown["plan"] and "[12/12]" in shown["study"]
    assert "mine: 4 points, 12 trials" in shown["report"] and "Does a wider network pay off" in shown["report"]
    accuracies = [int(share) for share in re.findall(r"(\d+)\.\d %", shown["recommend"])]
    assert max(accuracies) >= 95
    cli.wait_for_its_processes()


@pytest.mark.ray
def test_the_readmes_study_of_a_script_runs_as_printed(cli):
    cli.write("train.py", SCRIPT.read_text(encoding="utf-8"))
    (line,) = re.findall(r"^raypar init (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    init, study = f"init {line}".replace("raypar ", "").split(" && ")
    cli.done(*init.split())
    assert "[6/6]" in cli.done(*study.split())
    cli.wait_for_its_processes()
