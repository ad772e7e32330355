"""Data that trials share: every trial has the losses that it has with data of its own."""

from dataclasses import replace

import pytest
from harness import RunEvents, losses, settings_at
from loops import LOADED, slow_to_load

from raypar import Study, grid
from raypar.run.local import LocalRunner
from raypar.study.trial import TrialState

NUM_REPEATS = 4


@pytest.mark.core
def test_shared_data_change_no_loss(tmp_path):
    results, logs = {}, {}
    for is_shared in (True, False):
        study = Study(
            workload=replace(slow_to_load, share_data=is_shared),
            name="s",
            space={"num_workers": grid(1, 2), "lr": grid(0.1, 0.2), "noise": grid(0, 1)},
            config={"epochs": 2, "batch_size": 32},
            num_repeats=NUM_REPEATS,
            max_retries=0,
        )
        events, folder = RunEvents(), tmp_path / f"{is_shared}"
        with LocalRunner(settings_at(folder)) as runner:
            runner.run(study, study.trials(), events.events.append)
        assert {result.state for result in events.results} == {TrialState.FINISHED}
        results[is_shared] = {(result.spec.label, result.spec.repeat): result for result in events.results}
        logs[is_shared] = [path.read_text() for path in sorted((folder / "logs").rglob("*rank*.log"))]
    assert len(results[True]) == 8 * NUM_REPEATS
    for key, result in results[True].items():
        assert losses(result) == losses(results[False][key]) and result.data == results[False][key].data, key
    num_loads = {is_shared: sum(text.count(LOADED) for text in texts) for is_shared, texts in logs.items()}
    assert num_loads[False] == len(logs[False]) == 12 * NUM_REPEATS
    # Without noise, all trials have the same data: two ranks load them. With noise, those of a seed have.
    assert num_loads[True] <= 4 + 3 * NUM_REPEATS
