"""Study that a user of the lab has submitted, as tests and benchmarks follow it."""

import csv
import io
import math
import os
import re
import shlex
import time

from faultlab import Faulty

from slurmlab import USERS

LIMIT_S = 900.0  # on a busy machine, the first gang of two jobs takes minutes
POLL_S = 0.3
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


class Submitted:
    """A study that a user has submitted in a new folder of the home. `flags`: those of `raypar cluster slurm`."""

    def __init__(self, lab, user, flags, study=None):
        self.lab, self.user = lab, user
        self.folder = lab.home(user) / "studies"
        self.folder.mkdir()
        self.faulty = None if study else Faulty(self.folder, 3)
        self.name = "mine" if study else "faulty"
        if study:
            (self.folder / "mine.py").write_text(study)
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, USERS[user], USERS[user])
        printed = self.run(f"raypar cluster slurm {self.name}.py {flags}")
        self.job_id = re.search(r"as Slurm job (\d+);", printed)[1]

    def run(self, command, **how):
        """Run a command in the folder, on the login host."""
        return self.lab.run(f"cd {shlex.quote(f'/home/{self.user}/studies')} && {command}", user=self.user, **how)

    def states(self):
        """Return the state of the job, or of each job of an array."""
        return self.lab.jobs(self.job_id, "JobState")

    def is_over(self):
        return {*self.states()} <= {*OVER}

    def output(self):
        """Return what the job, or all jobs of an array, have printed."""
        files = (self.folder / ".raypar" / "slurm").glob(f"{self.name}-{self.job_id}*.out")
        return "".join(file.read_text(errors="replace") for file in sorted(files))

    def until(self, condition, what):
        """Wait for a condition while the job is pending or running."""

        def is_met():
            return condition() or self.is_over()

        self._wait(is_met, what)
        assert condition(), f"{what}: the job is {self.states()}\n{self.output()}"

    def until_over(self):
        """Wait for the end; return the state and exit code, which all jobs of an array must have."""
        self._wait(self.is_over, "the end")
        ends = {*zip(self.states(), self.lab.jobs(self.job_id, "ExitCode"), strict=True)}
        assert len(ends) == 1, f"{ends}\n{self.output()}"
        return ends.pop()

    def _wait(self, condition, what):
        until_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < until_s, f"timed out waiting for {what}\n{self.output()}\n{self.lab.logs()}"
            time.sleep(POLL_S)

    def until_held(self):
        """Wait for a trial in mid-epoch; return its learning rate."""
        self.until(self.faulty.held, "a held trial")
        return self.faulty.held()[0]

    def rows(self):
        """Return the study's trials, as `raypar store export` writes them on the login host."""
        self.run(f"raypar store export {self.name} {self.name}.csv")
        return list(csv.DictReader(io.StringIO((self.folder / f"{self.name}.csv").read_text())))

    def end(self):
        """End the job, and remove the folder."""
        self.run(f"scancel {self.job_id}", check=False)
        self.lab.run("rm -rf ~/studies", user=self.user)

    def end_in_minutes(self, minutes):
        """Change the time limit of a running job: this long from now, rounded up."""
        began_s = float(self.run(f"date -d $(squeue -h -j {self.job_id} -o %S) +%s"))
        limit = math.ceil((time.time() - began_s) / 60) + minutes
        self.run(f"scontrol update JobId={self.job_id} TimeLimit={limit}")

    def was_requeued(self):
        return self.lab.jobs(self.job_id, "Restarts") != ["0"] and self.states() == ["PENDING"]

    def start_again(self):
        """Start a requeued job with half an hour, at once. Slurm would wait for two minutes, so leases age by these.

        Not within the second of its end: slurmd takes a start that bears the time of the last kill for an old one
        ("already killed, do not launch batch job").
        """
        for lease in (self.folder / ".raypar" / "leases").glob("*"):
            before_s = lease.stat().st_mtime - 120
            os.utime(lease, (before_s, before_s))
        self.lab.run(f"scontrol update JobId={self.job_id} TimeLimit=30 StartTime=now+2", user="root")
