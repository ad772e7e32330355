"""Tables as people have them are read right, or refused with the fix: none gives a wrong number."""

import pytest
from tablelab import TABLES

from raypar.analysis.columns import Role
from raypar.analysis.laws import Scaling
from raypar.analysis.scaling import analyse_scaling
from raypar.analysis.table import Asked, read_table
from raypar.errors import RayparError

CASES = [pytest.param(table, id=table.name) for table in TABLES]


def asked_of(options):
    """Return the answers that options of `raypar model fit` give."""
    given = dict(zip(options[::2], options[1::2], strict=True))
    columns = {role: given[f"--{role}-column"] for role in Role if f"--{role}-column" in given}
    scaling = Scaling(given["--scaling"]) if "--scaling" in given else None
    is_of_each = given["--throughput-of"] == "worker" if "--throughput-of" in given else None
    return Asked(columns, given.get("--decimal"), is_of_each, scaling)


@pytest.mark.parametrize("table", CASES)
def test_a_table_of_people_is_read_right_or_refused_with_the_fix(table, tmp_path):
    if table.needs_openpyxl:
        pytest.importorskip("openpyxl", reason="spreadsheets need raypar[excel]")
    path = table.write(tmp_path)
    if table.words:
        with pytest.raises(RayparError) as caught:
            read_table(path)
        message = f"{caught.value.message} → {caught.value.hint}"
        assert all(word in message for word in table.words), message
        if not table.options:
            return
    read = read_table(path, asked=asked_of(table.options))
    analysis = analyse_scaling(read.runs[""], read.scaling)
    shown = {p.num_workers: p.speedup.value for p in analysis.points if p.num_workers != analysis.baseline}
    assert shown == pytest.approx(table.speedups, rel=1e-3)  # of repeats, a median or a mean
    if table.first is not None:
        assert analysis.points[0].measured.value == pytest.approx(table.first, rel=1e-3)
