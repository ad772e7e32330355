"""The links of this machine, measured between two forked ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypar.errors import RayparError
from raypar.predict.network import all_reduce_cost, fit_network
from raypar.predict.probe import probe_all_reduces
from raypar.train.affinity import allowed_cores


@pytest.mark.skipif(len(allowed_cores()) < 2, reason="two ranks need two cores")
def test_all_reduces_between_two_ranks_tell_a_network(tmp_path: Path) -> None:
    samples = probe_all_reduces(2, tmp_path)
    assert len(samples) > 4 and all(seconds > 0 for _, seconds in samples)
    network = fit_network(samples, 2)
    largest, seconds = samples[-1]
    # A busy machine spoils single sizes, not the order of magnitude.
    assert seconds / 10 < all_reduce_cost(largest, 2, network).total_s < 10 * seconds


def test_more_ranks_than_cores_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(RayparError, match="can't be measured on") as caught:
        probe_all_reduces(len(allowed_cores()) + 1, tmp_path)
    assert not list(tmp_path.iterdir())  # nothing was started
    assert caught.value.hint and "--network" in caught.value.hint
