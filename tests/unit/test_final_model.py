"""``--log-model`` and ``--log-all-models``: studies that allow it, and the logged models."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raypar import Data, Split, Study, Workload, grid
from raypar.analysis.analyse import analyse
from raypar.errors import RayparError
from raypar.execution.best_model import (
    ALL_MODELS_FILE,
    FINAL_MODEL_FILE,
    check_can_log,
    is_logged,
    log_all_models,
    log_final_model,
    other_trials,
    unlogged,
    with_models,
)
from raypar.study.trial import TrialResult, TrialState
from raypar.track.runs import BEST_MODEL, CHECKPOINT_MODEL, KEPT_MODEL
from raypar.train.saved_model import NUM_EXAMPLES, WEIGHTS_FILE, exported
from raypar.workloads import digits
from workloads.gpt2_code import gpt2_code


def halved(inputs):
    return inputs / 2


def bytes_data(_config):
    inputs = torch.arange(24, dtype=torch.uint8).reshape(8, 3)
    split = Split(inputs, torch.zeros(8, dtype=torch.int64))
    return Data(train=split, val=split, transform=halved)


WORKLOAD = Workload(name="mine", model=lambda _: nn.Linear(3, 2), data=bytes_data)
STUDY = Study(workload=WORKLOAD, space={"lr": grid(0.1, 0.5)}, num_repeats=2, name="s")


def a_store():
    """Return a fake of store, recorder and listener, with everything that it was given."""
    store = SimpleNamespace(folders={}, artifacts={}, models=[], notices=[])
    store.model_folder = lambda study, identity, *name: store.folders.get((identity, *name) if name else identity)
    store.artifact = lambda study, name: store.artifacts.get(name)
    store.record_model = lambda result, *model: store.models.append((result.spec.identity, *model))
    store.add_artifact = store.artifacts.__setitem__
    store.notice = lambda event: store.notices.append(event.text)
    return store


def results(study, *accuracies):
    """Return a result of each trial by point and repeat. The second epoch has this accuracy, the others have less."""
    made = {}
    specs = sorted(study.trials(), key=lambda spec: (spec.config["lr"], spec.repeat))
    for i, (spec, accuracy) in enumerate(zip(specs, accuracies, strict=True)):
        reports = tuple({"epoch": e + 1, "accuracy": accuracy - d} for e, d in enumerate((0.2, 0.0, 0.1)))
        made[spec.identity] = TrialResult(spec, TrialState.FINISHED, 1.0 + i, train_time_s=1.0, reports=reports)
    return made


def logged(study, found, stored, folder):
    log_final_model(study, analyse(study, tuple(found.values())), found, stored, stored, folder, stored.notice)


def test_a_study_without_loggable_models_is_refused():
    check_can_log(STUDY)
    loop = Workload.from_train_loop(print, name="loop")
    cases = (loop, "is a train loop", "log_model"), (gpt2_code, "saves its models itself", "keep_model=")
    for workload, message, hint in cases:
        with pytest.raises(RayparError, match=f"--log-model: workload {workload.name} {message}") as refused:
            check_can_log(Study(workload=workload, num_repeats=1))
        assert hint in str(refused.value.hint)


def test_trials_without_models_cause_a_notice():
    keeping = with_models(STUDY)
    assert all(spec.config["keep_model"] for spec in keeping.trials())
    stored = tuple(results(STUDY, 0.5, 0.5, 0.5, 0.5).values())
    message = "4 trials in the store without a model will run again"
    assert other_trials(stored, keeping.trials()).endswith(message)
    assert other_trials((), keeping.trials()) == ""
    assert other_trials(tuple(results(keeping, 0.5, 0.5, 0.5, 0.5).values()), ()) == ""
    swept = Study(workload=digits, space={"keep_model": grid(True, False)}, num_repeats=1)
    assert with_models(swept) == swept


def test_the_best_trial_of_the_best_point_is_saved_and_logged_once(tmp_path):
    keeping = with_models(STUDY)
    found = results(keeping, 0.6, 0.95, 0.8, 0.9)  # medians: 0.775 and 0.85, so the best trial of all does not count
    best = list(found)[3]
    kept = tmp_path / "kept"
    kept.mkdir()
    model = nn.Linear(3, 2)
    torch.save(model.state_dict(), kept / WEIGHTS_FILE)
    stored = a_store()
    stored.folders[best] = kept
    analysis = analyse(keeping, tuple(found.values()))
    assert not is_logged(keeping, analysis, found, stored)
    logged(keeping, found, stored, tmp_path / "best")
    assert (stored.models, stored.notices) == ([(best, tmp_path / "best", BEST_MODEL, 1)], [])
    assert json.loads(stored.artifacts[FINAL_MODEL_FILE])["trial"] == "lr=0.5 #2"
    assert is_logged(keeping, analysis, found, stored)
    for damaged in ("{", "[]"):
        stored.artifacts[FINAL_MODEL_FILE] = damaged
        assert not is_logged(keeping, analysis, found, stored)

    import mlflow.pytorch

    loaded = mlflow.pytorch.load_model(str(tmp_path / "best"))
    for size in (1, 5):  # another number of samples than the example's
        inputs = torch.arange(size * 3, dtype=torch.uint8).reshape(size, 3)
        torch.testing.assert_close(loaded(inputs), model(inputs / 2))
    described = mlflow.models.Model.load(str(tmp_path / "best"))
    assert described.load_input_example(str(tmp_path / "best")).shape == (NUM_EXAMPLES, 3)
    requirements = (tmp_path / "best" / "requirements.txt").read_text()
    assert "raypar" not in requirements and f"torch=={torch.__version__.partition('+')[0]}" in requirements


class Dict(nn.Linear):
    def forward(self, inputs):
        return {"logits": super().forward(inputs)}


def test_a_model_that_can_not_be_logged_causes_a_notice(tmp_path):
    odd = with_models(replace(STUDY, workload=replace(WORKLOAD, model=lambda _: Dict(3, 2))))
    found = results(odd, 0.6, 0.7, 0.8, 0.9)
    stored = a_store()
    logged(odd, found, stored, tmp_path / "best")
    torch.save(Dict(3, 2).state_dict(), tmp_path / WEIGHTS_FILE)
    stored.folders[list(found)[3]] = tmp_path
    logged(odd, found, stored, tmp_path / "best")
    logged(odd, {}, stored, tmp_path / "best")
    assert stored.notices == [
        "no model was logged: lr=0.5 #2 kept none",
        "no model was logged: TypeError: the model gives a dict, not a tensor; the weights of lr=0.5 #2 are kept",
        "no model was logged: no trial reported accuracy",
    ]
    assert (stored.models, stored.artifacts) == ([], {})


def test_the_model_of_every_trial_is_logged_once_at_the_report_that_it_is_of(tmp_path):
    keeping = with_models(STUDY)
    found = results(keeping, 0.6, 0.95, 0.8, 0.9)
    stopped, failed = list(found)[1:3]
    found[stopped] = replace(found[stopped], state=TrialState.STOPPED, reports=found[stopped].reports[:1])
    found[failed] = replace(found[failed], state=TrialState.FAILED)
    stored = a_store()
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / WEIGHTS_FILE)
    stored.folders = dict.fromkeys(found, tmp_path)
    usable = [identity for identity in found if identity != failed]
    assert [r.spec.identity for r in unlogged(keeping, found, stored)] == usable
    log_all_models(keeping, found, stored, stored, tmp_path / "models", stored.notice)
    reports = [0 if identity == stopped else 1 for identity in usable]
    expected = [(i, tmp_path / "models" / i, KEPT_MODEL, n) for i, n in zip(usable, reports, strict=True)]
    assert (stored.models, stored.notices) == (expected, ["logging 3 models in MLflow"])
    assert all((folder / "MLmodel").exists() for _, folder, *_ in stored.models)

    log_all_models(keeping, found, stored, stored, tmp_path / "models", stored.notice)
    assert len(stored.models) == 3 and len(stored.notices) == 1
    again = usable[2]
    found[again] = replace(found[again], started_at=99.0)  # with --fresh
    log_all_models(keeping, found, stored, stored, tmp_path / "models", stored.notice)
    assert [identity for identity, *_ in stored.models[3:]] == [again]


def test_the_models_of_all_reports_are_logged_at_their_steps_if_they_were_kept(tmp_path):
    keeping = replace(with_models(STUDY), space={"lr": grid(0.1)}, num_repeats=1)
    keeping = replace(keeping, config={**keeping.config, "keep_checkpoints": True})
    (spec,) = keeping.trials()
    reports = tuple({"epoch": e + 1, "accuracy": a} for e, a in enumerate((0.7, 0.9, 0.8)))
    found = {spec.identity: TrialResult(spec, TrialState.FINISHED, 1.0, train_time_s=1.0, reports=reports)}
    stored = a_store()
    stored.folders = {spec.identity: tmp_path / "1", (spec.identity, "reports"): tmp_path}
    weights = [nn.Linear(3, 2).state_dict() for _ in range(3)]
    for i in (0, 1):  # the third was lost
        (tmp_path / str(i)).mkdir()
        torch.save(weights[i], tmp_path / str(i) / WEIGHTS_FILE)
    log_all_models(keeping, found, stored, stored, tmp_path / "models", stored.notice)
    assert [(name, report) for _, _, name, report in stored.models] == [
        (KEPT_MODEL, 1),
        (CHECKPOINT_MODEL, 0),
        (CHECKPOINT_MODEL, 1),
    ]
    import mlflow.pytorch

    inputs = torch.ones(2, 3, dtype=torch.uint8)
    for _, folder, _, report in stored.models:
        loaded = mlflow.pytorch.load_model(str(folder))
        expected = torch.nn.functional.linear(inputs / 2, weights[report]["weight"], weights[report]["bias"])
        torch.testing.assert_close(loaded(inputs), expected)


def test_models_that_can_not_be_logged_cause_one_notice_and_the_others_are_logged(tmp_path):
    keeping = with_models(STUDY)
    found = results(keeping, 0.6, 0.95, 0.8, 0.9)
    stored = a_store()
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / WEIGHTS_FILE)
    stored.folders[list(found)[1]] = tmp_path
    log_all_models(keeping, found, stored, stored, tmp_path / "models", stored.notice)
    assert stored.notices[1:] == ["3 of 4 models not logged: lr=0.1 #1 kept none, lr=0.5 #1 kept none and 1 more"]
    assert list(json.loads(stored.artifacts[ALL_MODELS_FILE])) == [list(found)[1]]
    assert len(unlogged(keeping, found, stored)) == 3


def test_single_samples_are_ready_for_the_model(tmp_path):
    images = torch.utils.data.TensorDataset(torch.ones(5, 3), torch.zeros(5))
    data = Data(train_dataset=images, val_dataset=images, transform=halved)
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / WEIGHTS_FILE)
    module, *_ = exported(replace(WORKLOAD, data=lambda _: data), with_models(STUDY).trials()[0].config, tmp_path)
    torch.testing.assert_close(module(torch.ones(2, 3)), module.model(torch.ones(2, 3)))
