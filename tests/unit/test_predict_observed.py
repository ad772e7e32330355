"""Step model of a script: its points and gradients as observed, and its bound against a sum by hand."""

from dataclasses import replace

import pytest
from command import joined, raypar
from recording import recorded
from results import make_result, stored_conditions

from raypar.analysis.laws import Scaling
from raypar.analysis.question import Question
from raypar.errors import RayparError
from raypar.predict.calibration import calibrate, quiet_results
from raypar.predict.network import Network
from raypar.predict.observed_steps import observed_training
from raypar.predict.predict import communication_of, predict
from raypar.study.observation import Observation, ObservedDdp, ObservedLoader, ObservedRank
from raypar.study.profile import BACKWARD, PARTS, Breakdown

NUM_PARAMETERS, STEP_S, SAMPLES = 10_000_000, 0.1, 32
LOADER = ObservedLoader(batch_size=SAMPLES, num_iterations=2)


def trial(num_workers, step_s=STEP_S, samples=SAMPLES, repeat=0, **facts):
    """Return a trial of 100 steps, half of whose time is the backward pass; `samples` are those of a worker."""
    breakdown = Breakdown(step_s, {**dict.fromkeys(PARTS, 0.0), BACKWARD: step_s / 2}, 0.0)
    ddp = (ObservedDdp(parameter_bytes=4 * NUM_PARAMETERS, bucket_bytes=25 * 2**20),) * (num_workers > 1)
    of_rank = {"num_parameters": (NUM_PARAMETERS,), "loaders": (LOADER,), "ddp": ddp, **facts}
    ranks = tuple(
        ObservedRank(
            rank=i, num_ranks=num_workers, num_steps=100, breakdown=breakdown, samples_per_step=samples, **of_rank
        )
        for i in range(num_workers)
    )
    made = make_result(
        {"num_workers": num_workers}, repeat, 100 * step_s, None, num_samples=100 * samples * num_workers
    )
    return replace(
        made, observation=Observation(ranks=ranks), conditions=stored_conditions({"steps_from": ["observed"]})
    )


def test_a_scripts_training_is_the_observed_one():
    seen = observed_training([trial(1), trial(2, 0.12), trial(2, 0.14, repeat=1)])
    assert [(p.num_workers, p.batch_size, p.step_times_s) for p in seen.points] == [
        (1, SAMPLES, (STEP_S,)),
        (2, 2 * SAMPLES, (0.12, 0.14)),
    ]
    assert sum(part.num_gradient_bytes for part in seen.layers) == pytest.approx(4 * NUM_PARAMETERS)
    assert sum(part.backward_share for part in seen.layers) == pytest.approx(0.5)
    assert sum(part.forward_share for part in seen.layers) == pytest.approx(0.5)
    job = seen.job
    assert (job.scaling, job.batch_size, job.epochs) == (Scaling.WEAK, SAMPLES, 2)
    assert job.num_samples == 100 * 2 * SAMPLES / 2  # of the larger gang, in each of two epochs
    assert seen.config == {"device": "cpu"}  # torch's usual buckets


def test_buckets_and_halved_batches_are_those_of_the_script():
    of_two = trial(2, samples=SAMPLES // 2, ddp=(ObservedDdp(parameter_bytes=3e6, bucket_bytes=2**20),))
    seen = observed_training([trial(1, num_parameters=()), of_two])
    assert (seen.job.scaling, seen.job.batch_size, seen.config["bucket_mb"]) == (Scaling.STRONG, SAMPLES, 1)
    assert sum(part.num_gradient_bytes for part in seen.layers) == pytest.approx(3e6, rel=1e-3)
    assert observed_training([trial(1), of_two], Scaling.WEAK).job.batch_size == SAMPLES


def test_a_disturbed_trial_of_a_script_does_not_count_beside_a_quiet_one():
    busy = stored_conditions({"steps_from": ["optimizer steps"], "cores": [[0]], "foreign_cpu_share": [0.5]})
    disturbed = replace(trial(1, 0.2, repeat=1), conditions=busy)
    kept, excluded = quiet_results([trial(1), disturbed, trial(2)])
    assert [r.train_time_s for r in kept] == [trial(1).train_time_s, trial(2).train_time_s]
    assert excluded == "1 of 3 trials were disturbed by other load and are not used"
    with pytest.raises(RayparError, match="disturbed all trials of one worker"):
        quiet_results([disturbed, trial(2)])


@pytest.mark.parametrize(
    ("results", "problem"),
    [
        ([replace(trial(1), observation=None)], "were not observed"),
        ([trial(1, samples=0)], "samples of its steps are not known"),
        ([trial(1), trial(2, sends=True)], "send to single others"),
        ([trial(1), trial(2, samples=20)], "32 with 1, 40 with 2"),
        ([trial(2)], "no trials of one worker"),
        ([trial(1, num_parameters=())], "no parameters of an optimizer"),
    ],
)
def test_what_is_missing_for_a_bound_is_named(results, problem):
    with pytest.raises(RayparError, match=problem):
        observed_training(results)


def test_the_bound_is_the_sum_by_hand():
    seen = observed_training([trial(1)])
    network = Network(latency_s=0.0, bandwidth_bytes_per_s=1e8)
    how = replace(communication_of(seen.config, network, "ring"), overlap=False)
    calibration = replace(calibrate(seen.points, seen.layers), variation=1e-9)
    alone, two = predict(calibration, seen.job, how, [1, 2]).predictions
    assert alone.step_time_s.value == pytest.approx(STEP_S)
    sent_s = 4 * NUM_PARAMETERS / 1e8  # each of two workers sends half of the gradients twice
    assert two.step_time_s.value == pytest.approx(STEP_S + sent_s, rel=1e-6)
    assert two.efficiency.value == pytest.approx(STEP_S / (STEP_S + sent_s), rel=1e-6)
    overlapped = predict(calibration, seen.job, replace(how, overlap=True), [2]).predictions[0].step_time_s.value
    assert max(STEP_S, sent_s) < overlapped < STEP_S + sent_s


def test_a_stored_study_of_a_script_gets_a_bound(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    results = [
        trial(n, step_s * f, repeat=r) for n, step_s in ((1, 0.1), (2, 0.13)) for r, f in enumerate((0.99, 1.01))
    ]
    recorded(tmp_path, Question("mine", {"num_workers": 1}, ("num_workers",)), results)
    code, out, err = raypar("model", "predict", "mine", "--workers", "8", "--network", "1Gbit,0.1ms")
    assert code == 0, err
    shown = joined(out)
    assert "8 workers on 8 nodes, batch 256: efficiency" in shown and "At best" in shown and "2 epochs take" in shown
    assert "40.0 MB of gradients" in shown and "gradients are assumed to be ready evenly" in shown
