"""Choice of `raypar model layout` against all legal layouts, each measured on four CPU workers.

Three models. The command's parts run as they are: it lists the legal layouts, predicts their steps one rank at a time,
and measures the leading third. Here every layout is measured as well, in short trials without Ray, and the choice among
the leading third is made from other trials than the comparison. A layout that takes 1.3 times as long as the fastest in
the first round is measured once. On fewer than four cores the workers share them.
"""

from __future__ import annotations

import logging
import statistics
import warnings

from common import (
    Figure,
    begin,
    local_trial,
    parser_for,
    print_bar,
    print_row,
    progress,
    scratch,
    times,
    workload_named,
)

from raypar.errors import RayparError
from raypar.parallel.strategy import check_compatible
from raypar.predict.layout import StepLayout, leading, legal_layouts, ranked, step_s, with_time
from raypar.predict.network import Network
from raypar.predict.rank_steps import rank_steps
from raypar.run.cluster import this_machine
from raypar.study.workload import Workload

NUM_WORKERS = 4
MAX_RATIO, MAX_SHARE = 1.10, 1 / 3
MAX_FIRST = 1.3  # times the fastest of the first round: slower ones are not measured again
LOOPBACK = Network(50e-6, 1e9)
MODELS = {
    "wide_mlp": {"width": 512, "num_points": 2560},
    "transformer": {"num_sequences": 1280},
    "mnist_cnn": {"num_samples": 1280},
}
QUICK_STRIDE = 6  # --quick measures every sixth of the others


def main() -> None:
    parser = parser_for(__doc__, rounds=3, has_data=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = begin(parser)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    ratios, shares = [], []
    for name in args.models:
        workload = workload_named(name)
        assert isinstance(workload, Workload)
        fixed = {**MODELS[name], "num_workers": NUM_WORKERS, "device": "cpu", "epochs": 1}
        layouts = predicted(workload, legal_layouts(workload, fixed, {}, this_machine(), check_compatible))
        chosen = leading(layouts, max(1, len(layouts) // 3))
        others = [each for each in layouts if each not in chosen]
        measured = [*chosen, *(others[::QUICK_STRIDE] if args.quick else others)]
        seconds: dict[str, list[float]] = {each.words: [] for each in measured}
        for repeat in range(args.rounds):
            for each in measured:
                seconds[each.words].append(measured_s(name, each, repeat))
            progress(f"{name}: round {repeat + 1}/{args.rounds}, {len(measured)} layouts")
            fastest_s = min(values[0] for values in seconds.values())
            measured = [each for each in measured if seconds[each.words][0] <= MAX_FIRST * fastest_s]
        # The first round chooses, as in the command; the others compare.
        choice = min(chosen, key=lambda each: seconds[each.words][0])
        later = {words: statistics.median(values[1:] or values) for words, values in seconds.items()}
        best = min(later, key=lambda words: later[words])
        print_row(f"{name}: {len(layouts)} legal layouts; the best", f"{best}, {later[best] * 1e3:.1f} ms")
        print_row(f"{name}: its choice of {len(chosen)}", f"{choice.words}, {later[choice.words] * 1e3:.1f} ms")
        ratios.append(later[choice.words] / later[best])
        shares.append(len(chosen) / len(layouts))
        print_bar(f"{name}: step time of the choice / the best", ratios[-1], times, at_most=MAX_RATIO)
    print_bar("share of the layouts that ran", Figure.of([max(shares)]), times, at_most=MAX_SHARE)
    print_bar("the choice / the best, worst of the models", Figure.of([max(ratios)]), times, at_most=MAX_RATIO)


def predicted(workload: Workload, layouts: tuple[StepLayout, ...]) -> list[StepLayout]:
    """Return the layouts, ranked by their predicted steps."""
    assert workload.data is not None
    data, timed = workload.data(layouts[0].config), []
    for each in layouts:
        try:
            steps = rank_steps(workload, each.config, 0, data)
        except (RuntimeError, RayparError) as error:
            timed.append(with_time(each, None, str(error)))
        else:
            seconds = step_s(each.config, steps, LOOPBACK, this_machine().num_cpus, on_gpu=False)
            timed.append(with_time(each, seconds))
    unpredicted = sum(each.predicted_s is None for each in timed)
    progress(f"{workload.name}: {len(timed)} layouts, {unpredicted} without a prediction")
    return ranked(timed)


def measured_s(name: str, layout: StepLayout, repeat: int) -> float:
    """Return the mean seconds of a step in a short trial."""
    config = {**MODELS[name], **layout.settings, "num_workers": NUM_WORKERS, "device": "cpu", "epochs": 1}
    with scratch() as folder:
        result = local_trial(name, config, folder, repeat)
    assert result.train_time_s is not None
    return result.train_time_s / len(result.step_times_s[0])


if __name__ == "__main__":
    main()
