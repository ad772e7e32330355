"""Growth of trial time and driver memory over a thousand trials in one gang.

Empty trials on one worker, on raypar's TuneRunner and a private Ray. The driver (this process) keeps every result, as a
study does. Trial times and the driver's memory (RSS; PSS, which divides shared pages among processes) are compared
between the first and the last hundred trials, without the very first.
"""

from __future__ import annotations

import psutil
from common import Figure, begin, empty_study, parser_for, print_bar, print_row, progress, run_on_ray, times

from raypar import units
from raypar.study.trial import TrialResult

MAX_SLOWDOWN = 1.2
MAX_GROWTH_BYTES = 50e6


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="[default: %(default)s]")
    args = begin(parser)
    count = 40 if args.quick else args.trials
    span = min(100, (count - 1) // 2)
    study = empty_study()
    driver = psutil.Process()
    results: list[TrialResult] = []
    seconds: list[float] = []
    rss_bytes: list[float] = []
    pss_bytes: list[float] = []

    def listen(result: TrialResult, time_s: float) -> None:
        seconds.append(time_s)
        results.append(result)
        memory = driver.memory_full_info()
        rss_bytes.append(memory.rss)
        pss_bytes.append(getattr(memory, "pss", memory.uss))
        if len(seconds) % 100 == 0:
            progress(f"{len(seconds)} trials, {units.seconds(seconds[-1])}, {units.size(memory.rss)}")

    specs = [study.trial({"num_workers": 1}, i, order=i) for i in range(count)]
    run_on_ray(study, specs, listen)
    first, last = slice(1, 1 + span), slice(count - span, count)
    assert len(results) == count
    assert len({result.conditions.gang for result in results}) == 1, "more than one gang"
    print_row(f"first trial of {count} (starts Ray and the gang)", units.seconds(seconds[0]))
    early = Figure.of(seconds[first])
    print_row(f"per trial, first {span}", early.show(units.seconds))
    print_row(f"per trial, last {span}", Figure.of(seconds[last]).show(units.seconds))
    print_bar(
        "time per trial, last / first",
        Figure.of([time_s / early.value for time_s in seconds[last]]),
        times,
        at_most=MAX_SLOWDOWN,
    )
    for name, values in (("RSS", rss_bytes), ("PSS", pss_bytes)):
        before = Figure.of(values[first])
        print_row(f"driver's {name}, first {span}", before.show(units.size))
        growth = Figure.of([value - before.value for value in values[last]])
        print_bar(f"driver's {name}: growth to the last {span}", growth, units.size, at_most=MAX_GROWTH_BYTES)


if __name__ == "__main__":
    main()
