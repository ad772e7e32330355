"""Scripts that other projects publish, run unchanged and observed: steps, samples, parts and losses of each.

``--repositories FOLDER`` has checkouts of pytorch/examples, karpathy/nanoGPT, karpathy/minGPT,
Lightning-AI/pytorch-lightning, huggingface/accelerate and huggingface/pytorch-image-models, in folders named
``examples``, ``nanoGPT`` and so on. ``--packages FOLDER`` has what some of them import and this environment lacks:
``pip install --no-deps --target FOLDER lightning pytorch-lightning lightning-utilities torchmetrics fsspec
jsonargparse docstring-parser typeshed-client accelerate timm``. Data are random images and texts.

A script that fails without the observer as well is skipped.

``--forks`` runs each script as three trials instead: twice in new processes, and once in a fork of a process that has
imported torch and the script's packages. Its losses, or else its numbers of steps, must be those of the new processes,
as far as these agree with each other.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import begin, parser_for, print_bar, print_row, scratch

from raypar import Study, Workload, observe
from raypar.observe.ranks import RankSteps, read_ranks
from raypar.provenance import source_files
from raypar.run.local import LocalRunner
from raypar.run.runner import Event, TrialEnded
from raypar.study.trial import TrialResult
from raypar.train.affinity import host_cores
from raypar.train.job import RunSettings

MIN_OBSERVED, MIN_SCRIPTS = 0.9, 10
LIMIT_S = 300.0
MIN_STEPS = 10

Prepare = Callable[[Path], None]  # writes data; of the folder in which the script runs


def _mnist(where: str, num_images: int = 3000) -> Prepare:
    """Write random images and labels as MNIST's files to a folder, relative to that of the script."""

    def write(folder: Path) -> None:
        target, draw = folder / where / "MNIST" / "raw", random.Random(0)
        target.mkdir(parents=True, exist_ok=True)
        for split, num in (("train", num_images), ("t10k", 1000)):
            length, side = num.to_bytes(4, "big"), (28).to_bytes(4, "big")
            images = b"\0\0\x08\x03" + length + side + side + draw.randbytes(num * 28 * 28)
            labels = b"\0\0\x08\x01" + length + bytes(byte % 10 for byte in draw.randbytes(num))
            (target / f"{split}-images-idx3-ubyte").write_bytes(images)
            (target / f"{split}-labels-idx1-ubyte").write_bytes(labels)

    return write


def _tokens(folder: Path) -> None:
    """Write random characters as nanoGPT's prepared data."""
    draw = random.Random(0)
    for name in ("train", "val"):
        data = b"".join(draw.randrange(65).to_bytes(2, "little") for _ in range(100_000))
        (folder / "data" / "shakespeare_char" / f"{name}.bin").write_bytes(data)


def _words(folder: Path) -> None:
    """Write random words as the corpus of pytorch's word language model."""
    draw = random.Random(0)
    target = folder / "data" / "wikitext-2"
    target.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        lines = (" ".join(f"w{draw.randrange(200)}" for _ in range(20)) for _ in range(2000))
        (target / f"{name}.txt").write_text("\n".join(lines))


def _image_folders(folder: Path) -> None:
    """Write random images in a folder for each class."""
    from PIL import Image

    draw = random.Random(0)
    for split, num in (("train", 800), ("validation", 50)):
        for i in range(num):
            path = folder / "images" / split / str(i % 10) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("RGB", (32, 32), draw.randbytes(32 * 32 * 3)).save(path)


@dataclass(frozen=True)
class Foreign:
    """Script of another project.

    Attributes:
        repository: name of its folder.
        folder: where it runs, relative to the repository.
        command: words after the interpreter.
        prepare: functions that write its data.
        path: folders of the repository to import from, relative to it.
    """

    repository: str
    folder: str
    command: str
    prepare: tuple[Prepare, ...] = ()
    path: tuple[str, ...] = ()


