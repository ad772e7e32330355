"""Targets of a verb: a study file as it is, or a study written for a script or a command line."""

import pytest

from raypar.cli.target import study_file
from raypar.errors import RayparError, StudyError
from raypar.study.loader import load_study

TORCHRUN = "import torch.distributed as dist\ndist.init_process_group()\nprint(f'loss: {0.5}')\n"
OPTIONS = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float, default=0.1)\np.parse_args()\n"
)
STUDY = "from raypar import Study, grid\nfrom raypar.workloads import digits\nstudy = Study(workload=digits)\n"
OPTUNA = "import optuna\nimport torch\nstudy = optuna.create_study()\n"
LOCAL = "import torch\ndef main():\n    study = 'local'\nmain()\n"
SWEEP = "python train.py --lr {lr}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(target, grids=(), baseline=(), save=None, **how):
    return load_study(study_file(target, list(grids), list(baseline), save, **how)).study


def test_a_study_file_is_its_own_target(folder):
    (folder / "mine.py").write_text(STUDY)
    assert str(study_file("mine.py", None, None, None)) == "mine.py"
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


def test_a_script_that_uses_torch_distributed_is_started_with_torchrun(folder):
    (folder / "train.py").write_text(TORCHRUN)
    study = made("train.py", ["num_workers=1,2"])
    assert study.name == "train" and study.baseline == {"num_workers": 1}
    assert study.workload.command.template.split()[:2] == ["torchrun", "--standalone"]
    assert [point["num_workers"] for point in study.points()] == [1, 2]
    assert study.judged_by.name == "loss"


def test_swept_options_of_a_script_are_in_its_command_and_single_values_are_fixed(folder):
    (folder / "train.py").write_text(OPTIONS)
    study = made("train.py", ["lr=0.1,0.2", "cpus_per_worker=2"])
    assert study.workload.command.template == "python train.py --lr {lr}"
    assert study.points() == ({"lr": 0.1}, {"lr": 0.2}) and study.config["cpus_per_worker"] == 2
    assert study.baseline == {"lr": 0.1}


def test_a_command_line_is_a_study(folder):
    (folder / "train.py").write_text(TORCHRUN)
    command = "torchrun --standalone --nproc-per-node={num_workers} train.py --batch-size {batch_size}"
    study = made(command, ["num_workers=1,2", "batch_size=64,256"], ["batch_size=64"])
    assert study.workload.command.template == command and len(study.points()) == 4
    assert study.baseline == {"batch_size": 64} and "loss" in study.workload.command.metrics


def test_a_saved_study_has_the_name_of_its_file(folder):
    (folder / "train.py").write_text(TORCHRUN)
    study = made("train.py", ["num_workers=1,2"], save=folder / "scaling.py")
    assert study.name == "scaling" and "name=" not in (folder / "scaling.py").read_text()
    with pytest.raises(RayparError, match="already exists"):
        made("train.py", ["num_workers=1,2"], save=folder / "scaling.py")


def test_a_saved_study_of_a_command_runs_it_in_the_current_folder(folder):
    (folder / "train.py").write_text(OPTIONS)
    (folder / "studies").mkdir()
    study = made(SWEEP, ["lr=0.1,0.2"], save=folder / "studies" / "lr.py")
    assert study.workload.command.scripts == ("../train.py",)
    with pytest.raises(RayparError, match=r"must end in \.py"):
        made(SWEEP, ["lr=0.1,0.2"], save=folder / "lr.txt")


def test_a_command_line_may_be_long(folder):
    (folder / "train.py").write_text(OPTIONS)
    assert made(f"{SWEEP} --note {'x' * 300}", ["lr=0.1,0.2"]).name == "train"


def test_another_command_has_other_trials(folder):
    (folder / "train.py").write_text(OPTIONS)
    short, long = (made(f"{SWEEP} --epochs {num}", ["lr=0.1,0.2"]) for num in (1, 10))
    assert short.name == long.name == "train"
    assert not {trial.identity for trial in short.trials()} & {trial.identity for trial in long.trials()}


@pytest.mark.parametrize(
    ("target", "name", "file"),
    [
        ("my train.py", "my train", ".my train_study.py"),
        ("sub/train.py", "sub_train", ".sub_train_study.py"),
        (f"{SWEEP} sub/train.py", "train", ".train_study.py"),
        ("python -m sub.train --lr {lr}", "sub_train", ".sub_train_study.py"),
        ("torchrun --standalone -m sub.train -- --lr {lr}", "sub_train", ".sub_train_study.py"),
        ("python 'my train.py' --lr {lr}", "my train", ".my train_study.py"),
        ("bash -c 'python train.py --lr {lr} | tee log'", "bash", ".bash_study.py"),
        ("optuna.py", "optuna", ".optuna_study.py"),
        ("local.py", "local", ".local_study.py"),
    ],
)
def test_a_study_is_named_after_the_script(folder, target, name, file):
    (folder / "sub").mkdir()
    for script in ("train.py", "my train.py", "sub/train.py"):
        (folder / script).write_text(OPTIONS)
    (folder / "optuna.py").write_text(OPTUNA + OPTIONS)
    (folder / "local.py").write_text(LOCAL + OPTIONS)
    assert study_file(target, ["lr=0.1,0.2"], None, None).resolve() == folder / file
    assert made(target, ["lr=0.1,0.2"]).name == name


