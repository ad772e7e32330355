"""Conditions of a trial are restored from any JSON."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.study.conditions import Conditions, RankConditions

RANK = RankConditions(cores=(0, 1), num_threads=2, device_name="cpu", foreign_cpu_share=0.25, throttles=0)
WHOLE = Conditions(
    ranks=(RANK, RankConditions(cores=(), without_gradient=("a", "b"), finds_unused=True)),
    node=("n1", "n2"),
    gang="3",
    nth_in_gang=1,
    num_beside=0,
    shared_with="b, c",
    stalls_s=(4.0,),
    energy_of="GPUs",
)


def test_conditions_come_back_equal_and_are_stored_as_lists_by_rank_without_unknown_values():
    stored = WHOLE.to_stored()
    assert stored == {
        "node": ("n1", "n2"),
        "gang": "3",
        "nth_in_gang": 1,
        "num_beside": 0,
        "shared_with": "b, c",
        "stalls_s": (4.0,),
        "energy_of": "GPUs",
        "cores": [(0, 1), ()],
        "num_threads": [2, None],
        "device_name": ["cpu", None],
        "foreign_cpu_share": [0.25, None],
        "throttles": [0, None],
        "without_gradient": [None, ("a", "b")],
        "finds_unused": [None, True],
    }
    assert Conditions.from_stored(stored) == WHOLE
    assert Conditions().to_stored() == {} and Conditions.from_stored({}) == Conditions()


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"throttles": [1, "?", True, float("nan"), 2.5]}, {"throttles": [1, 2.5]}),
        ({"num_threads": [4.0, 4.5]}, {"num_threads": [4.0]}),
        ({"throttles": [10**400, 1], "num_threads": [10**400]}, {"throttles": [1], "num_threads": []}),
        ({"cores": [[0, "1"], [2], 3]}, {"cores": [(2,)]}),
        ({"device_name": ["cpu", 7], "finds_unused": [1, True]}, {"device_name": ["cpu"], "finds_unused": [True]}),
        ({"cpu_model": "one for all", "of a later version": [1]}, {"cpu_model": []}),
    ],
)
def test_values_of_a_wrong_type_are_unknown(stored, expected):
    conditions = Conditions.from_stored(stored)
    assert {name: conditions.of_ranks(name) for name in expected} == expected


def test_values_of_a_trial_may_have_a_wrong_type_too_and_one_host_name_stands_for_a_list():
    conditions = Conditions.from_stored({"node": "n1", "shared_with": ["b"], "num_sharing": "2", "stalls_s": "?"})
    assert conditions == Conditions(node=("n1",))


@given(
    st.dictionaries(
        st.sampled_from([field.name for of in (Conditions, RankConditions) for field in fields(of)]),
        st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists),
    )
)
def test_anything_can_be_read_and_valid_values_come_back(stored):
    conditions = Conditions.from_stored(stored)
    assert Conditions.from_stored(conditions.to_stored()).to_stored() == conditions.to_stored()
