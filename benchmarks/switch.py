"""What it costs to go from one warm gang to another: trials on 1 and 2 workers in random order.

Empty trials on raypar's TuneRunner and a private Ray. After both gangs have served a trial, trials on 1 and on 2
workers follow each other in random order (as often one as the other): some stay in the gang of the trial before, some
switch to the other, which was parked meanwhile. The extra time of a switch is the median of the trials that switched
to a gang less the median of those that stayed in it.
"""

from __future__ import annotations

import random
import statistics
import time

from common import Figure, begin, empty_study, judge, parser_for, run_on_ray, tell

from raypar import units
from raypar.study.trial import TrialResult

MAX_SWITCH_S = 0.5


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=80, help="after the first of each gang [default: 80]")
    args = begin(parser)
    half = (12 if args.quick else args.trials) // 2
    order = [1] * half + [2] * half
    random.Random(0).shuffle(order)
    order = [1, 2, *order]
    study = empty_study()
    seconds: list[float] = []
    begun_s = time.perf_counter()

    def listen(result: TrialResult) -> None:
        nonlocal begun_s
        seconds.append(time.perf_counter() - begun_s)
        assert result.final["sum"] == order[len(seconds) - 1]
        begun_s = time.perf_counter()

    run_on_ray(study, [study.trial({"num_workers": n}, i, order=i) for i, n in enumerate(order)], listen)
    for i, num_workers in enumerate(order[:2]):
        tell(f"first trial on {num_workers} (starts {'Ray and ' if not i else ''}the gang)", units.seconds(seconds[i]))
    stayed: dict[int, list[float]] = {1: [], 2: []}
    switched: dict[int, list[float]] = {1: [], 2: []}
    for before, now, took in zip(order[1:], order[2:], seconds[2:], strict=False):
        (stayed if now == before else switched)[now].append(took)
    for now in (1, 2):
        if not stayed[now] or not switched[now]:
            tell(f"switch to the gang of {now}", "too few trials")
            continue
        tell(f"a trial that stays in the gang of {now}", Figure.of(stayed[now]).show(units.seconds))
        tell(f"a trial that switches to the gang of {now}", Figure.of(switched[now]).show(units.seconds))
        usual = statistics.median(stayed[now])
        extra = Figure.of([took - usual for took in switched[now]])
        judge(f"extra time of a switch to the gang of {now}", extra, units.seconds, at_most=MAX_SWITCH_S)


if __name__ == "__main__":
    main()
