"""Whether the thousandth trial costs what the first did: empty trials of one gang, their time and the driver's memory.

Empty trials on one worker, on raypar's TuneRunner and a private Ray. The driver (this process) keeps every result, as
a study does. The trials' times and the driver's memory after them (RSS; PSS, which counts what is shared in part) are
compared between the first hundred and the last hundred, without the very first trial.
"""

from __future__ import annotations

import time

import psutil
from common import Figure, begin, empty_study, judge, parser_for, progress, run_on_ray, tell, times

from raypar import units
from raypar.study.trial import TrialResult

MAX_SLOWDOWN = 1.2
MAX_GROWTH_BYTES = 50e6


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=1000, help="[default: 1000]")
    args = begin(parser)
    count = 40 if args.quick else args.trials
    span = min(100, (count - 1) // 2)
    study = empty_study()
    driver = psutil.Process()
    results: list[TrialResult] = []
    seconds: list[float] = []
    rss_bytes: list[float] = []
    pss_bytes: list[float] = []
    begun_s = time.perf_counter()

    def listen(result: TrialResult) -> None:
        nonlocal begun_s
        seconds.append(time.perf_counter() - begun_s)
        results.append(result)
        memory = driver.memory_full_info()
        rss_bytes.append(memory.rss)
        pss_bytes.append(getattr(memory, "pss", memory.uss))
        if len(seconds) % 100 == 0:
            progress(f"{len(seconds)} trials, {units.seconds(seconds[-1])}, {units.size(memory.rss)}")
        begun_s = time.perf_counter()

    specs = [study.trial({"num_workers": 1}, i, order=i) for i in range(count)]
    run_on_ray(study, specs, listen)
    first, last = slice(1, 1 + span), slice(count - span, count)
    assert len(results) == count
    assert len({result.environment["gang"] for result in results}) == 1, "more than one gang"
    tell(f"first trial of {count} (starts Ray and the gang)", units.seconds(seconds[0]))
    early = Figure.of(seconds[first])
    tell(f"per trial, first {span}", early.show(units.seconds))
    tell(f"per trial, last {span}", Figure.of(seconds[last]).show(units.seconds))
    judge(
        "time per trial, last / first",
        Figure.of([took / early.value for took in seconds[last]]),
        times,
        at_most=MAX_SLOWDOWN,
    )
    for name, values in (("RSS", rss_bytes), ("PSS", pss_bytes)):
        before = Figure.of(values[first])
        tell(f"driver's {name}, first {span}", before.show(units.size))
        growth = Figure.of([now - before.value for now in values[last]])
        judge(f"driver's {name}: growth to the last {span}", growth, units.size, at_most=MAX_GROWTH_BYTES)


if __name__ == "__main__":
    main()
