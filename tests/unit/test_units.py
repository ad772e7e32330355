"""How numbers are shown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar import units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"),
        (0.00000123, "1.2 µs"),
        (0.00085, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.15, "0.15 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (23.46, "23.5 s"),
        (59.96, "1 min 0 s"),
        (80, "1 min 20 s"),
        (3599.6, "1 h 0 min"),
        (7500, "2 h 5 min"),
        (86399, "1 d 0 h"),
        (97200, "1 d 3 h"),
        (-80, "-1 min 20 s"),
    ],
)
def test_durations_take_the_unit_a_person_would(value: float, shown: str) -> None:
    assert units.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.87, "1.87×"), (0.5, "0.50×"), (12.34, "12.3×"), (123.4, "123×"), (0.0561, "0.056×"), (9.996, "10.0×")],
)
def test_ratios_have_about_three_digits(value: float, shown: str) -> None:
    assert units.ratio(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (950.4, "950"),
        (999.7, "1.00k"),
        (18_600, "18.6k"),
        (114_321, "114k"),
        (999_600, "1.00M"),
        (2_500_000, "2.50M"),
        (0, "0.00"),
    ],
)
def test_rates_are_shortened_by_factors_of_a_thousand(value: float, shown: str) -> None:
    assert units.rate(value) == f"{shown} samples/s"


def test_counts_percent_and_bytes_have_their_units() -> None:
    assert units.count(12345) == "12,345"
    assert units.counted(1, "trial") == "1 trial"
    assert units.counted(2000, "trial") == "2,000 trials"
    assert units.percent(0.934) == "93 %"
    assert units.percent(0.9345, 1) == "93.5 %"
    assert units.size(512) == "512 B"
    assert [units.energy(j) for j in (0.0, 0.5, 850.0, 999.7, 12_345.0, 1.2e6, 3e9)] == [
        "0.00 J",
        "0.500 J",
        "850 J",
        "1.00 kJ",
        "12.3 kJ",
        "1.20 MJ",
        "3.00 GJ",
    ]
    assert units.energy_interval(12_345.0, 9_990.0, 112_345.0) == "12.3 kJ [10.0, 112]"
    assert units.size(1.2e9) == "1.20 GB"


def test_an_interval_shares_the_unit_of_its_value() -> None:
    assert units.ratio_interval(1.87, 1.8, 1.951) == "1.87× [1.80, 1.95]"
    assert units.seconds_interval(3.21, 3.1, 3.4) == "3.21 s [3.10, 3.40]"
    assert units.seconds_interval(0.05, 0.04, 0.11) == "50.0 ms [40.0, 110]"
    assert units.seconds_interval(900, 600, 1200) == "15.0 min [10.0, 20.0]"
    assert units.percent_interval(0.93, 0.9, 0.96) == "93 % [90, 96]"
    assert units.rate_interval(114_000, 110_000, 118_400) == "114k samples/s [110k, 118k]"


def test_a_runaway_bound_stays_short() -> None:
    assert units.seconds_interval(3.21, 0.0002, 51_234.5) == "3.21 s [0.00, 51.2k]"
    assert len(units.ratio_interval(2.0, 1e-7, 4e9)) <= 25
    assert units.plus_minus(3.21, 0.0002, 51_234.5) == "±>999 %"


def test_the_wider_side_of_an_interval_counts_for_plus_minus() -> None:
    assert units.plus_minus(10.0, 9.8, 10.5) == "±5 %"
    assert units.plus_minus(10.0, 9.96, 10.02) == "±0.4 %"
    assert units.plus_minus(10.0, None, None) == ""


def test_accuracies_are_percent_and_other_metrics_numbers() -> None:
    assert units.score("accuracy", 0.9784) == "97.8 %"
    assert units.score("val/accuracy", 0.9784) == "97.8 %"
    assert units.score("val_loss", 0.21341) == "0.2134"
    assert units.score_interval("val_loss", 0.2134, 0.21, 0.217) == "0.2134 [0.2100, 0.2170]"


def test_a_hyperparameter_is_shown_by_its_first_digits() -> None:
    assert units.value_of(0.01234567) == "0.01235"
    assert units.value_of(64) == "64"
    assert units.value_of((128, 64)) == "(128,64)"
    assert units.value_of(None) == "None"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "show",
    [
        units.seconds,
        units.ratio,
        units.percent,
        units.count,
        units.compact,
        units.rate,
        units.size,
        units.energy,
        units.number,
        units.seconds_interval,
        lambda v: units.ratio_interval(v, v, v),
        lambda v: units.score("accuracy", v),
        lambda v: units.score("loss", v),
    ],
)
def test_what_can_not_be_shown_is_a_dash(show, value) -> None:
    assert show(value) == "–"


def test_an_interval_with_an_unknown_bound_shows_the_value_alone() -> None:
    assert units.ratio_interval(1.87, math.nan, 2.0) == "1.87×"
    assert units.ratio_interval(1.87, None, None) == "1.87×"


@given(st.floats(min_value=1e-6, max_value=59))
def test_a_duration_below_a_minute_is_shown_to_one_percent(value: float) -> None:
    number, unit = units.seconds(value).split()
    if unit == "min":
        return
    read = float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    # 0.10 s to 0.99 s have two digits; all others at least that many.
    assert read == pytest.approx(value, rel=0.051)


@given(st.floats(min_value=1e-3, max_value=1e12))
def test_a_compact_number_is_within_half_a_percent(value: float) -> None:
    shown = units.compact(value)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(shown[-1], 1.0)
    assert float(shown.rstrip("kMG")) * factor == pytest.approx(value, rel=0.0051)


def test_an_accuracy_s_interval_stays_between_none_and_all() -> None:
    assert units.score_interval("accuracy", 0.96, 0.81, 1.11) == "96.0 % [81.0, 100.0]"


def test_of_a_long_list_the_first_are_named_and_the_others_counted() -> None:
    assert units.listed("abc", 3) == "a, b, c"
    assert units.listed("abc", 3, word="or") == "a, b or c" and units.listed("a", 3, word="or") == "a"
    assert units.listed("abcde", 3) == units.listed("abcde", 3, word="and") == "a, b, c and 2 more"
    assert units.listed("abcde", 3, word="or", separator="; ") == "a; b; c or 2 more"
    assert units.listed("", 3, word="and") == units.and_more(0) == ""
