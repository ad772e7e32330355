"""`raypar init`: what it reads from a script, and the study that it writes."""

import contextlib
import io
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
from command import raypar, refused

from raypar import Study, grid, uniform
from raypar.analysis.question import question_of
from raypar.init.script import ScriptKind, read_script
from raypar.study.loader import load_study
from raypar.study.validation import validate
from raypar.train.command import OutputReader
from raypar.workloads import digits

SCRIPTS = Path(__file__).parents[1] / "golden" / "scripts"
pytestmark = pytest.mark.usefixtures("modules_as_they_were")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def read(folder, text):
    (folder / "train.py").write_text(text)
    return read_script(folder / "train.py")


# ---- metrics: the number that a line prints is the number that is read


@pytest.mark.parametrize(
    ("code", "metrics"),
    [
        ("print(f'epoch {epoch} loss: {loss:.4f}')", {"loss": 0.5}),
        ("print('epoch', epoch, 'loss', loss)", {"loss": 0.5}),
        ("print('loss = %.3f after %d steps' % (loss, 3))", {"loss": 0.5}),
        ("print('Train Epoch: {} [{}/{} ({:.0f}%)]\\tLoss: {:.6f}'.format(epoch, 1, 2, 50, loss))", {"loss": 0.5}),
        ("print('Test set: Average loss: {:.4f}, Accuracy: {}/{} ({:.0f}%)'.format(loss, 9, 10, 90.0))",
         {"test_loss": 0.5, "test_accuracy_percent": 90}),
        ("print(f'train loss {tiny:.3g} | val loss {loss:8.3f} | val acc {acc:.2f}')",
         {"train_loss": 1e-5, "val_loss": 0.5, "val_accuracy": 0.25}),
        ("print(f'loss {loss}');print(f'val_loss {tiny}')", {"loss": 0.5, "val_loss": 1e-5}),
        ("print(f'val loss: {tiny}');print(f'loss: {loss}')", {"loss": 0.5, "val_loss": 1e-5}),
        ("print(f'{epoch}: {loss:.2f}')", {}),
        ("print(f'[{epoch}] {loss:.2f} ({epoch} s)')", {}),
        ("print(f'epoch {epoch} -> {loss:.2f}.')", {"loss": 0.5}),
        ("print(f'Accuracy of the network on the 10000 test images: {100 * acc} %')", {"test_accuracy_percent": 25}),
        ("print('lossless', epoch, 'glossary', tiny)", {}),
        ("print('perplexity: ' + str(loss))", {"perplexity": 0.5}),
        ("print('loss {l:.2f}, {0}'.format(epoch, l=loss))", {"loss": 0.5}),
        ("print(json.dumps({'step': epoch, 'val_loss': loss}))", {"val_loss": 0.5}),
    ],
)  # fmt: skip
def test_the_guessed_expression_reads_the_printed_metric(code, metrics, folder):
    script = read(folder, f"import json\n{code}\n")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(f"import json\nepoch, loss, tiny, acc = 3, 0.5, 1e-5, 0.25\n{code}")
    reader = OutputReader({metric.name: metric.pattern for metric in script.metrics if metric.pattern})
    values = {}
    for line in printed.getvalue().splitlines():
        values |= {key: value for report, _ in reader.reports(line) for key, value in report.items()}
    values |= next(iter(reader.rest()), ({}, 0.0))[0]
    assert {key: value for key, value in values.items() if key != "step"} == metrics
    assert {metric.name for metric in script.metrics} == set(metrics)


def test_metrics_of_logging_calls_and_tensors_are_read(folder):
    script = read(folder, "import logging\nlogging.info('step %d: loss %.3f', 3, loss)\nprint('val loss:', val_loss)\n")
    patterns = {metric.name: metric.pattern for metric in script.metrics}
    reader = OutputReader(patterns)
    lines = ["INFO:root:step 3: loss 0.250", "val loss: tensor(0.5000)"]
    assert [report for line in lines for report, _ in reader.reports(line)] == [{"loss": 0.25, "val_loss": 0.5}]


