"""Stopwatch that a script calls by hand around the parts of its steps. It knows nothing of raypar."""

import hashlib
import json
import statistics
import time

SKIPPED = 11  # first steps, as many as raypar leaves out of a training of more than 40 steps


class Stopwatch:
    """Time of each part of each step, and what the script prints at its end.

    With ``is_on=False`` it only times whole steps, like many scripts.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.losses: list[str] = []
        self.steps: list[tuple[float, int, dict[str, float]]] = []  # time, samples, parts
        self.now: dict[str, float] = {}
        self.num_samples = 0
        self.last_s = self.last_step_s = time.perf_counter()

    def part(self, name: str) -> None:
        """End a part, which began with the end of the previous one."""
        if self.is_on:
            now_s = time.perf_counter()
            self.now[name] = self.now.get(name, 0.0) + now_s - self.last_s
            self.last_s = now_s

    def batch(self, loss: float, num_samples: int = 0) -> None:
        """Note the loss and the samples of a backward pass."""
        self.losses.append(loss.hex())
        self.num_samples += num_samples

    def step(self) -> None:
        """End a step."""
        now_s = time.perf_counter()
        self.steps.append((now_s - self.last_step_s, self.num_samples, self.now))
        self.last_step_s, self.num_samples, self.now = now_s, 0, {}

    def resume(self) -> None:
        """Begin again after work that is not part of a step."""
        self.last_s = self.last_step_s = time.perf_counter()

    def report(self, rank: int) -> None:
        """Print the results of a rank."""
        counted = self.steps[SKIPPED:]
        time_s = sum(step_s for step_s, _, _ in counted)
        parts: dict[str, float] = {}
        for _, _, of_step in counted:
            for name, seconds in of_step.items():
                parts[name] = parts.get(name, 0.0) + seconds / len(counted)
        result = {
            "rank": rank,
            "step_s": time_s / len(counted),
            "median_step_s": statistics.median(step_s for step_s, _, _ in counted),
            "samples_per_s": sum(samples for _, samples, _ in counted) / time_s,
            "parts": parts,
            "num_losses": len(self.losses),
            "losses": hashlib.sha256("".join(self.losses).encode()).hexdigest(),
        }
        # Line and newline in one piece: ranks share the output.
        print(f"@@ {json.dumps(result)}\n", end="", flush=True)
