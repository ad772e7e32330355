"""Cost of switching between two warm gangs: trials on 1 and 2 workers in random order.

Empty trials on raypar's TuneRunner and a private Ray. Once each gang has served a trial, equally many trials on 1 and
on 2 workers follow in random order: some stay in the gang of the previous trial, some switch to the other, parked one.
The extra time of a switch is the time of a trial that switched to a gang, less the median of those that stayed in it.
"""

from __future__ import annotations

import random
import statistics

from common import Figure, begin, empty_study, parser_for, print_bar, print_row, run_on_ray

from raypar import units
from raypar.study.trial import TrialResult

MAX_SWITCH_S = 0.5


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--trials", type=int, default=80, help="after the first of each gang [default: %(default)s]")
    args = begin(parser)
    half = (12 if args.quick else args.trials) // 2
    order = [1] * half + [2] * half
    random.Random(0).shuffle(order)
    order = [1, 2, *order]
    study = empty_study()
    seconds: list[float] = []

    def listen(result: TrialResult, time_s: float) -> None:
        assert result.final["sum"] == order[len(seconds)]
        seconds.append(time_s)

    run_on_ray(study, [study.trial({"num_workers": n}, i, order=i) for i, n in enumerate(order)], listen)
    for num_workers, started, time_s in zip(order, ("Ray and the gang", "the gang"), seconds, strict=False):
        print_row(f"first trial on {num_workers} (starts {started})", units.seconds(time_s))
    stayed: dict[int, list[float]] = {1: [], 2: []}
    switched: dict[int, list[float]] = {1: [], 2: []}
    for before, now, took in zip(order[1:], order[2:], seconds[2:], strict=False):
        (stayed if now == before else switched)[now].append(took)
    for now in (1, 2):
        if not stayed[now] or not switched[now]:
            print_row(f"switch to the gang of {now}", "too few trials")
            continue
        print_row(f"a trial that stays in the gang of {now}", Figure.of(stayed[now]).show(units.seconds))
        print_row(f"a trial that switches to the gang of {now}", Figure.of(switched[now]).show(units.seconds))
        usual = statistics.median(stayed[now])
        extra = Figure.of([took - usual for took in switched[now]])
        print_bar(f"extra time of a switch to the gang of {now}", extra, units.seconds, at_most=MAX_SWITCH_S)


if __name__ == "__main__":
    main()
