"""``raypar compare``: two studies of one store or of two, and what its exit code says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recording import recorded
from results import make_result
from test_cli_exporting import ORIGIN
from typer.testing import CliRunner

from raypar.analysis.question import Question
from raypar.cli.app import app
from raypar.cli.store import share_of
from raypar.errors import RayparError
from raypar.study.trial import TrialResult

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)


def trials(factor: float = 1.0, num_repeats: int = 5, counts: tuple[int, ...] = (1, 2)) -> list[TrialResult]:
    return [
        make_result({"num_workers": n}, r, t * factor / n, started_at=1.7e9 + r)
        for n in counts
        for r, t in enumerate(STEADY[:num_repeats])
    ]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The addresses of two stores: of a study and what became of it, and of the study elsewhere."""
    folders = [tmp_path_factory.mktemp(name) for name in ("here", "there")]
    here, there = (f"sqlite:///{folder}/mlflow.db" for folder in folders)
    question = Question("base", {"num_workers": 1}, ("num_workers",))
    other = [replace(r, spec=replace(r.spec, workload="resnet")) for r in trials()]
    for name, results in {
        "base": trials(),
        "same": trials(),
        "slow": trials(1.2),
        "fast": trials(0.8),
        "once": trials(1.2, num_repeats=1),
        "apart": trials(counts=(4,)),
        "other": other,
    }.items():
        recorded(folders[0], replace(question, study_name=name), results, ORIGIN)
    recorded(folders[1], question, trials(0.5), {**ORIGIN, "version.torch": "2.16.0"})
    return here, there


def compare(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["compare", *args], env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.stdout.split()), done.stderr


def test_two_studies_stand_side_by_side(stores: tuple[str, str]) -> None:
    code, out, err = compare("base", "slow", "--tracking-uri", stores[0])
    assert (code, err) == (0, "")
    assert out.startswith("A: base, the reference B: slow ")
    assert "B is slower at 2 of 2 points" in out and "1.20× [1.1" in out
    assert "Nothing that is known of where they come from differs" in out


@pytest.mark.parametrize(
    ("study", "code", "said"),
    [
        ("slow", 1, "Slower than allowed: B takes over 5 % longer at 2 of 2 points"),
        ("same", 0, "Within what is allowed: B takes at most 5 % longer at all of 2 points."),
        ("fast", 0, "Within what is allowed"),
        ("once", 0, "The data can't tell whether B takes over 5 % longer at 2 of 2 points"),
    ],
)
def test_the_exit_code_says_whether_b_is_slower_than_allowed(
    stores: tuple[str, str], study: str, code: int, said: str
) -> None:
    found = compare("base", study, "--tracking-uri", stores[0], "--fail-if-slower", "5%")
    assert (found[0], found[2]) == (code, "") and said in found[1]


def test_what_is_slower_by_less_than_is_allowed_passes(stores: tuple[str, str]) -> None:
    assert compare("base", "slow", "--tracking-uri", stores[0], "--fail-if-slower", "30 %")[0] == 0


def test_the_reference_may_be_in_another_store(stores: tuple[str, str]) -> None:
    here, there = stores
    code, out, _ = compare("base", "base", "--tracking-uri", here, "--baseline-uri", there, "--fail-if-slower", "5%")
    assert code == 1 and "2.00× [" in out
    assert out.startswith(f"A: base ({there}), the reference B: base ({here}) ")
    assert "What differs where they come from (A → B): version.torch 2.16.0 → 2.15.0." in out
    code, out, _ = compare("base", "base", "--tracking-uri", there, "--baseline-uri", here, "--fail-if-slower", "5%")
    assert code == 0 and "0.50× [" in out


def test_an_allowance_with_nothing_to_judge_is_an_error(stores: tuple[str, str]) -> None:
    code, out, err = compare("base", "apart", "--tracking-uri", stores[0], "--fail-if-slower", "5%")
    assert code == 2 and "nothing to judge" in err
    assert "Only A has 2 points: num_workers=1, num_workers=2." in out
    assert compare("base", "apart", "--tracking-uri", stores[0])[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("base", "bass"), "no study `bass` in the store\n  → did you mean 'base'?"),
        (("base", "base"), "`base` is compared with itself"),
        (("base", "other"), "`base` trains mnist_mlp, `other` trains resnet"),
        (("base", "slow", "--fail-if-slower", "5"), "--fail-if-slower 5: must be a percentage"),
    ],
)
def test_what_can_not_be_compared_is_one_message_and_exit_code_2(
    stores: tuple[str, str], args: tuple[str, ...], message: str
) -> None:
    code, out, err = compare(*args, "--tracking-uri", stores[0])
    assert (code, out) == (2, "")
    assert message in err and "→" in err and "Traceback" not in err


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), (" 2.5 % ", 0.025), ("0%", 0.0), ("150%", 1.5)])
def test_an_allowance_is_a_percentage(text: str, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["5", "0.05", "-1%", "five%", "5%%", "nan%", "inf%", "%", "1_0%", ""])
def test_an_allowance_that_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(RayparError, match="must be a percentage"):
        share_of(text)


def test_nothing_is_made_where_there_is_no_store(tmp_path: Path) -> None:
    code, _, err = compare("a", "b", "--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db")
    assert code == 2 and "no study `a` in the store" in err and list(tmp_path.iterdir()) == []
