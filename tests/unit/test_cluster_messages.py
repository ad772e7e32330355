"""What is told of a cluster that can't be joined."""

from __future__ import annotations

import pytest

from raypar.run.cluster import without_frames

ANSWER = """Initialization failure from server:
Traceback (most recent call last):
  File "proxier.py", line 772, in Datapath
    raise RuntimeError(
RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err for detailed logs.

"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            ANSWER,
            "Initialization failure from server: RuntimeError: Starting Ray client server failed. "
            "See ray_client_server_23000.err for detailed logs.",
        ),
        ("connection\n timed out", "connection timed out"),
        ("", ""),
    ],
    ids=["a traceback", "lines", "nothing"],
)
def test_what_ray_says_is_one_line_without_the_frames_of_its_servers(said: str, told: str) -> None:
    assert without_frames(RuntimeError(said)) == told
