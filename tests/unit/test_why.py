"""Why a step takes as long as it does, and which changes make it faster."""

from dataclasses import replace
from io import StringIO

import pytest
from results import make_result
from rich.console import Console

from raypar.analysis.analyse import Question, analyse
from raypar.analysis.improve import (
    affordable_repeats,
    changes_of,
    have_same_losses,
    promising,
    remedies,
    together,
    worth_repeating,
)
from raypar.analysis.why import worth_leaving_out
from raypar.init.calls import lines_of_calls
from raypar.reporting.documents import to_json
from raypar.reporting.improve import ImproveView
from raypar.reporting.why import WhyView, print_why
from raypar.study.observation import Observation, ObservedDdp, ObservedLoader, ObservedRank
from raypar.study.profile import BACKWARD, COMMUNICATION, DATA_WAIT, FORWARD, OPTIMIZER, PARTS, Breakdown, Profile
from raypar.study.trial import TrialState

LOADER = ObservedLoader(site="/home/me/train.py:41")
DDP = ObservedDdp(parameter_bytes=2**24)


def observed(point, repeat, step_s, parts, *, samples=64, losses=((1, 2.0), (2, 1.5)), num_ranks=1, **facts):
    """Return a trial of 100 steps.

    Args:
        parts: shares of a step.
        samples: per step and rank.
        facts: of each rank.
    """
    breakdown = Breakdown(step_s, {**dict.fromkeys(PARTS, 0.0), **{name: s * step_s for name, s in parts.items()}}, 0.0)
    ranks = tuple(
        ObservedRank(
            rank=rank,
            num_ranks=num_ranks,
            num_steps=100,
            breakdown=breakdown,
            samples_per_step=samples,
            **{"losses": losses, "loaders": (LOADER,), "num_threads": 1, "optimizers": ("AdamW",), **facts},
            ddp=(DDP,) * (num_ranks > 1),
        )
        for rank in range(num_ranks)
    )
    made = make_result(
        point,
        repeat,
        step_s * 100,
        None,
        num_samples=100 * samples * num_ranks,
        config={"cpus_per_worker": 2 // num_ranks},
        environment={"steps_from": ["optimizer steps"]},
    )
    profile = Profile(tuple(rank.breakdown for rank in ranks), 90, step_s, None)
    return replace(made, observation=Observation(ranks=ranks), profile=profile)


PARTS_OF = {
    1: {DATA_WAIT: 0.5, FORWARD: 0.2, BACKWARD: 0.2, OPTIMIZER: 0.1},
    2: {DATA_WAIT: 0.3, FORWARD: 0.1, BACKWARD: 0.2, OPTIMIZER: 0.1, COMMUNICATION: 0.3},
}


def test_parts_of_profiled_steps_are_shares_of_steps_without_the_profiler():
    made = observed({"num_workers": 1}, 0, 0.012, PARTS_OF[1])
    model = replace(
        made,
        observation=None,
        step_times_s=((0.01,) * 100,),
        train_time_s=1.0,
        eval_time_s=0.25,
        throughput_samples_per_s=6400.0,
        profile=replace(made.profile, step_s=0.01, overhead=0.2),
    )
    (answer,) = WhyView.of(analyse(Question("mine", {}, ("num_workers",)), [model])).points
    assert answer.step_s.value == pytest.approx(0.01) and answer.samples_per_step == 64
    assert {part.name: part.time_s.value for part in answer.parts} == pytest.approx(
        {DATA_WAIT: 0.005, FORWARD: 0.002, BACKWARD: 0.002, OPTIMIZER: 0.001}
    )
    assert answer.eval_share == pytest.approx(0.2) and not answer.what_ifs


FACTOR = {"none": 1.0, "no loading": 0.5, "no communication": 0.7, "no evaluation": 1.0}


def why_view(samples=lambda num: 64, batch_sizes=(None,), **facts):
    results = [
        observed(
            {"num_workers": num, "what_if": what_if, **({"batch_size": size} if size else {})},
            repeat,
            0.01 * num * factor * (1 + repeat / 1000),
            PARTS_OF[num],
            samples=samples(num),
            num_ranks=num,
            **{key: 0.0 if what_if == "no evaluation" and key == "eval_s" else value for key, value in facts.items()},
        )
        for size in batch_sizes
        for repeat in range(3)
        for num in (1, 2)
        for what_if, factor in FACTOR.items()
        if (num, what_if) != (1, "no communication")
    ]
    keys = ("num_workers", "what_if", *(["batch_size"] if batch_sizes[0] else []))
    analysis = analyse(Question("s_why", {"what_if": "none"}, keys), results)
    return WhyView.of(analysis), analysis


def test_the_parts_of_a_step_are_named_the_largest_first():
    view, _ = why_view()
    first = view.sentences[0]
    assert first.startswith("Each step at num_workers=1 takes 10.0 ms")
    assert first.endswith(": 50 % waiting for data, 20 % forward pass, 20 % backward pass, 10 % optimizer.")


def test_the_report_s_breakdown_is_the_mean_of_the_repeats():
    _, analysis = why_view()
    profile = next(p for point, p in analysis.profiles if point == {"num_workers": 1, "what_if": "none"})
    assert profile.num_steps == 270 and profile.step_s == pytest.approx(0.01001)
    assert profile.mean.step_s == pytest.approx(0.01001) and profile.mean.parts[DATA_WAIT] == pytest.approx(0.005005)


def test_what_a_part_costs_is_measured():
    view, _ = why_view(eval_s=1.0)
    loading, evaluation = view.points[0].what_ifs
    assert loading.left_out == "no loading" and loading.comparison.estimate.value == pytest.approx(2.0)
    assert evaluation.comparison.estimate.value == pytest.approx(2.0, rel=0.01), "of training and evaluation"
    assert "If loading cost nothing: 2.00× as fast (95 % CI 2.00-2.00)." in view.sentences
    assert any(line.startswith("If communication cost nothing: 1.43× as fast") for line in view.sentences)


def test_the_parts_that_grow_with_the_workers_and_those_that_limit_scaling_are_named():
    weak, _ = why_view()
    assert weak.sentences[-1] == (
        "With 2 workers instead of 1, training is 1.00× as fast (95 % CI 1.00-1.00), inconclusive. "
        "A step has 128 samples instead of 64 and takes 20.0 ms instead of 10.0 ms: "
        "exposed communication +6.0 ms, backward pass +2.0 ms, waiting for data +1.0 ms. "
        "Scaling is limited by exposed communication (6.0 ms), backward pass (2.0 ms), waiting for data (1.0 ms): "
        "an ideal step would take 10.0 ms."
    )
    strong, _ = why_view(samples=lambda num: 64 // num)
    assert strong.sentences[-1] == (
        "With 2 workers instead of 1, training is 0.50× as fast (95 % CI 0.50-0.50). "
        "A step takes 20.0 ms instead of 10.0 ms: "
        "exposed communication +6.0 ms, backward pass +2.0 ms, waiting for data +1.0 ms. "
        "Scaling is limited by exposed communication (6.0 ms), waiting for data (3.5 ms), backward pass (3.0 ms): "
        "an ideal step would take 5.0 ms."
    )
    unknown, _ = why_view(samples=lambda num: 0)
    assert "ideal" not in unknown.sentences[-1]


def test_each_group_of_points_is_compared_with_its_fewest_workers():
    view, _ = why_view(batch_sizes=(32, 64))
    assert [(each.answer.point, each.base.num_workers) for each in view.scaling] == [
        ({"num_workers": 2, "batch_size": size}, 1) for size in (32, 64)
    ]
    assert view.sentences[-2].startswith("With 2 workers instead of 1 at batch_size=32, training is")


def test_time_between_the_steps_is_named_apart():
    view, _ = why_view(eval_s=1.0, save_s=2.0)
    assert view.sentences[1:3] == (
        "Evaluations between the steps take 25 % of the whole time.",
        "Checkpoints between the steps take 50 % of the whole time.",
    )
    chosen = worth_leaving_out(why_view(save_s=2.0)[0].points)
    assert "no checkpoints" in chosen and "no evaluation" not in chosen


def test_only_parts_that_take_time_are_left_out():
    view, _ = why_view()
    alone = [point for point in view.points if point.num_workers == 1]
    assert worth_leaving_out(alone) == ("no loading",)
    assert set(worth_leaving_out(view.points)) == {"no loading", "no communication"}
    assert "no evaluation" in worth_leaving_out(why_view(eval_s=0.5)[0].points)


def test_a_counterfactual_is_never_recommended():
    _, analysis = why_view()
    chosen = analysis.verdict.recommendation.chosen
    assert chosen.point == {"num_workers": 1, "what_if": "none"}


def unchanged(num_ranks=1, others=(), **facts):
    """Return the evidence of an unchanged script, and of trials with changes."""
    point = {"num_workers": num_ranks}
    results = [
        observed({**point, "change": change}, 0, 0.01, PARTS_OF[num_ranks], num_ranks=num_ranks, **facts)
        for change in ("none", *others)
    ]
    return analyse(Question("s", {"change": "none"}, ("num_workers", "change")), results).evidence


def test_the_verdict_leaves_room_for_these_remedies():
    alone = (
        "loader_workers=1 persistent_workers=True",
        "loader_workers=2 persistent_workers=True",
        "threads=2",
        "fused_optimizer=True",
        "compile=True",
    )
    assert remedies(unchanged()) == alone
    assert remedies(unchanged(others=["threads=2"])) == alone, "a later execution reads the unchanged script alone"
    assert "threads=1" in remedies(unchanged(num_threads=2))
    two = remedies(unchanged(2))
    assert "bucket_cap_mb=1" in two and not any("threads" in each for each in two), "one core each"
    assert "evaluation_batches=1" not in remedies(unchanged(save_s=5.0))
    assert "evaluation_batches=1" in remedies(unchanged(eval_s=5.0))


CHANGES = {
    "none": (1.0, 2.0),
    "loader_workers=1 persistent_workers=True": (0.5, 2.0),
    "loader_workers=2 persistent_workers=True": (0.6, 2.0),
    "fused_optimizer=True": (0.9, 2.0),
    "compile=True": (0.8, 2.1),
    "threads=2": (1.0, 2.0),
}


def improved(num_repeats=3, later=1.0):
    """Return the analysis of these changes.

    Args:
        later: factor of the times of changed scripts from the third repeat on.
    """
    results = [
        observed(
            {"change": change},
            repeat,
            0.01 * factor * (1 + repeat / 1000) * (later if repeat > 1 and change != "none" else 1.0),
            PARTS_OF[1],
            losses=((1, loss),),
        )
        for repeat in range(num_repeats)
        for change, (factor, loss) in CHANGES.items()
    ]
    return analyse(Question("s_improve", {"change": "none"}, ("change",)), results)


def test_a_change_is_recommended_if_it_is_faster_with_the_same_losses():
    changes = {change.settings: change for change in changes_of(improved().evidence)}
    recommended = [settings for settings, change in changes.items() if change.is_recommended]
    assert recommended == [
        "loader_workers=1 persistent_workers=True",
        "loader_workers=2 persistent_workers=True",
        "fused_optimizer=True",
    ]
    assert changes["compile=True"].is_faster and changes["compile=True"].has_same_losses is False


def test_changes_that_look_faster_in_their_first_trials_are_repeated_also_together():
    chosen = promising(improved(2).evidence, CHANGES, 2)
    assert chosen == ("loader_workers=1 persistent_workers=True", "fused_optimizer=True"), "one number of processes"
    assert together(chosen) == "loader_workers=1 persistent_workers=True fused_optimizer=True"
    assert together(chosen[:1]) == chosen[0]
    assert promising(improved(5, later=9.0).evidence, CHANGES, 2) == chosen, "a later execution chooses the same"
    assert promising(improved(2).evidence, ["threads=2"], 2) == ()


def test_no_more_repeats_are_planned_than_the_budget_allows():
    evidence = improved(2).evidence
    changes = ("loader_workers=1 persistent_workers=True", "fused_optimizer=True")
    # The unchanged script takes 2.0 s, and these 1.5 and 1.9 s.
    assert affordable_repeats(evidence, changes, 2, 60.0) == 2 + 11
    assert affordable_repeats(evidence, changes, 2, 1.0) == 2 + 3, "a study needs three blocks to settle"
    assert affordable_repeats(evidence, (*changes, together(changes)), 2, 75.0) == 2 + 10, (
        "those together as the slowest"
    )


def test_fewer_changes_are_repeated_if_there_is_no_time_for_four_repeats_of_each():
    chosen = ("loader_workers=1 persistent_workers=True", "fused_optimizer=True")
    repeated = {budget_s: worth_repeating(improved(2).evidence, chosen, 2, budget_s) for budget_s in (30.0, 29.0, 1.0)}
    assert repeated[30.0] == (together(chosen), *chosen), "7.4 s for each repeat of these and of the unchanged script"
    assert repeated[29.0] == repeated[1.0] == (together(chosen), chosen[0])
    assert worth_repeating(improved(2).evidence, chosen[:1], 2, 60.0) == chosen[:1]


def test_losses_decide_only_if_those_of_the_unchanged_script_repeat():
    same, other, far = (dict.fromkeys(range(40), value) for value in (2.0, 2.1, 9.0))
    assert have_same_losses({0: same, 1: same}, {0: same, 1: same}) is True
    assert have_same_losses({0: same, 1: same}, {0: same, 1: other}) is False
    assert have_same_losses({0: same, 1: other}, {0: other, 1: same}) is None, "the script sets no seed"
    assert have_same_losses({0: same, 1: other}, {0: far, 1: far}) is False
    assert have_same_losses({0: same}, {}) is None and have_same_losses({0: same}, {0: {}}) is None
    assert have_same_losses({1: other}, {0: same, 1: other}) is True, "trials of the same repeat"
    for height, are_same in ((1.0, True), (0.01, False)):  # by which the last losses vary
        one, other = ({s: 2.0 if s < 180 else 1 + s % 2 * height + up for s in range(200)} for up in (0.0, 0.05))
        assert have_same_losses({0: one}, {0: other}) is are_same
    small = {step: 2.0 if step < 20 else 1e-6 for step in range(40)}
    assert have_same_losses({0: small}, {0: {**small, 39: 2e-6}}) is True, "rounding, next to what was learned"


def test_the_answer_names_the_change_its_gain_and_the_line_of_the_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    view = ImproveView.of(improved(), lambda names: [f"{tmp_path}/train.py:7"] if "AdamW" in names else [])
    assert view.sentences[:2] == (
        "Recommended: loader_workers=1 and persistent_workers=True, 2.00× as fast (95 % CI 2.00-2.00), same losses.",
        "Change DataLoader(…) at train.py:41: num_workers=1, persistent_workers=True.",
    )
    assert view.calls["optimizer"] == "AdamW(…) at train.py:7"
    assert view.why[0].startswith("Each step takes 10.0 ms")
    assert any(line.startswith("compile=True: ") and "losses change" in line for line in view.sentences)
    assert '"kind": "improve"' in to_json(view) and '"kind": "why"' in to_json(why_view()[0])


def test_a_change_with_a_longer_start_is_said_to_pay_off_only_in_a_longer_training():
    def made(starts_s):
        results = [
            replace(trial, wall_s=trial.train_time_s + start_s)
            for repeat in range(3)
            for change, factor, start_s in (("none", 1.0, 3.0 + repeat / 10), ("compile=True", 0.8, starts_s[repeat]))
            for trial in [observed({"change": change}, repeat, 0.01 * factor * (1 + repeat / 1000), PARTS_OF[1])]
        ]
        analysis = analyse(Question("s", {"change": "none"}, ("change",)), results)
        return changes_of(analysis.evidence)[0], ImproveView.of(analysis).recommendation

    change, lines = made([11.1, 11.0, 11.2])
    assert change.start_s == pytest.approx(8.0)
    # It saves a fifth of the training.
    assert change.pays_off_after_s == pytest.approx(40.0)
    assert lines[1] == "It adds 8 s to each start, so it pays off for a training that takes more than 40 s unchanged."
    assert made([11.0, 3.1, 11.2])[0].start_s == 0.0, "as short as a start of the unchanged script"
    assert made([3.5, 3.5, 3.5])[0].pays_off_after_s is None


def test_without_a_winner_the_answer_says_why():
    def answer(changes):
        results = [
            observed({"change": change}, repeat, 0.01 * (1 + repeat / 1000), PARTS_OF[1])
            for repeat in range(3)
            for change in changes
        ]
        return ImproveView.of(analyse(Question("s", {"change": "none"}, ("change",)), results)).sentences

    assert answer(["none"]) == ("No setting is worth trying: none of them shortens a part that takes much time.",)
    assert answer(["none", "threads=2"])[0] == "No change of settings makes it faster with confidence."
    dark = make_result({"change": "none"}, environment={"not_observed": ["no process imported torch"]})
    view = ImproveView.of(analyse(Question("s", {"change": "none"}, ("change",)), [dark]))
    assert view.why == ("Not observed: no process imported torch.",)
    assert view.sentences == ("No setting was tried, because no steps of the unchanged script were observed.",)


def test_a_change_that_the_script_can_not_take_is_named():
    results = [observed({"change": "none"}, repeat, 0.01, PARTS_OF[1]) for repeat in range(3)]
    results.append(make_result({"change": "compile=True"}, state=TrialState.FAILED))
    view = ImproveView.of(analyse(Question("s", {"change": "none"}, ("change",)), results))
    assert view.sentences[-1] == "compile=True failed: boom."


def test_calls_are_found_in_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\nopt = torch.optim.AdamW(p)\nm = DDP(\n    m)\nAdam(p)\n")
    assert lines_of_calls(script, ("AdamW",)) == (2,) and lines_of_calls(script, ("DDP", "Adam")) == (3, 5)
    assert lines_of_calls(tmp_path / "none.py", ("DDP",)) == ()


def test_mistakes_of_the_code_are_named_with_their_fix_and_without_what_was_left_out():
    view, _ = why_view(num_blocking_copies=2.0)
    details = {mistake.check: mistake.detail for mistake in view.mistakes}
    assert details["blocking_copies"] == (
        "Copies of batches to the GPU block the training: 2.0 copies a step (num_workers=1, num_workers=2)."
    )
    console = Console(file=StringIO(), width=100)
    print_why(console, view)
    assert "→ Set pin_memory=True in the DataLoader" in console.file.getvalue()
    assert "blocking_copies" not in {mistake.check for mistake in why_view()[0].mistakes}
