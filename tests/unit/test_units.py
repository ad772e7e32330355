"""How numbers are shown."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar import units

SHOWN = {
    units.seconds: {0: "0 s", 0.00000123: "1.2 µs", 0.00085: "850 µs", 0.0123: "12.3 ms", 0.15: "0.15 s"}
    | {9.994: "9.99 s", 9.996: "10.0 s", 23.46: "23.5 s", 59.96: "1 min 0 s", 80: "1 min 20 s", 3599.6: "1 h 0 min"}
    | {7500: "2 h 5 min", 86399: "1 d 0 h", 97200: "1 d 3 h", -80: "-1 min 20 s"},
    units.rough_seconds: {0.2: "1 s", 59.4: "59 s", 89: "89 s", 90: "1.5 min", 180: "3 min", 220: "3.7 min"}
    | {3000: "50 min", 5400: "1.5 h", 7200: "2 h", 86400: "24 h", 1.6 * 86400: "1.6 d", 1e7: "116 d"},
    units.ratio: {1.87: "1.87×", 0.5: "0.50×", 12.34: "12.3×", 123.4: "123×", 0.0561: "0.056×", 9.996: "10.0×"},
    units.compact: {950.4: "950", 999.7: "1.00k", 18_600: "18.6k", 114_321: "114k", 999_600: "1.00M"}
    | {2_500_000: "2.50M", 0: "0.00"},
    units.rate: {950.4: "950 samples/s"},
    units.count: {12345: "12,345"},
    units.counted: {(1, "trial"): "1 trial", (2000, "trial"): "2,000 trials"},
    units.percent: {0.934: "93 %", (0.9345, 1): "93.5 %"},
    units.size: {512: "512 B", 1.2e9: "1.20 GB"},
    units.energy: {0.0: "0.00 J", 0.5: "0.500 J", 850.0: "850 J", 999.7: "1.00 kJ", 12_345.0: "12.3 kJ"}
    | {1.2e6: "1.20 MJ", 3e9: "3.00 GJ"},
    units.energy_interval: {(12_345.0, 9_990.0, 12_945.0): "12.3 kJ [10.0, 12.9]"},
    units.ratio_interval: {(1.87, 1.8, 1.951): "1.87× [1.80, 1.95]", (2.0, 1e-7, 4e9): "2.00× (too noisy)"}
    | {(1.87, math.nan, 2.0): "1.87×", (1.87, None, None): "1.87×"},
    units.seconds_interval: {(3.21, 3.1, 3.4): "3.21 s [3.10, 3.40]", (0.05, 0.04, 0.11): "50.0 ms [40.0, 110]"}
    | {(900, 600, 1200): "15.0 min [10.0, 20.0]", (3.21, 0.0002, 51_234.5): "3.21 s (too noisy)"},
    units.percent_interval: {(0.93, 0.9, 0.96): "93 % [90, 96]"},
    units.rate_interval: {(114_000, 110_000, 118_400): "114k samples/s [110k, 118k]"},
    # The wider side of the interval.
    units.plus_minus: {(10.0, 9.8, 10.5): "±5 %", (10.0, 9.96, 10.02): "±0.4 %", (10.0, None, None): ""}
    | {(3.21, 0.0002, 51_234.5): "(too noisy)"},
    units.value_of: {0.01234567: "0.01235", 64: "64", ((128, 64),): "(128,64)", None: "None"},
    units.listed: {("abc", 3): "a, b, c", ("abcde", 3): "a, b, c and 2 more", ("abc", 3, "or"): "a, b or c"}
    | {("a", 3, "or"): "a", ("abcde", 3, "or", "; "): "a; b; c or 2 more", ("", 3, "and"): ""},
    units.and_more: {0: ""},
}


def test_long_values_are_cut_and_stay_distinct():
    texts = ["a" * 10_000 + letter + "a" * 10_000 for letter in "ab"]
    shown = [*map(units.value_of, [*texts, *((text,) for text in texts)])]
    assert len(set(shown)) == 4 and all(len(text) < 100 for text in shown)
    assert units.value_of("a" * 200) == "a" * 200


@pytest.mark.parametrize("factor", [1.5, 2.5, 9.9, 10.1, 1e4])
def test_one_rule_decides_that_an_interval_is_too_noisy(factor):
    of = SimpleNamespace(value=3.0, low=3.0 / math.sqrt(factor), high=3.0 * math.sqrt(factor))
    shows = [units.ratio_interval, units.percent_interval, units.rate_interval, units.seconds_interval]
    shown = [show(of) for show in (*shows, units.plus_minus, units.energy_interval)]
    assert {units.TOO_NOISY in text for text in shown} == {units.is_noise(of)} == {factor > 10}


@pytest.mark.parametrize("show", SHOWN, ids=lambda show: show.__name__)
def test_values_are_formatted(show):
    def of(arguments):
        if show is units.listed:
            texts, most, word, separator = (*arguments, *("", ", ")[len(arguments) - 2 :])
            return show(texts, most, word=word, separator=separator)
        if show.__name__.endswith("_interval") or show is units.plus_minus:
            value, low, high = arguments
            return show(SimpleNamespace(value=value, low=low, high=high))
        return show(*arguments) if isinstance(arguments, tuple) else show(arguments)

    assert {arguments: of(arguments) for arguments in SHOWN[show]} == SHOWN[show]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_missing_values_are_a_dash(value):
    plain = (units.seconds, units.ratio, units.percent, units.count, units.compact, units.rate, units.size)
    shown = [show(value) for show in (*plain, units.energy, units.number)]
    assert {*shown, units.ratio_interval(None), units.seconds_interval(None)} == {"–"}


@given(st.floats(min_value=1e-6, max_value=59))
def test_a_duration_below_a_minute_is_shown_to_one_percent(value):
    number, unit = units.seconds(value).split()
    # 0.10 s to 0.99 s have two digits; all others at least that many.
    assert float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(value, rel=0.051)


@given(st.floats(min_value=1e-3, max_value=1e12))
def test_a_compact_number_is_within_half_a_percent(value):
    shown = units.compact(value)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(shown[-1], 1.0)
    assert float(shown.rstrip("kMG")) * factor == pytest.approx(value, rel=0.0051)
