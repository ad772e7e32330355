"""``raypar store compare``: stores and exit codes; tests/golden has a whole comparison."""

from dataclasses import replace

import pytest
from command import joined, raypar, refused
from recording import recorded
from results import make_result, stored_conditions

from raypar.analysis.question import Question
from raypar.study.trial import TrialState

STEADY = (4.00, 4.01, 3.99, 4.02, 3.98)
ORIGIN = {"version.torch": "2.15.0", "host": "n1"}


def trials(factor=1.0, num_repeats=5, counts=(1, 2)):
    runs = [(n, r, t * factor / n) for n in counts for r, t in enumerate(STEADY[:num_repeats])]
    return [make_result({"num_workers": n}, r, time_s, started_at=1.7e9 + r) for n, r, time_s in runs]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The addresses of two stores: one with versions of a study, one with the study of another machine."""
    here, there = (tmp_path_factory.mktemp(name) for name in ("here", "there"))
    question = Question("base", {"num_workers": 1}, ("num_workers",))
    resnet = [replace(r, spec=replace(r.spec, workload="resnet")) for r in trials()]
    studies = {"base": trials(), "same": trials(), "slow": trials(1.2), "fast": trials(0.8), "other": resnet}
    gone = [replace(r, state=TrialState.DIVERGED) for r in trials(counts=(2,))]
    studies |= {"lacking": trials(counts=(1,)), "broken": [*trials(counts=(1,)), *gone]}
    studies |= {"once": trials(1.2, num_repeats=1), "apart": trials(counts=(4,))}
    busy = {"cores": [[0]], "foreign_cpu_share": [0.5]}
    studies["disturbed"] = [replace(r, conditions=stored_conditions(busy)) for r in trials(3.59)]
    for name, results in studies.items():
        recorded(here, replace(question, study_name=name), results, ORIGIN)
    recorded(there, question, trials(0.5), {**ORIGIN, "version.torch": "2.16.0"})
    return f"sqlite:///{here}/mlflow.db", f"sqlite:///{there}/mlflow.db"


def compared(*args):
    code, out, err = raypar("store", "compare", *args, width=200)
    assert err == ""
    return code, joined(out)


@pytest.mark.parametrize(
    ("study", "flags", "code", "verdict"),
    [
        ("slow", "5%", 1, "B is more than 5 % slower at 2 of 2 points: num_workers=1 (1.20× ["),
        ("slow", " 30 % ", 0, "B is at most 30 % slower at 2 of 2 points. --fail-if-slower: passed, exit code 0."),
        ("same", "5%", 0, "B is at most 5 % slower at 2 of 2 points."),
        ("fast", "0%", 0, "B is at most 0 % slower at 2 of 2 points."),
        ("once", "5%", 3, "Inconclusive at 2 of 2 points: num_workers=1 (1.20×, one trial in A or in B)"),
        ("once", "5% --inconclusive ok", 0, "--fail-if-slower: inconclusive, exit code 0; more repeats"),
        ("once", "5% --inconclusive fail", 1, "--fail-if-slower: inconclusive, exit code 1; more repeats"),
        ("slow", "5% --inconclusive ok", 1, "--fail-if-slower: failed, exit code 1."),
        ("same", "5% --inconclusive fail", 0, "--fail-if-slower: passed, exit code 0."),
        ("lacking", "5%", 3, "Inconclusive at 1 of 2 points: num_workers=2 (not in B)."),
        ("disturbed", "5%", 3, "Inconclusive at 2 of 2 points: num_workers=1 (3.59× ["),
        ("disturbed", "5%", 3, "disturbed). --fail-if-slower: inconclusive, exit code 3."),
        ("disturbed", "5% --inconclusive fail", 1, "--fail-if-slower: inconclusive, exit code 1."),
        ("broken", "5% --inconclusive ok", 1, "B has no finished trial at 1 of 2 points: num_workers=2 (diverged)."),
    ],
)
def test_the_exit_code_is_that_of_the_gate(stores, study, flags, code, verdict):
    allowed, *more = flags.split(" --")
    options = [word for option in more for word in f"--{option}".split()]
    exit_code, out = compared("base", study, "--tracking-uri", stores[0], "--fail-if-slower", allowed, *options)
    assert exit_code == code and verdict in out
    assert compared("base", study, "--tracking-uri", stores[0])[0] == 0


def test_disturbed_times_support_no_claim(stores):
    code, out = compared("base", "disturbed", "--tracking-uri", stores[0])
    assert code == 0 and "Times of B can't be trusted" in out and "B is slower" not in out
    assert "Inconclusive at 2 of 2 points: most trials of A or of B were disturbed." in out


def test_the_reference_may_be_in_another_store(stores):
    here, there = stores
    flags = ("--fail-if-slower", "5%", "--tracking-uri")
    code, out = compared("base", "base", *flags, here, "--baseline-uri", there)
    assert code == 1 and "2.00× [" in out
    assert out.startswith(f"A: base ({there}), the reference B: base ({here}) ")
    assert "Their origins differ (A → B): version.torch 2.16.0 → 2.15.0." in out
    code, out = compared("base", "base", *flags, there, "--baseline-uri", here)
    assert code == 0 and "0.50× [" in out


def test_a_limit_without_common_points_is_an_error(stores):
    code, out, err = raypar("store", "compare", "base", "apart", "--tracking-uri", stores[0], "--fail-if-slower", "5%")
    assert code == 2 and "nothing can be judged" in err
    assert "Only A has 2 points: num_workers=1, num_workers=2." in joined(out)
    assert compared("base", "apart", "--tracking-uri", stores[0])[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("base", "bass"), "no study `bass` in the store → did you mean 'base'?"),
        (("base", "other"), "`base` trains mnist_mlp, `other` trains resnet"),
    ],
)
def test_incomparable_studies_are_refused(stores, args, message):
    refused(message, "store", "compare", *args, "--tracking-uri", stores[0])


@pytest.mark.parametrize("text", ["5", "0.05", "-1%", "five%", "5%%", "nan%", "inf%", "%", "1_0%", ""])
def test_an_invalid_limit_is_refused(text):
    refused(f"--fail-if-slower {text}: must be a percentage", "store", "compare", "a", "b", f"--fail-if-slower={text}")


def test_a_comparison_is_also_a_page_of_its_own(stores, tmp_path):
    path = tmp_path / "comparison.html"
    flags = ("--tracking-uri", stores[0], "--fail-if-slower", "5%", "--html", str(path))
    code, out = compared("base", "slow", *flags)
    assert code == 1 and out.endswith(f"wrote {path}")
    page = path.read_text("utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert "<title>A: base, the reference. B: slow. B fails: it may be at most 5 % slower.</title>" in page
    assert "1.20×" in page and page.count("<figure ") == 2
    refused("--json and --html exclude each other", "store", "compare", "base", "slow", *flags, "--json")
    refused("is a folder", "store", "compare", "base", "slow", *flags[:-1], str(tmp_path))
