"""Other load on the machine while a trial is timed is measured, and the report says so."""

import subprocess
import sys

import pytest
from harness import settings_at
from loops import acting, train_func

from raypar import Study, Workload
from raypar.analysis.analyse import analyse
from raypar.run.local import LocalRunner
from raypar.run.runner import TrialEnded, TrialReported
from raypar.study.trial import TrialState
from raypar.track.runs import result_from_tags, result_tags
from raypar.train.affinity import allowed_cores

SPIN = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
MIN_LOAD_CORES = 0.2  # of the whole core that each process would take alone
# Long compared with the system's ticks, and rarely evaluated, so that most of it is timed.
STEPS = {"epochs": 400, "eval_every_steps": 160, "num_workers": 1}
LOOP = {"lr": 0.1, "num_epochs": 20, "batch": 8, "num_workers": 1}
STUDIES = {
    "steps": Study(workload=acting, name="busy", num_repeats=1, config=STEPS),
    "train loop": Study(workload=Workload.from_train_loop(train_func), name="loop", num_repeats=1, config=LOOP),
}


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_busy_machine_is_measured_and_reported(study, tmp_path):
    spinning = []  # pinned, one per core: otherwise all may run on cores without ranks
    results = []

    def listen(event):
        if isinstance(event, TrialReported) and not spinning:
            commands = ([sys.executable, "-c", SPIN, str(core)] for core in allowed_cores())
            spinning.extend(subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands)
            for process in spinning:
                assert process.stdout is not None
                process.stdout.readline()
        if isinstance(event, TrialEnded):
            results.append(event.result)

    try:
        with LocalRunner(settings_at(tmp_path)) as runner:
            runner.run(study, study.trials(), listen)
    finally:
        for process in spinning:
            process.kill()
            process.communicate()
    assert spinning and results[0].state is TrialState.FINISHED
    if study.workload is acting:  # pinned: others share its core
        shares = [results[0].conditions.to_stored()[name][0] for name in ("cpu_wait_share", "foreign_cpu_share")]
        assert all(0.05 < share <= 1 for share in shares)
    assert results[0].conditions.of_ranks("raypar_load_cores")[0] < MIN_LOAD_CORES * len(allowed_cores())
    stored = result_from_tags(result_tags(results[0]) or {})
    assert stored is not None and (stored.conditions.largest("other_load_cores") or 0.0) > MIN_LOAD_CORES
    sentence = next(f.detail for f in analyse(study, [stored]).warnings if f.check == "other_load")
    assert sentence.startswith("Other work ran while 1 of 1 trial") and " busy." in sentence
