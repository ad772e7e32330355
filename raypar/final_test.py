"""The end of a study whose data has a test split: it is shown to the chosen models, and to no other."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.analysis.analyse import StudyAnalysis
from raypar.analysis.chosen import FINAL_TEST_FILE, FinalTest, chosen_point, stored_final_test, with_final_test
from raypar.study.study import Study
from raypar.study.trial import TrialResult, TrialState
from raypar.track.recorder import Recorder
from raypar.track.store import Store


def final_test(
    study: Study, analysis: StudyAnalysis, results: Mapping[str, TrialResult], store: Store, recorder: Recorder
) -> StudyAnalysis:
    """Test the models that the trials of the best point have kept; the analysis with what came of it.

    The scores are metrics of the trials' runs (``test/accuracy``), and a file of the execution's, for later reports.
    """
    point = chosen_point(analysis)
    if point is None:
        return analysis
    mine = [r.spec for r in results.values() if r.state is TrialState.FINISHED and r.spec.point == point.point]
    folders = [(spec, store.model_folder(study.name, spec.identity)) for spec in mine]
    from raypar.train.evaluate import final_scores
    from raypar.train.saved_model import WEIGHTS_FILE

    kept = [(spec, folder) for spec, folder in folders if folder is not None and (folder / WEIGHTS_FILE).is_file()]
    if not kept:
        return analysis
    scores = {spec.identity: final_scores(study.workload, spec.config, folder) for spec, folder in kept}
    recorder.record_trial_metrics(
        {identity: {f"test/{key}": value for key, value in own.items()} for identity, own in scores.items()}
    )
    recorder.record_trial_inputs({identity: results[identity].data for identity in scores}, ("test",))
    before = last_final_test(store, study.name)
    found = FinalTest(point.point, analysis.metric, tuple(scores.values()), look=before.look + 1 if before else 1)
    recorder.add_artifact(FINAL_TEST_FILE, found.to_json())
    return with_final_test(analysis, found)


def last_final_test(store: Store, study_name: str) -> FinalTest | None:
    """Of the latest execution that had one."""
    return stored_final_test(store.artifact(study_name, FINAL_TEST_FILE))