SCRIPTS = {
    "image classifier": Foreign("examples", "mnist", "main.py --epochs 1 --no-accel", (_mnist("../data"),)),
    "variational autoencoder": Foreign(
        "examples", "vae", "main.py --epochs 1 --no-accel --batch-size 64", (_mnist("../data"),)
    ),
    "recurrent classifier": Foreign("examples", "mnist_rnn", "main.py --epochs 1", (_mnist("../data"),)),
    "siamese network": Foreign("examples", "siamese_network", "main.py --epochs 1 --no-accel", (_mnist("../data"),)),
    "generative adversarial network": Foreign(
        "examples", "dcgan", "main.py --dataset fake --niter 1 --batchSize 16 --ngf 16 --ndf 16 --workers 1"
    ),
    "regression": Foreign("examples", "regression", "main.py"),
    "word language model": Foreign(
        "examples",
        "word_language_model",
        "main.py --epochs 1 --emsize 64 --nhid 64 --bptt 20 --batch_size 20",
        (_words,),
    ),
    "nanoGPT": Foreign(
        "nanoGPT",
        "",
        "train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=2 --log_interval=10 "
        "--block_size=32 --batch_size=8 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=60 --eval_interval=30",
        (_tokens,),
    ),
    "minGPT": Foreign("minGPT", "projects/adder", "adder.py --trainer.max_iters=60", path=("",)),
    "Lightning autoencoder": Foreign(
        "pytorch-lightning",
        "examples/pytorch/basics",
        "autoencoder.py --trainer.max_steps=60 --trainer.accelerator=cpu --trainer.logger=False",
        (_mnist("data"), _mnist("../../Datasets", 60_000)),  # its own, and that of the demos that it imports
    ),
    "Fabric classifier": Foreign(
        "pytorch-lightning",
        "examples/fabric/image_classifier",
        "train_fabric.py --epochs 1",
        (_mnist("../../../Datasets"),),
    ),
    "accelerate": Foreign("accelerate", "", "src/accelerate/test_utils/scripts/test_script.py", path=("src",)),
    "timm": Foreign(
        "pytorch-image-models",
        "",
        "train.py --data-dir images --model resnet10t --num-classes 10 --img-size 32 --batch-size 16 --epochs 1 "
        "--workers 1 --device cpu",
        (_image_folders,),
        path=("",),
    ),
}