def test_metrics_that_go_to_mlflow_are_read(folder):
    code = (
        "import mlflow\nfrom mlflow import log_metric\nlog_metric('val_loss', x, step=1)\nmlflow.log_metric('lr', x)\n"
    )
    script = read(folder, code + "mlflow.log_metrics({'test_acc': x, 'time': y})\nprint(f'val_loss {x:.2f}')\n")
    assert {metric.name: bool(metric.pattern) for metric in script.metrics} == {"val_loss": True, "test_acc": False}


LOSSES = "import logging, sys\nlosses = {'train': 0.1, 'val': 0.2}\n"


@pytest.mark.parametrize(
    ("code", "metrics"),
    [
        ("for phase in ['train', 'val']:\n"
         "    print(f'{phase} Loss: {losses[phase]:.4f} Acc: {losses[phase] * 2:.4f}')\n"
         "print(f'Best val Acc: {0.9:4f}')",
         {"train_loss": 0.1, "accuracy": 0.2, "val_loss": 0.2, "val_accuracy": 0.4, "best_val_accuracy": 0.9}),
        ("for epoch in range(2):\n    print(f'[Train] Epoch: {epoch} | Loss: {losses[\"train\"]:.4f}')\n"
         "    print(f'[Valid] Epoch: {epoch} | Loss: {losses[\"val\"]:.4f}')",
         {"loss": 0.1, "val_loss": 0.2}),
        ("for epoch in range(2):\n"
         "    print(f'(val) loss={losses[\"val\"]}')\n    print(f'(train) loss={losses[\"train\"]}')",
         {"val_loss": 0.2, "loss": 0.1}),
        ("def show(split, loss):\n    print('%s: loss %.3f' % (split.upper(), loss))\n"
         "show('train', 0.1)\nshow('val', loss=0.2)",
         {"loss": 0.1, "val_loss": 0.2}),
        ("for name, loss in (('train', 0.1), ('val', 0.2)):\n"
         "    print('{} loss: {:.3f}'.format(name.capitalize(), loss))",
         {"train_loss": 0.1, "val_loss": 0.2}),
        ("for training in (True, False):\n"
         "    print(f'{\"train\" if training else \"val\"} loss {0.1 if training else 0.2:.2e}')",
         {"train_loss": 0.1, "val_loss": 0.2}),
        ("logging.info('train | loss %.3f', 0.1)\nlogging.info('val | loss %.3f', 0.2)",
         {"loss": 0.1, "val_loss": 0.2}),
        ("print(f'Loss: {1.25e-5:.3E}')\nprint(f'samples | perplexity: {12345.6:,.1f}')",
         {"loss": 1.25e-5, "perplexity": 12345.6}),
        ("print(f'val acc: {93.21:.2f}% (loss {0.1:.2f})')\nprint(f'test acc: {0.5:.1%}')",
         {"val_accuracy_percent": 93.21, "val_loss": 0.1, "test_accuracy_percent": 50}),
    ],
)  # fmt: skip
def test_each_phase_has_its_own_expression_and_sample(code, metrics, folder, monkeypatch):
    script = read(folder, LOSSES + code)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        handler = logging.StreamHandler(printed)
        handler.setFormatter(logging.Formatter("INFO:%(message)s"))
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
        exec(LOSSES + code, {})
    reader = OutputReader({metric.name: metric.pattern for metric in script.metrics})
    values = {}
    for line in printed.getvalue().splitlines():
        for report, _ in reader.reports(line):
            values |= report
    assert values | next(iter(reader.rest()), ({}, 0))[0] == metrics
    assert [metric.name for metric in script.metrics] == list(metrics)
    for metric in script.metrics:
        assert metric.value in metric.sample and not metric.is_mixed
        assert ("%" in metric.pattern.rpartition(")")[2]) == ("percent" in metric.name)
    _, out, _ = raypar("init", "train.py", "--output", "-")
    assert 'metric_chosen_by="raypar init"' in out


