"""The end of a study whose data has a test split: it is shown to the chosen models, and to no other."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.analysis.chosen import FINAL_TEST_FILE, FinalTest, chosen_point, with_final_test
from raypar.analysis.speedup import StudyAnalysis
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
    mine = [r for r in results.values() if r.state is TrialState.FINISHED and r.spec.point == point.point]
    folders = {r.spec.identity: store.model_folder(study.name, r.spec.identity) for r in mine}
    kept = [(r.spec, folder) for r in mine if (folder := folders[r.spec.identity]) is not None]
    if not kept:
        return analysis
    from raypar.train.testing import test_scores

    scores = {spec.identity: test_scores(study.workload, spec.config, folder) for spec, folder in kept}
    recorder.record_trial_metrics(
        {identity: {f"test/{key}": value for key, value in own.items()} for identity, own in scores.items()}
    )
    text = FinalTest(point.point, analysis.metric, tuple(scores.values())).to_json()
    recorder.add_artifact(FINAL_TEST_FILE, text)
    return with_final_test(analysis, text)