@contextlib.contextmanager
def copied(script: Foreign, source: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Copy a script's repository with its data; return the folder in which it runs, and its environment.

    Args:
        source: checkout of its repository.
    """
    with scratch() as copy:
        repository = copy / script.repository
        shutil.copytree(source, repository, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        folder = repository / script.folder
        for prepare in script.prepare:
            prepare(folder)
        paths = [*(str(repository / each) for each in script.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        yield folder, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(script: Foreign, source: Path, events: Path | None) -> str:
    """Run a fresh copy of a script, and return why it failed; empty: it didn't.

    Args:
        source: checkout of its repository.
        events: folder for the observer's events; None: it is not observed.
    """
    with copied(script, source) as (folder, environment):
        if events is not None:
            environment |= observe.environment(events, environment, {})
        command = [sys.executable, *shlex.split(script.command)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {LIMIT_S:.0f} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return f"exit code {done.returncode}: {lines[-1][:150]}" if done.returncode else ""


def trial(script: Foreign, source: Path, *, fresh: bool) -> TrialResult:
    """Run a fresh copy of a script as a trial.

    Args:
        source: checkout of its repository.
        fresh: in a new process.
    """
    with copied(script, source) as (folder, environment), scratch() as logs:
        os.environ["PYTHONPATH"] = environment["PYTHONPATH"]
        command = ["python", *shlex.split(script.command)]
        workload = Workload.from_command(
            [word.replace("{", "{{").replace("}", "}}") for word in command], fresh_process=fresh
        )
        study = Study(workload=workload, name="foreign", num_repeats=1, max_retries=0)
        study_file = folder / "raypar_study.py"
        study_file.write_text("")
        packages = source_files(study_file, "", [command[1]]).packages
        settings = RunSettings(
            logs, sys_path=(str(folder),), preload=packages, is_command=True, trial_timeout_s=LIMIT_S
        )
        results: list[TrialResult] = []

        def listen(event: Event) -> None:
            if isinstance(event, TrialEnded):
                results.append(event.result)

        with LocalRunner(settings, host_cores()) as runner:
            runner.run(study, study.trials(), listen)
        (result,) = results
        return result


def losses_of(result: TrialResult) -> list[tuple[object, ...]]:
    """Return the observed losses of each rank."""
    return [each.losses for each in (result.observation.ranks if result.observation else ())]


def steps_of(result: TrialResult) -> list[tuple[object, ...]]:
    """Return what was observed of each rank that doesn't depend on generators."""
    ranks = result.observation.ranks if result.observation else ()
    return [(each.num_steps, each.counted_by, each.samples_per_step) for each in ranks]


def compare(title: str, script: Foreign, source: Path) -> bool | None:
    """Compare a fork with two new processes; return whether it agrees with them, or None if they fail or differ."""
    inherited = os.environ.get("PYTHONPATH", "")
    new, again, fork = (trial(script, source, fresh=fresh) for fresh in (True, True, False))
    os.environ["PYTHONPATH"] = inherited
    failures = [each.failure.message.splitlines()[0] if each.failure else "" for each in (new, again, fork)]
    if failures[0] or failures[1]:
        print_row(title, f"skipped: fails in a new process: {failures[0] or failures[1]}")
        return None
    beyond_s = [(each.wall_s or 0) - (each.train_time_s or 0) - (each.eval_time_s or 0) for each in (new, fork)]
    outcome, agrees = "runs (new processes differ in their steps)", True
    for what, trait in (("losses", losses_of), ("steps", steps_of)):
        if trait(new) == trait(again):
            agrees = trait(new) == trait(fork)
            outcome = f"{'same' if agrees else 'OTHER'} {what}"
            break
    outcome = failures[2] or outcome
    print_row(title, f"{outcome}; beyond steps and evaluations {beyond_s[1]:.1f} s instead of {beyond_s[0]:.1f} s")
    return agrees and not failures[2]


def is_observed(ranks: Sequence[RankSteps]) -> bool:
    """Return whether a script's steps, their parts and losses are known, without any problem."""
    return bool(ranks) and all(
        rank.num_steps >= MIN_STEPS and rank.breakdown.step_s > 0 and rank.losses and not rank.problems
        for rank in (each.rank for each in ranks)
    )


def described(each: RankSteps) -> str:
    """Return what was observed of a rank."""
    rank = each.rank
    parts = sorted(rank.breakdown.parts.items(), key=lambda entry: -entry[1])[:3]
    shares = ", ".join(f"{name} {seconds / rank.breakdown.step_s:.0%}" for name, seconds in parts)
    texts = (
        f"{rank.num_steps} {rank.counted_by} of {rank.breakdown.step_s * 1e3:.2f} ms ({shares})",
        f"{rank.samples_per_step:.4g} samples, {len(rank.losses)} losses, evaluation {rank.eval_s:.2f} s",
        *rank.problems,
    )
    return "; ".join(texts)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--repositories", type=Path, required=True, metavar="FOLDER", help="folder of the checkouts")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="folder of packages that the scripts import")
    parser.add_argument("--only", choices=SCRIPTS, nargs="+", default=list(SCRIPTS), metavar="SCRIPT")
    parser.add_argument("--forks", action="store_true", help="compare forks with new processes")
    args = parser.parse_args()
    for folder in filter(None, (args.repositories, args.packages)):
        if not folder.is_dir():
            parser.error(f"no such folder: {folder}")
    args = begin(parser)
    if args.packages:
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(args.packages.resolve()), *inherited])
    num_run = num_observed = 0
    for title in args.only[: 1 if args.quick else None]:
        script = SCRIPTS[title]
        source = args.repositories.resolve() / script.repository
        if not source.is_dir():
            print_row(title, f"skipped: no folder {source}")
            continue
        if args.forks:
            if (agrees := compare(title, script, source)) is not None:
                num_run, num_observed = num_run + 1, num_observed + agrees
            continue
        with scratch() as events:
            error = run(script, source, events)
            ranks, why_not = read_ranks(events)
        has_failed = error.startswith("exit code")
        if has_failed and (own_error := run(script, source, None)):
            print_row(title, f"skipped: fails without the observer as well: {own_error}")
            continue
        num_run += 1
        num_observed += is_observed(ranks) and not has_failed
        for each in ranks:
            print_row(title, described(each))
        if error or not ranks:
            print_row(title, "; ".join(filter(None, [error, why_not and f"not observed: {why_not}"])))
    print_bar("scripts that run", num_run, "{:.0f}".format, at_least=MIN_SCRIPTS)
    share = num_observed / num_run if num_run else 0.0
    if args.forks:
        print_bar("of these, forks that agree with new processes", share, "{:.0%}".format, at_least=1.0)
        return
    print_bar("of these, run and observed", share, "{:.0%}".format, at_least=MIN_OBSERVED)


if __name__ == "__main__":
    main()