def test_a_script_outside_of_the_current_folder_runs_in_its_own(folder, monkeypatch):
    for name in ("scripts", "here"):
        (folder / name).mkdir()
    (folder / "scripts" / "train.py").write_text(OPTIONS)
    monkeypatch.chdir(folder / "here")
    file = study_file("../scripts/train.py", ["lr=0.1,0.2"], None, None)
    assert file.resolve() == folder / "scripts" / ".train_study.py"
    assert load_study(file).study.workload.command.template == SWEEP


@pytest.mark.parametrize(
    ("text", "target", "space", "config"),
    [
        (OPTIONS, "train.py", {}, {"lr": 0.1, "cpus_per_worker": 4}),
        (TORCHRUN, "train.py", {"num_workers": (1, 2)}, {"cpus_per_worker": 2}),
        (OPTIONS, "python train.py --lr 0.5", {}, {"cpus_per_worker": 4}),
    ],
)
def test_a_question_about_a_script_as_it_is_sweeps_nothing_but_workers(folder, text, target, space, config):
    (folder / "train.py").write_text(text)
    study = made(target, as_it_is=True, num_cores=4)
    assert {key: domain.values for key, domain in study.space.items()} == space and study.config == config
    assert study.name == "train"


def test_a_required_option_gets_its_value_from_the_command_line(folder):
    (folder / "train.py").write_text(OPTIONS.replace("default=0.1", "required=True").replace("--lr", "--dim"))
    with pytest.raises(RayparError, match="dim has no default") as caught:
        made("train.py")
    assert caught.value.hint == "give values: --grid dim=…"
    assert made("train.py", ["dim=2"]).config == {"dim": 2}


@pytest.mark.parametrize(
    ("target", "grids", "baseline", "words"),
    [
        ("mine.py", ["lr=1,2"], [], ["mine.py: is a study file; --grid is for scripts", "--set"]),
        ("nope.py", ["lr=1,2"], [], ["nope.py: there is no such file"]),
        ("broken.py", ["lr=1,2"], [], ["broken.py, line 1: syntax error"]),
        ("C:\\x\\train.py", ["lr=1,2"], [], ["there is no such file"]),
        ("", [], [], ["the target is empty"]),
        ("python 'train.py", ["lr=1,2"], [], ["can't be split into words", "close the quote"]),
        ("python train.py", [], [], ["no hyperparameter to sweep", "--grid"]),
        ("python nope.py --lr {lr}", ["lr=1,2"], [], ["there is no file nope.py", "current folder"]),
        ("python x\\train.py --lr {lr}", ["lr=1,2"], [], ["write paths with /"]),
        ("train.py --lr {lr}", ["lr=1,2"], [], ["begins with a script", "write python train.py …"]),
        ("A=1 python train.py --lr {lr}", ["lr=1,2"], [], ["begins with a variable", "env A=1 …"]),
        (f"{SWEEP} | tee log", ["lr=1,2"], [], ["`|` needs a shell", "bash -c"]),
        (f"{SWEEP} {{}}", ["lr=1,2"], [], ["is not the name of a hyperparameter", "{{ }}"]),
        (f"{SWEEP} {{dim}}", ["lr=1,2"], [], ["{dim} has no value", "--grid dim=A,B"]),
        ("python train.py", ["my_lr=1,2"], [], ["--grid my_lr: the command does not use it", "add --my-lr {my_lr}"]),
        (SWEEP, ["num_workers=1,2", "lr=1"], [], ["number of processes would stay the same", "torchrun"]),
        ("train.py", ["num_workers=1,2"], [], ["number of processes would stay the same", "torchrun"]),
        ("train.py", ["learning=1,2"], [], ["finds no such option", '"python train.py --learning {learning}"']),
        ("train.py", ["seed=1,2"], [], ["--grid seed: raypar sets it for each trial"]),
        ("train.py", ["lr"], ["lr=1,2"], ["lacks `=`"]),
        ("train.py", ["lr=1", "lr=2"], [], ["--grid lr = '2': is given twice", "--grid lr=A,B"]),
        ("train.py", ["lr=0.1,0.2"], ["lr=0.1,0.2"], ["--baseline lr", "must be one value"]),
    ],
)
def test_options_that_do_not_fit_a_target_are_named(folder, target, grids, baseline, words):
    (folder / "mine.py").write_text(STUDY)
    (folder / "train.py").write_text(OPTIONS)
    (folder / "broken.py").write_text("x = (\n")
    with pytest.raises((RayparError, StudyError)) as caught:
        load_study(study_file(target, grids, baseline, None))
    text = f"{caught.value} {caught.value.hint}"
    assert all(word in text for word in words), text
