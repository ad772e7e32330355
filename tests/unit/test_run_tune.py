"""A listener that fails ends a study in Tune once, and no event that was lost with it is waited for.

Ray's calls are stood in for: which events come together is a matter of luck with a real broker.
"""

from types import SimpleNamespace

import pytest
from results import make_spec

from raypar.errors import StoreError
from raypar.run import tune as module
from raypar.run.ranks import trial_result
from raypar.run.runner import TrialEnded


class Waits(BaseException):
    """The callback waits for an event that never comes."""


def test_after_a_listener_failed_no_other_trial_is_waited_for(monkeypatch):
    events = [[(uid, TrialEnded(trial_result(make_spec({}, i), {}))) for i, uid in enumerate(("first", "second"))]]

    def wait(_, timeout):
        if not events and timeout is None:
            raise Waits
        return events, []

    remote = SimpleNamespace(remote=lambda *_, **__: None)
    broker = SimpleNamespace(define=remote, release=remote, events=remote)
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait, get=lambda _: events.pop() if events else None))
    error = StoreError("no room for the first result")

    def listener(_):
        raise error

    callback = module.ResultCallback(broker, listener, None, None)
    callback._running |= {"first", "second"}
    first, second = (SimpleNamespace(trial_id=uid) for uid in ("first", "second"))
    with pytest.raises(StoreError):
        callback.on_trial_complete(0, [], first)
    assert callback.error is error
    callback.on_trial_complete(0, [], second)
    callback.on_trial_error(0, [], second)
