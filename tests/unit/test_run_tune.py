"""Tune's searcher and callback: further blocks share one Tune run, a failing listener ends it, and artifacts arrive.

Ray's calls are replaced, since a real broker decides by chance which events come together.
"""

from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.exceptions import OwnerDiedError
from ray.tune.search import Searcher
from ray.tune.search.search_generator import SearchGenerator
from results import make_spec

from raypar.errors import StoreError
from raypar.files import FilePiece
from raypar.run import tune as module
from raypar.run.dispatcher import ArtifactPiece
from raypar.run.ranks import trial_result
from raypar.run.runner import TrialEnded, TrialStarted
from raypar.train.job import ARTIFACT_FOLDER


class Waits(BaseException):
    """The callback waits for an event that never comes."""


@pytest.mark.parametrize("error", [StoreError("no room for the first result"), IndexError("a mistake in it")])
def test_after_a_listener_failed_no_trial_is_waited_for(error, monkeypatch, tmp_path):
    events = [[(uid, TrialEnded(trial_result(make_spec({}, i), {}))) for i, uid in enumerate(("first", "second"))]]

    def wait(_, timeout):
        if not events and timeout is None:
            raise Waits
        return events, []

    remote = SimpleNamespace(remote=lambda *_, **__: None)
    release = SimpleNamespace(remote=lambda tune_id, **_: tune_id)
    broker = SimpleNamespace(define=remote, release=release, events=remote)
    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait, get=lambda ref: ref or (events and events.pop())))

    def listener(_):
        raise error

    callback = module.ResultCallback(broker, listener, None, None, module.Inbox(tmp_path))
    callback._running |= {"first", "second"}
    first, second = (SimpleNamespace(trial_id=uid) for uid in ("first", "second"))
    with pytest.raises(type(error)):
        callback.on_trial_complete(0, [], first)
    assert callback.error is error
    callback.on_trial_complete(0, [], second)
    callback.on_trial_error(0, [], second)


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "happened"),
    [
        (2, None, ["stored", "defined"]),  # the broker knows which trial this is
        (2, 2, ["stored", "defined"]),
        (4, 2, ["defined"]),
        (None, 2, ["defined"]),
    ],
)
def test_a_trial_on_all_cores_begins_after_what_the_driver_has_to_do(
    num_cores, num_workers, happened, monkeypatch, tmp_path
):
    seen, sent = [], SimpleNamespace(remote=lambda *_: seen.append("defined"))
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda _: None))
    ahead = module.Ahead(num_cores, lambda: seen.append("stored")) if num_cores else None
    spec_of = (lambda _: make_spec({"num_workers": num_workers})) if num_workers else None
    broker = SimpleNamespace(define=sent)
    callback = module.ResultCallback(broker, lambda _: None, spec_of, None, module.Inbox(tmp_path), ahead)
    callback.on_trial_start(0, [], SimpleNamespace(trial_id="a", config={}))
    assert seen == happened


WEIGHTS = FilePiece("model/weights.pt", 0, b"weights")


def folder_after(tmp_path, *events):
    """Pass on events of a trial; return its artifact folder, the answers to its pieces, and the names in its folder."""
    answers, spec = [], make_spec({}, 0)
    broker = SimpleNamespace(piece_taken=SimpleNamespace(remote=lambda *answer: answers.append(answer)))
    broker.events = SimpleNamespace(remote=lambda _: None)
    made = {"started": TrialStarted(spec, 1), "ended": TrialEnded(trial_result(spec, {})), "end": None}
    batches = [[("uid", made.get(e) or ArtifactPiece(spec.identity, 1, () if e == "end" else (e,))) for e in events]]

    def get(ref):
        if isinstance(ref, Exception):
            raise ref
        return batches.pop() if ref is None else ref

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ray", SimpleNamespace(wait=lambda *_, **__: ([None], []), get=get))
        module.ResultCallback(broker, lambda _: None, None, None, module.Inbox(tmp_path)).pass_on(timeout_s=0)
    assert all(answer[:2] == ("uid", 1) for answer in answers)
    below = tmp_path / spec.identity
    return below / ARTIFACT_FOLDER, [answer[2] for answer in answers], sorted(p.name for p in below.rglob("*"))


def test_artifacts_are_moved_into_place_once_complete(tmp_path):
    rest = FilePiece("model/weights.pt", 7, b" of 2 GB")
    assert folder_after(tmp_path, "started", WEIGHTS, rest, "ended")[1:] == (["", ""], [])
    folder, answers, names = folder_after(tmp_path, "started", WEIGHTS, rest, "end", "ended")
    assert (answers, names) == ([""] * 3, ["artifacts", "model", "weights.pt"])
    assert (folder / "model" / "weights.pt").read_bytes() == b"weights of 2 GB"