@pytest.mark.parametrize(
    "code",
    [
        "def train():\n    print(f'loss: {loss:.3f}')\ndef evaluate():\n    print(f'loss: {loss:.3f}')\ntrain()",
        "phase = sys.argv[1]\nprint(f'{phase} loss: {loss:.3f}')",
    ],
)
def test_phases_with_the_same_words_are_noted(code, folder):
    assert read(folder, code).metrics[0].is_mixed
    assert "note: loss (line 2): other lines print the same words" in raypar("init", "train.py")[1]


@pytest.mark.parametrize(
    ("code", "is_printed"),
    [
        ("print(f'Epoch {epoch + 1}/{num} loss: {loss:.3f}')", True),
        ("print('epoch:', epoch, 'loss:', loss)", True),
        ("print(f'loss: {loss:.3f} per epoch')", False),
    ],
)
def test_a_printed_epoch_number_is_read(code, is_printed, folder):
    assert bool(read(folder, code).epoch_pattern) == is_printed
    raypar("init", "train.py")
    metrics = load_study(folder / "train_study.py").study.workload.command.metrics
    assert ("epoch" in metrics) == is_printed and "loss" in metrics


# ---- options


def options_of(script):
    return {option.flag or option.name: option.default for option in script.options if not option.is_switch}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("parser.add_argument('-b', '--batch-size', default=2**6)", {"--batch-size": 64}),
        ("LR = 1e-3 / 2\nparser.add_argument('--lr', type=float, default=LR)", {"--lr": 5e-4}),
        ("parser.add_argument('--n', type=int, default=len(x))", {"--n": None}),
        ("parser.add_argument('--no-cuda', action='store_true')", {}),
        ("parser.add_argument('path')", {"path": None}),
        ("parser.add_argument('--n', default=10**10**10)", {"--n": None}),
    ],
)
def test_options_of_argparse_have_the_defaults_in_the_code(text, options, folder):
    script = read(folder, f"import argparse\nparser = argparse.ArgumentParser()\n{text}\nargs = parser.parse_args()\n")
    assert options_of(script) == options


def test_the_subcommand_that_trains_is_chosen(folder):
    script = read(
        folder,
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--seed', type=int, default=0)\n"
        "commands = parser.add_subparsers()\nexport = commands.add_parser('export')\n"
        "export.add_argument('--format', default='onnx')\n"
        "train = commands.add_parser('train')\ntrain.add_argument('--lr', type=float, default=0.1)\n",
    )
    assert (script.subcommand, options_of(script)) == ("train", {"--seed": 0, "--lr": 0.1})


@pytest.mark.parametrize(
    "text",
    [
        "import hydra\n\n@hydra.main(config_path='conf')\ndef main(cfg):\n"
        "    fit(cfg.optimizer.lr, cfg.data.path.split(), cfg.keys())\nmain()",
        "from omegaconf import OmegaConf\ncfg = OmegaConf.merge(base, OmegaConf.from_cli())\n"
        "print(cfg.optimizer.lr, cfg.optimizer, cfg.data.path)",
    ],
)
def test_the_keys_of_a_config_are_overrides(text, folder):
    script = read(folder, text)
    assert options_of(script) == {"optimizer.lr=": None, "data.path=": None}
    assert raypar("init", "train.py")[0] == 0
    assert "# optimizer.lr={optimizer_lr}." in (folder / "train_study.py").read_text()
    assert load_study(folder / "train_study.py").study.workload.command.filled({}) == ("python", "train.py")


def test_the_file_explains_options_of_other_parsers(folder):
    (folder / "train.py").write_text("import click\n@click.command()\n@click.option('--lr')\ndef main(lr): ...\nmain()")
    _, out, _ = raypar("init", "train.py")
    assert "note: options of click are not recognised" in out
    assert "# Options of click are not recognised" in (folder / "train_study.py").read_text()


