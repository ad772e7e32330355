"""Whatever is given to an option, or stands in a study file, ends in a plain message: never in a traceback."""

import tempfile
from pathlib import Path

import pytest
from bad_input import GOOD
from command import VERBS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nothing_starts import raypar

from raypar import RayparError, Study, StudyError, grid
from raypar.study.loader import load_study
from raypar.study.study import MAX_TRIALS
from raypar.workloads import digits

pytestmark = pytest.mark.usefixtures("imported", "modules_as_they_were")

# What a command has to be given; one that is not here is given none. `study` is fuzzed as a dry run: it would start.
ARGUMENTS = {
    "study": "good.py --dry-run",
    "plan": "good.py",
    "model profile": "gone.py",
    "model work": "gone",
    "store compare": "s t",
    "store export": "s t.csv",
    "store import": "gone.csv",
    "model generate": "s --prompt x",
    "model predict": "s --workers 4",
    "model network": "--for gone",
    **dict.fromkeys(("report", "store show", "store resume", "recommend", "model fit"), "s"),
    "init": "gone.py",
}
# Would start what they are for.
NOT_RUN = ("doctor", "ui")
COMMANDS = {name: command for name, command in VERBS.items() if name not in NOT_RUN}
OPTIONS = [
    (name, flag)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if parameter.param_type_name == "option"
    for flag in (*parameter.opts, *parameter.secondary_opts)
    if flag not in ("--debug", "--install-completion", "--show-completion")
]
SWITCHES = {
    flag
    for command in COMMANDS.values()
    for parameter in command.params
    if getattr(parameter, "is_flag", False) or parameter.secondary_opts
    for flag in (*parameter.opts, *parameter.secondary_opts)
}
NUMBERS = ("0", "-1", "1", "1.5", "nan", "inf", "-inf", "1e999", "1_0", "0x10", "²", "9" * 30, "9" * 5000, str(2**63))
KEYS = ("lr", "epochs", "batch_size", "num_workers", "cpu_affinity", "optimizer", "nonsense", "")
TEXTS = ("true", "None", "[1]", "{1}", "(1,2)", "...", "grid()", "grid(1,1)", "uniform(1)", "a,b", ",", "(" * 300)
VALUES = (*NUMBERS, *TEXTS)
FILES = ("/dev/null", "/dev/null/x", "good.py", "good.py/x", "no.csv")
PATHS = ("", ".", "/", *FILES, "x" * 300, "a\nb", "\udcff", "~")
# No "auto" and no host names: on a machine with a cluster they would be found.
STORES = ("foo://bar", "sqlite://", "sqlite:///good.py", "x:1:2", "127.0.0.1:99999")
WORDS = ("-", "--", "=", "--set", *STORES, "%s", "{}", "5%")
HOSTILE = st.one_of(
    st.sampled_from((*VALUES, *PATHS, *WORDS)),
    st.builds("{}={}".format, st.sampled_from(KEYS), st.sampled_from(VALUES)),
    st.text(st.characters(exclude_characters="\0"), max_size=12).filter(lambda text: text != "auto"),
)
FEW = settings(max_examples=settings().max_examples // 10, suppress_health_check=list(HealthCheck))  # of each option


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzzed")
    (made / "good.py").write_text(GOOD)
    return made


@pytest.mark.parametrize(("command", "flag"), OPTIONS, ids=lambda value: value)
@FEW
@given(value=HOSTILE)
def test_any_value_of_any_option_ends_in_a_plain_message(command, flag, value, folder):
    given_value = [] if flag in SWITCHES else [value]
    done = raypar([*command.split(), *ARGUMENTS.get(command, "").split(), flag, *given_value], folder)
    assert done.code in (0, 2) and "Traceback" not in done.err and "--debug shows where" not in done.err, done
    assert not done.code or (done.err.startswith("error: ") and "→ " in done.err), done
    assert [path.name for path in folder.iterdir()] == ["good.py"]


def test_every_command_and_option_is_among_them():
    assert len(OPTIONS) > 60 and set(ARGUMENTS) <= {command for command, _ in OPTIONS}


# ---- study files

SIGNS = ("(", ")", "[", "{", ":", "=", ",", "\n", "\t", "'", '"""', "#", "\\", "\ufeff", "é")
NAMES = ("grid(", "choice(", "Study", "digits", "lambda: ", "raise ", "import x\n", "del study\n")
PIECES = (*SIGNS, *NAMES, "0", "-1", "1e999", "None", "True", "float('nan')", "10**400")
MANY = settings(suppress_health_check=list(HealthCheck))


@st.composite
def mutated(draw):
    """A good study with some pieces cut out, put in or exchanged."""
    text = GOOD
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(text)))
        last = min(len(text), first + draw(st.integers(0, 12)))
        text = text[:first] + draw(st.sampled_from(("", *PIECES))) + text[last:]
    return text


@MANY
@given(st.one_of(mutated().map(str.encode), st.binary(max_size=200)))
def test_a_study_file_with_slips_or_of_any_bytes_loads_or_is_refused(source):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "asked.py"
        path.write_bytes(source)
        message, num_points = str(path), 1
        try:
            num_points = len(load_study(path).study.points())
        except RayparError as error:
            message = str(error)
        assert str(path) in message and 1 <= num_points <= MAX_TRIALS


ANYTHING = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)),
        st.sampled_from(["grid()", 10**400, float("nan"), float("inf")]),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=2), st.tuples(inner), st.dictionaries(st.text(max_size=3), inner, max_size=2))
    ),
    max_leaves=4,
)


@MANY
@given(
    st.dictionaries(
        st.sampled_from(["space", "config", "baseline", "num_repeats", "seed", "name", "mode", "metric", "num_trials"]),
        st.one_of(ANYTHING, st.dictionaries(st.sampled_from(["lr", "epochs", "device", "cpu_affinity"]), ANYTHING)),
        max_size=4,
    )
)
def test_a_study_of_anything_is_one_or_is_refused(fields):
    if isinstance(space := fields.get("space"), dict):
        fields["space"] = {key: grid(*v) if isinstance(v, (list, tuple)) else v for key, v in space.items()}
    try:
        study = Study(workload=digits, **fields)
    except StudyError:
        return
    if len(study.points()) * study.num_repeats < 1000:
        identities = [spec.identity for spec in study.trials()]
        assert len(set(identities)) == len(identities)
