"""The saved view of a study in MLflow, and the links to it; what it shows is in tests/golden."""

from raypar.track.view import ViewContent, experiment_url, saved_view


def test_links_open_the_page_for_runs():
    assert experiment_url("http://h:5000/", "3") == "http://h:5000/#/experiments/3/runs?workflowType=machine_learning"
    charts = experiment_url("http://h:5000", "3", charts=True)
    assert charts.endswith("runs?workflowType=machine_learning&viewStateShareKey=raypar-v2&compareRunsMode=CHART")


def test_a_saved_view_is_the_same_each_time_and_absent_where_it_is_too_long():
    lr = ViewContent({"lr": True}, "accuracy", ["accuracy"])
    assert saved_view(lr, at_ms=1) == saved_view(lr, at_ms=1)
    assert saved_view(ViewContent({}), at_ms=1)
    noise = [f"{i * 7919 % 1_000_003:x}{i * 104729 % 999_983:x}" for i in range(5000)]
    assert saved_view(ViewContent(dict.fromkeys(noise, True)), at_ms=1) is None
