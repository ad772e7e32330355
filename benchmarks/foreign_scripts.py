"""Scripts that other projects publish, run unchanged and observed: steps, samples, parts and losses of each.

``--repositories FOLDER`` has checkouts of pytorch/examples, karpathy/nanoGPT, karpathy/minGPT,
Lightning-AI/pytorch-lightning, huggingface/accelerate and huggingface/pytorch-image-models, in folders named
``examples``, ``nanoGPT`` and so on. ``--packages FOLDER`` has what some of them import and this environment lacks:
``pip install --no-deps --target FOLDER lightning pytorch-lightning lightning-utilities torchmetrics fsspec
jsonargparse docstring-parser typeshed-client accelerate timm``. Data are random images and texts.

A script that fails without the observer as well is skipped.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import begin, parser_for, print_bar, print_row, scratch

from raypar import observe
from raypar.observe.ranks import RankSteps, read_ranks

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


def run(script: Foreign, source: Path, events: Path | None) -> str:
    """Run a fresh copy of a script, and return why it failed; empty: it didn't.

    Args:
        source: checkout of its repository.
        events: folder for the observer's events; None: it is not observed.
    """
    with scratch() as copy:
        repository = copy / script.repository
        shutil.copytree(source, repository, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        folder = repository / script.folder
        for prepare in script.prepare:
            prepare(folder)
        paths = [*(str(repository / each) for each in script.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
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
    print_bar("of these, run and observed", share, "{:.0%}".format, at_least=MIN_OBSERVED)


if __name__ == "__main__":
    main()
