"""``raypar model fit`` for a study or a CSV file; tests/golden has whole outputs."""

import pytest
from command import joined, raypar, refused
from recording import recorded
from results import make_result

from raypar.analysis.question import Question

TIMES = {1: (100.0, 101.0, 99.0), 2: (53.0, 52.0, 52.5), 4: (29.0, 28.6, 29.2), 8: (18.0, 17.7, 18.2)}
TABLE = "".join(f"{n},{t}\n" for n, repeats in TIMES.items() for t in repeats)


def table(folder, text="workers,time\n" + TABLE, name="times.csv"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_narrow_consoles_show_all_numbers(tmp_path):
    for width in (80, 40):
        code, out, err = raypar("model", "fit", table(tmp_path), width=width)
        lines = out.splitlines()
        assert (code, err) == (0, "") and max(map(len, lines)) <= width
        assert "\x1b" not in out and "\N{NO-BREAK SPACE}" not in out and "…" not in out
        assert "Strong scaling: " in out and "Amdahl's law (" in out
        if width == 80:
            assert lines[0].startswith("Read times.csv: workers from `workers`, time in s from `time`.")
            assert lines[2].split() == ["workers", "n", "time", "speedup", "eff.", "Karp–Flatt"]
            assert all(line.count("[") == line.count("]") for line in lines)


def test_each_value_of_a_column_is_fitted_separately(tmp_path):
    lines = [f"{n},{t},{name}\n" for name in ("torch", "jax") for n, repeats in TIMES.items() for t in repeats]
    path = table(tmp_path, "workers,time,framework\n" + "".join(lines))
    refused("framework = 'jax': differs from 'torch'", "model", "fit", path)
    refused("columns to group by: framework", "model", "fit", path, "--by", "frame")
    code, out, _ = raypar("model", "fit", path, "--by", "framework")
    assert code == 0 and out.count("Where to stop") == 2 and "\n\nframework=torch\n" in out
    assert "\nframework=jax\n" in out and joined(out).count("have 97.5 % confidence") == 2


def test_a_fit_ends_with_where_to_stop(tmp_path):
    code, out, _ = raypar("model", "fit", table(tmp_path))
    assert code == 0 and "4 → 8" in out and "116 → 144" in out
    assert "Up to 8 workers, doubling gains 1.3× or more (1.61×" in joined(out)
    flat = "workers,time\n" + TABLE + "16,16.5\n16,16.3\n16,16.6\n"
    assert "Beyond 8 workers, doubling gains less than 1.3× (1.09×" in joined(
        raypar("model", "fit", table(tmp_path, flat))[1]
    )
    slower = "workers,time\n" + TABLE + "16,26\n16,26.3\n16,26.1\n"
    assert "Stop at 8 workers: 16 workers are slower (0.69×" in joined(
        raypar("model", "fit", table(tmp_path, slower))[1]
    )
    noisy = "workers,time\n1,10\n1,11\n2,6\n2,8\n"
    assert "Where to stop is inconclusive: the gain of 1.5" in joined(raypar("model", "fit", table(tmp_path, noisy))[1])


def test_weak_scaling_a_baseline_and_rates(tmp_path):
    text = "num_workers,throughput_per_worker\n" + "".join(f"{n},{10000 / (1 + 0.02 * n)}\n" for n in TIMES)
    code, out, _ = raypar("model", "fit", table(tmp_path, text), "--scaling", "weak", "--baseline", "2")
    assert code == 0 and "Gustafson's law (S = N - f (N - 1))" in joined(out) and "Amdahl" not in out
    lines = out.splitlines()
    assert lines[3].split()[2:4] == ["total", "throughput_per_worker"] and "baseline" in lines[5]
    assert "over 2 workers;" in joined(out)


def test_a_file_needs_no_csv_suffix(tmp_path):
    code, out, _ = raypar("model", "fit", table(tmp_path, name="swept"), "--scaling", "strong")
    assert code == 0 and out.splitlines()[2].split()[2] == "time"
    refused("--baseline", "model", "fit", table(tmp_path), "--baseline", "no")
    refused("'sideways' is not one of", "model", "fit", table(tmp_path), "--scaling", "sideways")
    refused("no run with 16 workers to compare with", "model", "fit", table(tmp_path), "--baseline", "16")


def test_flags_resolve_ambiguous_tables(tmp_path):
    path = table(tmp_path, "n;dauer\n1;1.100\n2;600\n")
    refused("no column gives how many workers → name it: --workers-column COLUMN", "model", "fit", path)
    named = ("--workers-column", "n", "--time-column", "dauer")
    refused("1.100 has two readings: 1100, with a mark between thousands, or 1.100", "model", "fit", path, *named)
    code, out, _ = raypar("model", "fit", path, *named, "--decimal", ",")
    assert code == 0 and "1.83×" in out and "with decimal commas." in joined(out)
    falling = table(tmp_path, "workers,throughput\n1,122\n2,115\n")
    refused("`throughput` has two readings", "model", "fit", falling)
    assert "94 %" in raypar("model", "fit", falling, "--throughput-of", "worker")[1]
    assert "47 %" in raypar("model", "fit", falling, "--throughput-of", "all")[1]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The address of a store with three studies."""
    folder = tmp_path_factory.mktemp("project")
    config = {"per_worker_batch_size": 32}
    weak = [make_result({"num_workers": n}, 0, times[0], config=config) for n, times in TIMES.items()]
    recorded(folder, Question("weak", {"num_workers": 1}, ("num_workers",)), weak)
    busy = {"cores": [[0]], "foreign_cpu_share": [0.5]}
    disturbed = [make_result({"num_workers": n}, r, t, environment=busy) for n in TIMES for r, t in enumerate(TIMES[n])]
    recorded(folder, Question("disturbed", {"num_workers": 1}, ("num_workers",)), disturbed)
    recorded(folder, Question("alone", {}, ("batch_size",)), [make_result({"batch_size": b}, 0) for b in (32, 64)])
    return f"sqlite:///{folder}/mlflow.db"


def test_a_studys_config_decides_between_strong_and_weak_scaling(store):
    code, out, _ = raypar("model", "fit", "weak", "--tracking-uri", store, "--baseline", "2")
    assert code == 0 and "Gustafson's law (" in out and "Amdahl" not in out and "over 2 workers;" in joined(out)


def test_disturbed_trials_support_no_claim(store):
    code, out, _ = raypar("model", "fit", "disturbed", "--tracking-uri", store)
    why = "other processes used up to 50 % of the cores in 12 of 12 trials."
    assert code == 0 and joined(out).startswith(f"Times can't be trusted: {why} Rerun the study on an idle")
    assert f"Where to stop is inconclusive: {why}" in joined(out)
    assert not any(claim in out for claim in ("fits better", "fits as well", "Stop at", "doubling gains"))


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("waek", (), "no study `waek` in the store → did you mean 'weak'?"),
        ("weak", ("--by", "lr"), "--by lr is for files, and `weak` is a study"),
        ("weak", ("--scaling", "strong"), "--scaling strong is for files, and `weak` is a study"),
        ("weak", ("--decimal", ","), "--decimal , is for files, and `weak` is a study"),
        ("alone", (), "study `alone` has no finished trials that differ only in num_workers"),
        ("weak", ("--baseline", "3"), "no finished trial with 3 workers to compare with"),
    ],
)
def test_studies_without_scaling_are_refused(store, name, flags, message):
    refused(message, "model", "fit", name, "--tracking-uri", store, *flags)