# ---- kinds


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("import torch.distributed as dist\ndist.init_process_group()", ScriptKind.TORCHRUN),
        ("import os\nos.environ['LOCAL_RANK']", ScriptKind.TORCHRUN),
        ("from accelerate import Accelerator\nAccelerator()", ScriptKind.TORCHRUN),
        (
            "import torch.distributed as dist, torch.multiprocessing as mp\ndist.init_process_group()\nmp.spawn(main)",
            ScriptKind.PLAIN,
        ),
        ("from lightning.pytorch import Trainer\nTrainer().fit(1)", ScriptKind.LIGHTNING),
        ("from transformers import Seq2SeqTrainer\nSeq2SeqTrainer()", ScriptKind.HUGGING_FACE),
        ("from ray import train\ndef loop(config):\n    train.report({'loss': 1})", ScriptKind.TRAIN_LOOP),
        ("from torch import nn\nclass Net(nn.Module): ...\nloss.backward()", ScriptKind.PLAIN),
        ("print(1)", ScriptKind.PLAIN),
    ],
)  # fmt: skip
def test_the_kind_of_a_script_follows_from_its_calls(text, kind, folder):
    assert read(folder, text).kind is kind


def test_a_script_that_trains_on_import_is_refused(folder):
    text = (SCRIPTS / "ray_script.py").read_text().replace('if __name__ == "__main__":', "if True:")
    (folder / "train.py").write_text(text)
    refused("train.py, line 21: runs on import", "init", "train.py")


# ---- the written study


@pytest.mark.parametrize("name", sorted(path.stem for path in SCRIPTS.glob("*.py")))
def test_the_study_of_a_script_loads_or_asks_for_missing_values(name, folder):
    shutil.copy(SCRIPTS / f"{name}.py", folder)
    code, out, err = raypar("init", f"{name}.py")
    num_metrics = sum(" in: " in line for line in out.splitlines())
    assert (code, err) == (0, "") and 3 <= len(out.splitlines()) - num_metrics <= 7
    assert f"raypar study {name}_study.py" in out
    if "fill in" in out:
        missing = out.split("fill in ")[1].split(", then")[0].replace(" and ", ", ").split(", ")
        _, _, refusal = raypar("plan", f"{name}_study.py")
        assert missing and all(f"{option} = None" in refusal for option in missing)
        return
    study = load_study(folder / f"{name}_study.py").study
    assert question_of(study).text.endswith("?")
    assert len(study.points()) == 2 and study.baseline
    assert all(validate(trial.config, study.workload) == [] for trial in study.trials())


