"""Tables for `raypar model fit` as people have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from truth import REFUSED, Outcome, Steps, User, is_close, outcome_of

TOLERANCE = 5e-3


def reads(speedups: Mapping[int, float], *options: str, quantity: str = "speedup") -> Any:
    """Return a judge of what `raypar model fit` makes of ``table.csv``, by worker count."""

    def judge(case: Steps, user: User) -> Outcome:
        done = user.run("model", "fit", "table.csv", "--json", *options)
        if done.code:
            return case.refusal(done)
        (group,) = json.loads(done.output)["groups"]
        shown = {point["num_workers"]: (point[quantity] or {}).get("value") for point in group["points"]}
        return outcome_of(
            [
                f"{num} workers: {quantity} {shown.get(num)}, right is {right:.4g}"
                for num, right in speedups.items()
                if not is_close(shown.get(num), right, TOLERANCE)
            ]
        )

    return judge


def table(name: str, text: str, do: Any, *, words: Sequence[str] = (), tags: Sequence[str] = ("headers",)) -> Steps:
    """Return a case; words of a refusal make it an expected one."""
    expected = {"expected": REFUSED, "words": tuple(words)} if words else {}
    return Steps(name=f"table: {name}", files={"table.csv": text}, do=do, tags=tuple(tags), **expected)  # type: ignore[arg-type]


PER_GPU = "workers,throughput\n1,122\n2,115\n4,111\n8,110\n16,80\n"
WEAK = "workers,time\n1,48.8\n1,50.3\n1,49.7\n2,51.9\n2,52.3\n2,52.2\n4,53.3\n4,53.0\n4,53.9\n8,54.6\n8,53.8\n8,53.5\n"

CASES = [
    table("workers and time", "workers,time\n1,100\n2,52\n4,28\n", reads({2: 100 / 52, 4: 100 / 28}), tags=()),
    table("GPUs and images/sec", "GPUs,images/sec\n1,740\n2,1481.3\n8,5000\n", reads({2: 1481.3 / 740, 8: 5000 / 740})),
    table("milliseconds", "workers,time_ms\n1,1005\n2,521\n4,287\n", reads({2: 1005 / 521, 4: 1005 / 287})),
    table("speedups", "workers,speedup\n1,1\n2,1.93\n4,3.54\n8,6.1\n", reads({2: 1.93, 4: 3.54, 8: 6.1})),
    table("commas for points", "workers;time\n1;100,5\n2;52,1\n4;28,7\n", reads({2: 100.5 / 52.1, 4: 100.5 / 28.7})),
    table(
        "throughput of each GPU",
        PER_GPU,
        reads({2: 2 * 115 / 122, 16: 16 * 80 / 122}),
        words=("each worker", "all workers"),
    ),
    table(
        "throughput of each GPU, which the head says",
        PER_GPU.replace("throughput", "samples/sec/gpu"),
        reads({2: 115 / 122, 16: 80 / 122}, quantity="efficiency"),
    ),
    table(
        "times of weak scaling",
        WEAK,
        reads({2: 49.7 / 52.2}, quantity="efficiency"),
        words=("strong", "weak"),
    ),
    table(
        "times of weak scaling, which the user says",
        WEAK,
        reads({2: 49.7 / 52.2, 8: 49.7 / 53.8}, "--scaling", "weak", quantity="efficiency"),
        tags=(),
    ),
]
