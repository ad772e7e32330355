"""Bad input gets one message with the file, the field, the value and the fix, before anything is started."""

import re

import pytest
from bad_input import CASES, GOOD, MNIST
from nothing_starts import contents, raypar

pytestmark = pytest.mark.usefixtures("imported")


def assert_one_message(done, out=""):
    assert (done.code, done.out) == (2, out), done
    assert done.err.startswith("error: ") and "\nerror: " not in done.err and "→ " in done.err, done.err
    assert "Traceback" not in done.err and "--debug shows where" not in done.err, done.err
    assert len(done.err) < 6000, "too long"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_a_mistake_is_one_message_and_starts_nothing(case, tmp_path):
    for name, text in {"good.py": GOOD, "mnist.py": MNIST, **case.files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    if case.setup is not None:
        case.setup(tmp_path)
    before = contents(tmp_path)
    done = raypar(case.arguments, tmp_path, case.environment)
    assert_one_message(done, case.out)
    message = re.sub(r"\s+", " ", done.err)
    words = [word for words in case.words for word in words.split(" | ")]
    assert [word for word in words if word not in message] == [], message
    assert contents(tmp_path) == before


def test_each_case_has_its_own_name():
    assert len({case.name for case in CASES}) == len(CASES)