def test_a_retried_trial_replaces_its_artifacts(tmp_path):
    other = FilePiece("other", 0, b"")
    folder, answers, names = folder_after(
        tmp_path, "started", WEIGHTS, other, "end", "started", other, "started", WEIGHTS, "end", "ended"
    )
    assert answers == [""] * 6 and names == ["artifacts", "model", "weights.pt"]
    assert (folder / "model" / "weights.pt").read_bytes() == b"weights"


BAD = {
    "ValueError: '../x'": FilePiece("../x", 0, b"x"),
    "ValueError: model/weights.pt: bytes 7 to 9": FilePiece("model/weights.pt", 9, b"x"),
    "FileExistsError": FilePiece("model/weights.pt/x", 0, b"x"),
    "OwnerDiedError": OwnerDiedError("", "", ""),
}


@pytest.mark.parametrize(("problem", "bad"), BAD.items(), ids=BAD)
def test_after_a_bad_piece_all_artifacts_are_dropped(tmp_path, problem, bad):
    folder, answers, names = folder_after(tmp_path, "started", WEIGHTS, bad, FilePiece("z", 0, b""), "end", "ended")
    assert [bool(answer) for answer in answers] == [False, True, True, True] and names == [] and not folder.exists()
    assert answers[1].startswith(problem)


class Blocks:
    """Further blocks, by the number of trials in each, and the number of requests for one."""

    def __init__(self, *sizes):
        self.sizes, self.num_asked, self.num_made = list(sizes), 0, 0

    def __call__(self):
        self.num_asked += 1
        return self.make(self.sizes.pop(0)) if self.sizes else ()

    def make(self, num):
        self.num_made += num
        return tuple(make_spec({}, repeat) for repeat in range(self.num_made - num, self.num_made))


def given_out(searcher, ended, num_slots=1):
    """Return the trials' places in the order in which a searcher suggests them."""
    places, live = [], []
    for number in range(1000):
        suggested = searcher.suggest(str(number))
        if suggested == Searcher.FINISHED:
            return places
        if suggested is not None:
            places.append(suggested["order"])
            live.append(str(number))
            assert len(live) <= num_slots
        else:
            assert live, "Tune would wait for ever"
            searcher.on_trial_complete(live.pop(0))
            ended[0] += 1
    raise AssertionError("no end")


@pytest.mark.parametrize("num_slots", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(), (2,), (2, 1, 3)])
def test_each_block_starts_after_the_end_of_the_last(sizes, num_slots):
    blocks, ended, added = Blocks(*sizes), [0], []
    specs = list(blocks.make(3))
    asked_at = []

    def more():
        asked_at.append(ended[0])
        return blocks()

    searcher = module.BlockSearcher(specs, more, added.append, lambda: ended[0], num_slots)
    num_trials = 3 + sum(sizes)
    assert given_out(searcher, ended, num_slots) == list(range(num_trials))
    assert [spec.repeat for spec in specs] == list(range(num_trials))
    assert asked_at == [3 + sum(sizes[:n]) for n in range(len(sizes) + 1)]
    assert [spec for each in added for spec in each] == specs[3:]  # the broker may begin them before Tune does


def test_more_is_called_after_every_result_was_passed_on():
    blocks, num_ended = Blocks(1), [0]
    searcher = module.BlockSearcher(list(blocks.make(1)), blocks, lambda _: None, lambda: num_ended[0], 1)
    assert searcher.suggest("a") == {"order": 0}
    searcher.on_trial_complete("a", error=True)
    assert searcher.suggest("b") is None and blocks.num_asked == 0
    num_ended[0] = 1
    assert searcher.suggest("b") == {"order": 1} and blocks.num_asked == 1


def test_more_slots_allow_more_trials_at_a_time():
    searcher = module.BlockSearcher(list(Blocks().make(3)), Blocks(), lambda _: None, lambda: 0, 1)
    assert searcher.suggest("a") == {"order": 0} and searcher.suggest("b") is None
    searcher.max_concurrent = 2  # nodes have joined
    assert searcher.suggest("b") == {"order": 1} and searcher.suggest("c") is None


def test_tune_accepts_the_searcher_without_pickling_its_state():
    searcher = module.BlockSearcher(list(Blocks().make(1)), lambda: (), lambda _: None, lambda: 1, 1)
    searcher._lock = (each for each in "not to be pickled")
    cloudpickle.dumps(searcher)  # as the Tuner's state
    generator = SearchGenerator(searcher)
    assert not generator.set_search_properties(None, None, {"broker": "x"})
    searcher.save_to_dir("/nowhere")
    generator._total_samples = 10
    searcher._num_given = 1
    assert not generator.is_finished()
    assert generator.create_trial_if_possible({}) is None and generator.is_finished()