def test_the_documentation_shows_the_output(folder):
    docs = (SCRIPTS.parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(torchrun_script.py: .*?)^```", docs, re.MULTILINE | re.DOTALL)
    shutil.copy(SCRIPTS / "torchrun_script.py", folder)
    assert raypar("init", "torchrun_script.py")[1] == shown


def test_the_question_follows_from_the_swept_options(folder):
    options = "".join(f"p.add_argument('--{name}', type=int, default=8)\n" for name in ("epochs", "bs"))
    (folder / "train.py").write_text(f"import argparse\np = argparse.ArgumentParser()\n{options}p.parse_args()\n")
    raypar("init", "train.py")
    questions = {
        (): "What does bs change for train.py?",
        ("bs=8,64",): "What does bs change for train.py?",
        ("bs=8,64", "epochs=1,2"): "What does bs change for train.py?",  # only bs is compared with a baseline
        ("cpus_per_worker=1,2", "bs=8"): "Do more cores pay off for train.py?",
    }
    for settings, question in questions.items():
        sets = [word for setting in settings for word in ("--set", setting)]
        code, out, _ = raypar("plan", "train_study.py", *sets)
        assert code == 0 and out.startswith(question), out


@pytest.mark.parametrize(
    ("space", "baseline", "question"),
    [
        ({"num_workers": grid(1, 2)}, {"num_workers": 1}, "Does a second worker pay off for digits?"),
        (
            {"num_workers": grid(1, 2, 4), "lr": grid(0.1, 0.2)},
            {"num_workers": 1},
            "Do more workers pay off for digits?",
        ),
        ({"batch_size": grid(16, 64), "lr": uniform(0.1, 0.2)}, {}, "What do batch_size and lr change for digits?"),
        ({"lr": grid(0.1)}, {}, ""),
        ({}, {}, ""),
    ],
)
def test_a_study_without_a_docstring_asks_about_its_comparison(space, baseline, question):
    study = Study(workload=digits, name="s", space=space, baseline=baseline)
    assert question_of(study).text == question
    own = Study(workload=digits, name="s", space=space, baseline=baseline, description="Is it fast? Maybe.")
    assert question_of(own).text == "Is it fast?"


def test_the_study_is_written_beside_the_script_and_replaces_no_file_without_force(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "my train.py").write_text("print(f'loss {1}')")
    assert raypar("init", "sub/my train.py")[0] == 0
    path = folder / "sub" / "my train_study.py"
    command = load_study(path).study.workload.command
    assert command.filled({}) == ("python", "my train.py")
    path.write_text("mine")
    refused("my train_study.py: already exists", "init", "sub/my train.py")
    assert path.read_text() == "mine"
    assert raypar("init", "sub/my train.py", "--force")[0] == 0 and path.read_text() != "mine"


def test_from_another_folder_the_command_names_the_scripts_path(folder):
    (folder / "src").mkdir()
    (folder / "src" / "train.py").write_text("print(1)")
    assert raypar("init", "src/train.py", "-o", "study.py")[0] == 0
    assert load_study(folder / "study.py").study.workload.command.filled({}) == ("python", "src/train.py")


def test_the_study_of_an_imported_script_must_be_beside_it(folder):
    (folder / "src").mkdir()
    shutil.copy(SCRIPTS / "ray_script.py", folder / "src")
    refused("imports the script and must be in the same folder", "init", "src/ray_script.py", "--output", "s.py")
    assert raypar("init", "src/ray_script.py", "--output", "src/s.py")[0] == 0


def test_a_train_loop_in_a_file_with_any_name_is_imported(folder):
    (folder / "my-loop.py").write_text(
        "from ray import train\nLR = 1e-3\ndef loop(config):\n"
        "    for epoch in range(config['epochs']):\n        train.report({'loss': config.get('lr', LR)})\n"
    )
    assert raypar("init", "my-loop.py")[0] == 0
    study = load_study(folder / "my-loop_study.py").study
    config = study.trials()[0].config
    assert (config["epochs"], config["lr"], study.workload.metric) == (2, 1e-3, "loss")


def test_without_a_script_a_starter_study_is_written(folder):
    code, out, _ = raypar("init")
    assert code == 0 and "raypar study first_study.py" in out
    assert len(load_study(folder / "first_study.py").study.points()) == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "absent.py: there is no such file"),
        ("notes.txt", "x", "notes.txt: is not a Python file"),
        ("train.py", "def (", "train.py, line 1: syntax error"),
        ("train.py", "x = '\0'", "null bytes"),
        ("model.py", "from torch import nn\nclass Net(nn.Module): ...", "only defines functions and classes"),
        (".", None, "is a folder, not a script"),
    ],
)
def test_other_files_than_scripts_are_refused(name, text, message, folder):
    if text is not None:
        (folder / name).write_text(text)
    refused(message, "init", name)
    assert not list(folder.glob("*_study.py"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("study.txt", "must end in .py"),
        ("nowhere/s.py", "nowhere/s.py"),
        ("train.py", "is the script itself"),
    ],
)
def test_an_invalid_output_is_refused(output, message, folder):
    (folder / "train.py").write_text("print(1)")
    refused(message, "init", "train.py", "--output", output, "--force")
    assert (folder / "train.py").read_text() == "print(1)"
