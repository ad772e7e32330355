"""`raypar doctor` on this machine, and at an address where nobody is."""

from __future__ import annotations

from pathlib import Path

from commands import Cli


def test_doctor_looks_at_everything_and_starts_ray(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    done = cli.run("doctor")
    assert done.returncode in (0, 1) and not done.stderr  # this machine may be busy, which fails
    for what in (
        "versions",
        "packages",
        "cores",
        "memory",
        "disk",
        "data",
        "store",
        "port",
        "torch",
        "GPU",
        "Ray: starts in",
    ):
        assert what in done.stdout
    assert done.returncode == ("FAIL" in done.stdout)
    cli.wait_for_its_processes()


def test_doctor_says_that_no_cluster_is_at_the_address(tmp_path: Path) -> None:
    done = Cli(tmp_path).run("doctor", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert (
        "FAIL  cluster: no Ray cluster at --address 127.0.0.1:1" in done.stdout and "→ is the cluster up" in done.stdout
    )
