"""The table of bad input: study files, studies, flags and environments, with words that the one message has to hold."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nothing_starts import NOWHERE

HEAD = """
from raypar import Option, Study, Workload, choice, grid, loguniform, randint, uniform
from raypar.workloads import digits, mnist_mlp
"""
GOOD = HEAD + 'study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1)\n'


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        arguments: of `raypar`.
        words: what the message has to hold.
        files: what is in the folder, beside a fine ``good.py``.
        environment: variables, beside those that there are.
        setup: makes in the folder what a text can't.
        out: how standard output begins; nothing but the study file itself may write there.
    """

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Callable[[Path], object] | None = None
    out: str = ""


def flags(name: str, command: str, *words: str, **variables: str) -> Case:
    return Case(name, tuple(command.split()), words, environment=variables)


def source(name: str, text: str | bytes, *words: str, out: str = "") -> Case:
    """A bad study file."""
    return Case(name, ("plan", "bad.py"), ("bad.py", *words), {"bad.py": text}, out=out)


def study(name: str, fields: str, *words: str, before: str = "") -> Case:
    """A bad study in a file that is fine otherwise."""
    given = fields if "workload=" in fields else f"workload=digits, {fields}"
    return source(name, f"{HEAD}{before}\nstudy = Study({given})\n", *words)


def at(name: str, make: Callable[[Path], object], *words: str, path: str = "bad.py") -> Case:
    """A path that is no file."""
    return Case(name, ("plan", path), (path, *words), setup=make)


def _socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(folder)  # a socket's address is short
        try:
            made.bind("bad.py")
        finally:
            os.chdir(here)


def _loop(folder: Path) -> None:
    (folder / "bad.py").symlink_to("other.py")
    (folder / "other.py").symlink_to("bad.py")


STUDY_FILES = (
    flags("no such file", "study god.py", "god.py", "no such file", "did you mean good.py?"),
    flags("no such folder", "study nowhere/good.py", "nowhere/good.py", "there is no folder nowhere"),
    flags("no suffix", "plan good", "good: there is no such file", "did you mean good.py?"),
    flags("a folder", "study .", "is a folder", "good.py"),
    Case("no Python file", ("plan", "study.txt"), ("study.txt", "not a Python file", ".py"), {"study.txt": GOOD}),
    flags("a path of a file's name below a file", "plan good.py/bad.py", "good.py/bad.py", "no folder good.py"),
    flags("a name that is too long", f"plan {'x' * 300}.py", "xxx.py", "can't be read: File name too long"),
    flags("an empty name", "plan " + "\N{NO-BREAK SPACE}.py", "no such file"),
    at("a folder that ends in .py", lambda folder: (folder / "bad.py").mkdir(), "is a folder"),
    at("a FIFO", lambda folder: os.mkfifo(folder / "bad.py"), "is no regular file", "a study file"),
    at("a socket", _socket, "is no regular file"),
    at("a device", lambda folder: (folder / "bad.py").symlink_to("/dev/full"), "is no regular file"),
    at("a link to nowhere", lambda folder: (folder / "bad.py").symlink_to("gone.py"), "no such file"),
    at("links in a circle", _loop, "can't be read", "links"),
    source("an empty file", "", "defines no Study", "study = Study("),
    source("a syntax error", "x = (\n", "line 1", "syntax error", "'(' was never closed"),
    source("a syntax error after a long line", f"x = {'1 + ' * 1000}\n", "line 1", "syntax error"),
    source("tabs and spaces", "if 1:\n\tx = 1\n        y = 2\n", "line 3", "tabs"),
    source("not UTF-8", b"# caf\xe9\nx = 1\n", "line 1", "byte 0xe9 is not UTF-8", "save the file as UTF-8"),
    source("UTF-16", GOOD.encode("utf-16"), "line 1", "is not UTF-8"),
    source("a null byte", b"x = 1\0\n", "null bytes"),
    source("nested too deeply", f"x = {'-' * 100_000}1\n", "nested too deeply"),
    source("many brackets", f"x = {'(' * 1000}\n", "syntax error", "too many nested"),
    source("endless recursion", "def f(): f()\nf()\n", "RecursionError", "line 1"),
    source("sys.exit", "import sys\nsys.exit(3)\n", "line 2", "SystemExit: 3", "leave sys.exit() out"),
    source("an exception", "x = 1 / 0\n", "line 1", "ZeroDivisionError", "fix that line"),
    source("an exception without a text", "raise BaseException\n", "line 1", "BaseException"),
    source(
        "an exception that can't be shown",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E\n",
        "line 3",
        "str() failed",
    ),
    source("a long exception", "assert False, 'x' * 5000\n", "line 1", "AssertionError", " … "),
    source("a module that is missing", "import nowhere_to_be\n", "line 1", "install nowhere_to_be", "spelling"),
    source("a name that raypar lacks", "from raypar import Studdy\n", "line 1", "did you mean 'Study'?"),
    source("a workload that there is not", "from raypar.workloads import digit\n", "did you mean 'digits'?"),
    source("no study", GOOD.replace("study = Study", "asked = dict"), "defines no Study"),
    source("a list of studies", GOOD + "study = [study]\n", "is a list, not a Study"),
    source("the class itself", HEAD + "study = Study\n", "is a type, not a Study"),
    source("two studies", GOOD.replace("study = ", "one = ") + "two = Study(workload=digits)\n", "one, two", "`study`"),
    source("no workload", HEAD + "study = Study()\n", "line 4", "workload", "raypar.workloads"),
    source("a workload by position", HEAD + "study = Study(digits)\n", "line 4", "positional"),
    source("prints", "print('hello')\n" + HEAD + "study = Study(workload=digits, seed=-1)\n", "seed", out="hello\n"),
    source("goes elsewhere", "import os\nos.chdir('/')\n" + GOOD.replace("0.2", "0.1"), "duplicate values: 0.1"),
    Case(
        "a syntax error in a module beside it",
        ("plan", "bad.py"),
        ("helper_of_bad.py", "line 2", "syntax error"),
        {"bad.py": "import helper_of_bad\n", "helper_of_bad.py": "\nx = = 1\n"},
    ),
    flags("no close name", "plan zzzzzz.py", "no such file", "holds: good.py, mnist.py"),
    source("return outside of a function", "\n\nreturn 1\n", "line 3", "syntax error", "return 1"),
    source("a name that is not defined", "study = Study()\n", "line 1", "NameError", "'Study' is not defined"),
    source("a module that raypar lacks", "from raypar.workload import digits\n", "line 1", "check the spelling"),
)

STUDIES = (
    study("a workload's name", "workload='digits'", "workload = 'digits'", "is a str, not a Workload"),
    study("a workload of nothing", "workload=None", "workload = None", "raypar.Workload"),
    study("a field that there is not", "repeats=1", "line 5", "repeats", "did you mean 'num_repeats'?"),
    study("a hyperparameter as a field", "momentum=1", "momentum", "config={...}"),
    study("no repeats", "num_repeats=0", "num_repeats = 0", "at least 1"),
    study("half a repeat", "num_repeats=1.5", "num_repeats = 1.5", "whole number"),
    study("true repeats", "num_repeats=True", "num_repeats = True", "whole number"),
    study("endless repeats", "num_repeats=10**30", "num_repeats = 1000000000000000000", "more than 100,000"),
    study("many trials", "num_repeats=100_000, space={'lr': grid(1., 2.)}", "200,000 trials of 2 points"),
    study("a name that is a path", "name='../up'", "name = '../up'", "choose another name"),
    study("a number as a name", "name=5", "name = 5", "must be text, not int", "quotes"),
    study("a long name", "name='x' * 300", "longer than 150 characters"),
    study("a seed below 0", "seed=-1", "seed = -1", "from 0 to 4294967295"),
    study("a seed of 64 bits", "seed=2**63", "seed = 9223372036854775808", "from 0 to 4294967295"),
    study("a price of NaN", "price_per_node_hour=float('nan')", "price_per_node_hour = nan", "greater than 0"),
    study("an odd mode", "mode='most'", "mode = 'most'", '"max" or "min"'),
    study("a searcher's name", "searcher='random'", "searcher = 'random'", "is a str", "OptunaSearch()"),
    study("a scheduler's class", "scheduler=int", "scheduler = <class 'int'>", "ASHAScheduler()"),
    study("a space of a list", "space=[1]", "space = [1]", "must be a dict"),
    study("a key that is no text", "space={1: grid(1)}", "space[1]", "must be text, not int", "'1'"),
    study("an unknown key", "config={'batchsize': 3}", "config['batchsize'] = 3", "did you mean 'batch_size'?"),
    study("an unknown key in the space", "space={'epoch': grid(1)}", "space['epoch']", "did you mean 'epochs'?"),
    study("an empty grid", "space={'lr': grid()}", "space['lr'] = Grid(values=())", "at least one value"),
    study("a grid of a list", "space={'lr': grid([0.1, 0.2])}", "space['lr'] = [0.1, 0.2]", "of type float, not list"),
    study("a list for a grid", "space={'lr': [0.1, 0.2]}", "space['lr'] = [0.1, 0.2]", "write grid(0.1, 0.2)"),
    study("duplicate values", "space={'lr': grid(0.1, 0.2, 0.1)}", "space['lr']", "duplicate values: 0.1"),
    study(
        "duplicates of numpy", "space={'lr': grid(*np.ones(2))}", "duplicate values: 1.0", before="import numpy as np"
    ),
    study("an array", "space={'lr': grid(np.ones(2))}", "of type float, not ndarray", before="import numpy as np"),
    study("a million values", "space={'epochs': grid(*range(1, 10**6))}", "999,999 values", "randint(low, high)"),
    study(
        "a million points",
        "space={'epochs': grid(*range(1, 1001)), 'hidden_size': grid(*range(1, 1001))}",
        "space = '1,000,000 points'",
        "more than 100,000",
    ),
    study("a range backwards", "space={'lr': uniform(1, 0)}", "Uniform(low=1, high=0)", "low < high"),
    study("a range of text", "space={'lr': uniform('a', 1)}", "needs two numbers, has 'a' and 1"),
    study("a range of truths", "space={'lr': uniform(False, True)}", "needs two numbers"),
    study("a logarithmic range from 0", "space={'lr': loguniform(0, 1)}", "needs 0 < low < high"),
    study("half an integer", "space={'epochs': randint(1.5, 3)}", "needs two whole numbers, has 1.5 and 3"),
    study("an endless range", "space={'lr': uniform(0.1, float('inf'))}", "needs two numbers, has 0.1 and inf"),
    study("a value that is swept", "space={'lr': grid(1.)}, config={'lr': 2.}", "config['lr'] = 2.0", "also swept"),
    study("a grid as a value", "config={'lr': grid(1., 2.)}", "config['lr'] = Grid(values=(1.0, 2.0))", "put it into"),
    study("text for a number", "config={'lr': 'fast'}", "config['lr'] = 'fast'", "of type float, not str"),
    study("NaN", "config={'lr': float('nan')}", "config['lr'] = nan", "learning rate"),
    study("infinity", "config={'lr': float('inf')}", "config['lr'] = inf", "greater than 0"),
    study("a truth for a count", "config={'epochs': True}", "config['epochs'] = True", "of type int, not bool"),
    study("a float for a count", "config={'num_workers': 2.0}", "config['num_workers'] = 2.0", "int, not float"),
    study("a huge count", "config={'epochs': 10**400}", "config['epochs'] = 1000", "…", "beyond 2^53"),
    study("a number without digits", "config={'epochs': 10**5000}", "config['epochs'] = <int>", "beyond 2^53"),
    study("an unknown optimizer", "config={'optimizer': 'sdg'}", "config['optimizer'] = 'sdg'", "did you mean 'sgd'?"),
    study("cores as a list", "config={'cpu_affinity': [0]}", "config['cpu_affinity'] = [0]", "not a list"),
    study("cores in odd digits", "config={'cpu_affinity': '²'}", "config['cpu_affinity'] = '²'", "write a count"),
    study("too many cores to list", "config={'cpu_affinity': '0-99999999999'}", "no machine has 1,000,000 cores"),
    study("more cores than there are", "config={'cpus_per_worker': 10**6}", "CPUs in one gang", "the cluster has"),
    study("a device that is not there", "config={'device': 'mps'}", "mps", "device = 'mps'", "--set device=cpu")
    if os.uname().sysname != "Darwin"
    else study("a device that there is not", "config={'device': 'tpu'}", "device'] = 'tpu'", "did you mean"),
    study("a batch above the data", "config={'batch_size': 10**6}", "batch_size = 1000000", "larger than the training"),
    study("a batch below the workers", "config={'batch_size': 1, 'num_workers': 2}", "batch_size = 1", "at least 2"),
    study(
        "a baseline that matches nothing", "space={'lr': grid(1.)}, baseline={'lr': 2.}", "baseline['lr'] = 2.0", "1.0"
    ),
    study("a baseline that is not swept", "baseline={'lr': 2.}", "baseline['lr'] = 2.0", "is not swept"),
    study("a workload without a model", "workload=Workload(name='w')", "workload.model = None", "workload.data = None"),
    study(
        "a workload of wrong types",
        "workload=Workload(name=3, model=len, data=len, options=4, loaders='x', metrics=5, loss=6)",
        *("workload.name = 3", "workload.options = 4", "workload.loaders = 'x'", "workload.metrics = 5"),
        "workload.loss = 6",
    ),
    study(
        "a size that can't be told",
        "workload=Workload(name='w', model=len, data=len, num_train_samples=lambda config: 1 / 0)",
        *("workload.num_train_samples", "ZeroDivisionError"),
    ),
    study(
        "a check that fails",
        "workload=Workload(name='w', model=len, data=len, options={'a': Option(1, int, 'x', lambda v: 1 / 0)}), "
        "config={'a': 2}",
        *("config['a'] = 2", "can't be checked", "ZeroDivisionError"),
    ),
    Case(
        "data that can't be prepared",
        ("plan", "bad.py"),
        ("workload w: prepare raises ZeroDivisionError", "fix that function"),
        {
            "bad.py": HEAD
            + "study = Study(workload=Workload(name='w', model=len, data=len, prepare=lambda config: 1 / 0))\n"
        },
    ),
    study("no train loop", "workload=Workload.from_train_loop(3)", "workload.train_loop = 3", "is no function"),
    study(
        "what can't be kept",
        "workload=Workload.from_train_loop(len), config={'own': {1}}",
        *("config['own'] = {1}", "a set can't be kept"),
    ),
    study(
        "mistakes beside a bad workload",
        "workload='x', num_repeats=-1, config={'epochs': 'many'}, space={'lr': grid()}",
        *("4 mistakes", "workload = 'x'", "num_repeats = -1", "config['epochs'] = 'many'", "space['lr']"),
    ),
    study(
        "what only follows from another mistake",
        "space={'num_worker': grid(1, 2)}, baseline={'num_workers': 1}",
        *("1 mistake in", "did you mean 'num_workers'?"),
    ),
    study(
        "defaults that are none",
        "workload=Workload(name='w', model=len, data=len, options={'width': None}, defaults={'epoch': 3, 'lr': -1.0})",
        "workload.options['width'] = None",
        "its type is the option's",
        "workload.defaults['epoch'] = 3",
        "did you mean 'epochs'?",
        "workload.defaults['lr'] = -1.0",
        "3 mistakes",
    ),
    study(
        "counts below their bounds",
        "max_retries=-1, num_trials=0, max_concurrent_trials=0, price_per_node_hour=0",
        "say max_retries=0",
        "say num_trials=1",
        "say max_concurrent_trials=1",
        "say price_per_node_hour=2.5",
    ),
    study("mappings of other types", "config='lr=0.1', baseline=1", "say config={", "say baseline={"),
    study("a number for a grid", "space={'batch_size': 64}", "space['batch_size'] = 64", "write grid(64)"),
    study("a grid for a searcher", "space={'lr': grid(0.1, 0.2)}, searcher=object()", "write choice(0.1, 0.2)"),
    study("an empty range", "space={'epochs': randint(3, 3)}", "RandInt(low=3, high=3)", "low < high"),
    study(
        "values out of bounds",
        "space={'epochs': grid(0, 1), 'lr': uniform(-0.1, 0.1)}",
        "space['epochs'] = 0",
        "passes over the training set",
        "space['lr'] = -0.1",
    ),
    study("a choice of a wrong type", "space={'epochs': choice(1, 1.5)}", "space['epochs'] = 1.5", "not float"),
    study("no value", "config={'epochs': None}", "config['epochs'] = None", "needs a value", "int, by default 8"),
    study("nothing like an option", "config={'nonsense_at_all': 3}", "unknown option 'nonsense_at_all'", "choose from"),
    study("an odd device", "config={'device': 'gpu'}", "config['device'] = 'gpu'", "cuda"),
    study(
        "a misspelt baseline",
        "space={'num_workers': grid(1, 2)}, baseline={'num_worker': 1}",
        "did you mean 'num_workers'?",
    ),
    study(
        "a baseline that no point has",
        "space={'num_workers': grid(1, 2)}, baseline={'num_workers': 4}",
        "take one of 1, 2",
    ),
    study("a baseline of a range", "space={'lr': uniform(0.1, 1)}, baseline={'lr': 0.1}", "needs grid(...)"),
    study("two batch sizes", "config={'per_worker_batch_size': 32, 'batch_size': 64}", "leave one out"),
    study("more samples than there are", "config={'num_samples': 5000}", "num_samples = 5000", "ask for fewer"),
    study("a batch above the samples", "config={'num_samples': 10}", "batch_size = 64", "larger num_samples"),
    study("loader processes without a loader", "config={'num_loader_workers': 2}", 'add loader="dataloader"'),
    study(
        "a loop without workers",
        "workload=Workload.from_train_loop(len), config={'num_workers': 0}",
        "config['num_workers'] = 0",
        "at least 1",
    ),
    study(
        "a loop's baseline",
        "workload=Workload.from_train_loop(len), space={'mine': grid(1, 2)}, baseline={'mine': 9}",
        "baseline['mine'] = 9",
        "take one of 1, 2",
    ),
)

FLAGS = (
    flags("no such command", "stuudy good.py", "stuudy", "study"),
    flags("no argument", "study", "FILE", "raypar study --help"),
    flags("too many arguments", "study good.py good.py", "good.py", "raypar study --help"),
    flags("no such option", "study good.py --repeat 3", "--repeat", "--repeats"),
    flags("an option without its value", "study good.py --repeats", "--repeats", "raypar study --help"),
    flags("repeats of text", "study good.py --repeats many", "--repeats 'many'", "integer"),
    flags("repeats of a half", "study good.py --repeats=1.5", "--repeats '1.5'", "integer"),
    flags("no repeats at all", "study good.py --repeats 0", "good.py", "--repeats = 0", "at least 1"),
    flags("repeats without end", f"plan good.py --repeats {10**25}", "--repeats", "at most 100000"),
    flags("a negative seed", "plan good.py --seed -1", "good.py", "--seed = -1", "at least 0"),
    flags("a large seed", f"plan good.py --seed {2**32}", "--seed = 4294967296", "at most 4294967295"),
    flags("no time", "study good.py --trial-timeout 0", "--trial-timeout 0", "greater than 0", "seconds"),
    flags("a time of NaN", "study good.py --trial-timeout nan", "--trial-timeout nan", "seconds"),
    flags("a time without end", "study good.py --trial-timeout inf", "--trial-timeout inf", "seconds"),
    flags("an odd isolation", "study good.py --isolation cold", "--isolation cold", "warm, fresh"),
    flags("a cluster without Ray", "study good.py --no-ray --address x:1", "--address x:1", "--no-ray", "leave one"),
    flags("nobody's cluster for oneself", "study good.py --exclusive", "--exclusive without --address", "leave it out"),
    flags("a local address", "plan good.py --address local", "--address 'local'", "leave it out"),
    flags("an address without a port", "plan good.py --address head", "--address 'head'", "no port", "host:6379"),
    flags("Ray's client mode", "study good.py --address ray://h:10001", "ray://h:10001", "http://HEAD:8265", "auto"),
    flags("a page as an address", "plan good.py --address http://x:1", "--address 'http://x:1'", "is a dashboard"),
    flags("no dashboard there", f"study good.py --address {NOWHERE}", f"at --address {NOWHERE}", "ssh -N -L"),
    flags("a page's page", "study good.py --address http://x:1/jobs", "--address 'http://x:1/jobs'", "host:port"),
    flags("a page without Ray", "study good.py --no-ray --address http://x:1", "http://x:1 and --no-ray", "leave one"),
    flags("a page's plan", "study good.py --dry-run --address http://x:1", "http://x:1 and --dry-run", "leave one"),
    flags("data of here", "study good.py --data-dir data --address http://x:1", "--data-dir data", "cluster's head"),
    flags(
        "a password in a job",
        "study good.py --address http://x:1 --tracking-uri http://me:pa55word@y:1",
        "--tracking-uri http://me:***@y:1",
        "set MLFLOW_TRACKING_URI",
    ),
    flags("nothing to attach to", f"attach good --address {NOWHERE}", f"at --address {NOWHERE}", "ssh -N -L"),
    flags("nothing to stop", f"stop good --address {NOWHERE}", f"at --address {NOWHERE}", "ssh -N -L"),
    flags("attached to a Ray", "attach good --address auto", "--address 'auto'", "is no dashboard"),
    flags("a port that there is not", "plan good.py --address x:99999", "--address 'x:99999'", "host:port"),
    flags("nobody at the address", "plan good.py --address 127.0.0.1:9", "--address 127.0.0.1:9", "no Ray cluster"),
    flags("a search without Ray", "study good.py --no-ray --set lr=uniform(0.1,1)", "a search", "--no-ray"),
    flags("--set of nothing", "plan good.py --set lr", "--set = 'lr'", "lacks `=`", "--set lr=0.1"),
    flags("--set of no value", "plan good.py --set lr=", "lacks a value"),
    flags("--set of no key", "plan good.py --set =1", "lacks a key"),
    flags("--set of an unknown key", "plan good.py --set epoch=1", "--set epoch", "did you mean 'epochs'?"),
    flags("--set of a field", "plan good.py --set num_repeats=2", "--set num_repeats", "use --repeats 2"),
    flags("--set of a wrong type", "plan good.py --set epochs=many", "--set epochs = 'many'", "int, not str"),
    flags("--set of infinity", "plan good.py --set lr=1e999", "--set lr = inf", "greater than 0"),
    flags("--set twice", "plan good.py --set lr=1 --set lr=2", "--set lr", "given twice", "lr=A,B"),
    flags("--set of an empty grid", "plan good.py --set lr=grid()", "--set lr", "is empty"),
    flags("--set of half a range", "plan good.py --set lr=uniform(1)", "--set lr", "two numbers, low and high"),
    flags("--set of brackets", f"plan good.py --set lr={'(' * 500}", "--set lr", "float, not str"),
    flags("--set of signs", f"plan good.py --set lr={'-' * 100_000}1", "--set lr", "float, not str"),
    flags("--set of no option", "plan good.py --set zzzz=3", "unknown option 'zzzz'", "choose from: ", "batch_size"),
    flags("--set of the workload", "plan good.py --set workload=digits", "change it in the study's file"),
    flags("--set of the seed", "plan good.py --set seed=3", "--set seed = '3'", "use --seed 3"),
    flags("--set of one value twice", "plan good.py --set num_workers=1,1", "duplicate values: 1", "each value once"),
    flags("--set of one bad value", "plan good.py --set num_workers=1,0", "--set num_workers = 0", "at least 1"),
    flags("--set of None", "plan good.py --set epochs=None", "--set epochs = None", "needs a value"),
    flags(
        "--set of a range backwards", "plan good.py --set lr=uniform(2,1)", "--set lr = 'uniform(2,1)'", "low < high"
    ),
    flags("--set of a named range", "plan good.py --set lr=uniform(low=1,high=2)", "takes plain values"),
    flags("--set beyond the data", "plan good.py --set batch_size=4000", "larger than the training set"),
    flags("several flags", "plan good.py --set lr=-1 --set epoch=1 --seed -1", "3 mistakes", "lr", "epoch", "--seed"),
    flags("no data folder", "study good.py --data-dir nowhere", "--data-dir nowhere", "no such folder"),
    flags("a data folder that is a file", "plan good.py --data-dir good.py", "--data-dir good.py"),
    flags("steps of none", "profile good.py --steps 0", "--steps 0", "from 1 to 1000"),
    flags("steps without end", f"profile good.py --steps {10**20}", "--steps", "from 1 to 1000"),
    flags("a port of text", "ui --port x", "--port 'x'", "integer", "raypar ui --help"),
    flags("port 0", "ui --port 0", "--port '0'", "greater than or equal to 1"),
    flags("a port beyond", "ui --port 65536", "--port '65536'", "65535"),
    flags("no metric", "recommend s --target 0.9", "--target 0.9", "accuracy=0.99"),
    flags("a target of NaN", "recommend s --target accuracy=nan", "--target accuracy=nan", "metric=value"),
    flags("a time of no unit", "recommend s --max-time 5weeks", "--max-time 5weeks", "90s, 10min or 2h"),
    flags("an efficiency of percents", "recommend s --min-efficiency 70", "--min-efficiency 70", "0.7"),
    flags("a metric of NaN", "recommend s --min-metric nan", "--min-metric nan", "is no number"),
    flags("a start without a target", "recommend s --start launch", "--start launch", "--target"),
    flags("a start that there is not", "recommend s --start later", "--start 'later'", "first-step"),
    flags("a study against itself", "compare s s", "`s` is compared with itself", "--baseline-uri"),
    flags("no percentage", "compare a b --fail-if-slower 5", "--fail-if-slower 5", "5%"),
    flags("workers of text", "predict s --workers many", "--workers many", "8,64"),
    flags("no workers", "predict s --workers 0", "0", "--workers"),
    flags("a network of text", "predict s --workers 4 --network fast", "fast", "Gbit"),
    flags("an input rate of NaN", "predict s --workers 4 --input-rate nan", "--input-rate nan", "greater than 0"),
    flags("a bucket below 0", "predict s --workers 4 --bucket-mb -1", "--bucket-mb -1", "0 or more"),
    flags("worker counts set", "predict s --workers 4 --set num_workers=2", "num_workers=2", "--workers 2"),
    flags("no workers asked", "predict s", "--workers", "raypar predict --help"),
    flags("a drawing of no kind", "predict s --workers 4 --plot a.txt", "a.txt", ".png"),
    flags("scaling of a study", "fit s --scaling weak", "--scaling weak", "leave it out"),
    flags("a baseline of no worker", "fit s --baseline 0", "--baseline '0'", "1"),
    flags("no table", "fit gone.csv", "gone.csv", "there is no such file"),
    Case("a table of text", ("fit", "t.csv"), ("t.csv", "line 2", "'many'"), {"t.csv": "workers,time\nmany,1\n"}),
    Case("a table not in UTF-8", ("fit", "t.csv"), ("t.csv", "UTF-8", "byte 0"), {"t.csv": b"\xff\xfe\n"}),
    Case("an empty table", ("fit", "t.csv"), ("t.csv", "workers"), {"t.csv": ""}),
    flags("a format that is not known", "export s t.xlsx", "t.xlsx", ".csv"),
    flags("a file that is there", "export s good.py", "good.py"),
    flags("no prompt", "generate s", "--prompt", "raypar generate --help"),
    flags("no tokens", "generate s --prompt x --max-new-tokens 0", "--max-new-tokens '0'", "1"),
    flags("no such workload", "work digit", "no workload `digit`", "did you mean 'digits'?"),
    flags("no workload to show", "workloads digit", "no workload `digit`", "did you mean 'digits'?"),
    flags("a peak of NaN", "work digits --peak-tflops nan", "--peak-tflops nan", "greater than 0"),
    flags("work of several", "work digits --peak-tflops 1 --set lr=1,2", "several values of lr", "one value"),
    flags("an open page of nothing", "report s --open", "--open", "--html FILE"),
    flags("figures of no kind", "report s --figures f --format gif", "--format 'gif'", "svg"),
    *(
        flags(f"{command.split()[0]} of no study", command, "no study `s`", "raypar study FILE")
        for command in (
            *("report s", "show s", "resume s", "recommend s", "compare s t", "predict s --workers 4", "fit s"),
            *("export s t.csv", "generate s --prompt x"),
        )
    ),
)

MNIST = HEAD + "study = Study(workload=mnist_mlp, num_repeats=1)\n"
HALF = {"data/MNIST/raw/train-images-idx3-ubyte": b"\0\0\x08\3\0\0\xea\x60\0\0\0\x1c\0\0\0\x1c" + b"\0" * 100}
ENVIRONMENTS = (
    flags(
        "no data folder named", "plan mnist.py", "nowhere", "no such folder", "--data-dir", RAYPAR_DATA_DIR="nowhere"
    ),
    flags("a file named as data folder", "plan mnist.py", "good.py", "--data-dir", RAYPAR_DATA_DIR="good.py"),
    flags("a folder without the data", "plan mnist.py --data-dir .", "MNIST/raw/train-images", "no such file"),
    Case("incomplete data", ("plan", "mnist.py", "--data-dir", "data"), ("incomplete", "47,040,016"), HALF),
    Case(
        "packed data",
        ("plan", "mnist.py", "--data-dir", "data"),
        ("train-images-idx3-ubyte.gz", "gunzip -k"),
        {"data/MNIST/raw/train-images-idx3-ubyte.gz": b"\x1f\x8b"},
    ),
    Case(
        "data of another kind",
        ("plan", "mnist.py", "--data-dir", "data"),
        ("train-images-idx3-ubyte", "header"),
        {"data/MNIST/raw/train-images-idx3-ubyte": b"<html>no such page</html>"},
    ),
    Case(
        "data that is a folder",
        ("plan", "mnist.py", "--data-dir", "data"),
        ("train-images-idx3-ubyte", "can't be read"),
        {"data/MNIST/raw/train-images-idx3-ubyte/x": ""},
    ),
    flags("no home", "plan mnist.py", "MNIST is not in the cache", "--data-dir", HOME="/dev/null/nobody"),
    flags("no cache", "plan mnist.py", "MNIST is not in the cache", "--data-dir", XDG_CACHE_HOME="/dev/null"),
    flags(
        "an odd store in the environment", "study good.py", "foo://bar", "sqlite:///", MLFLOW_TRACKING_URI="foo://bar"
    ),
    flags("a folder as store", "study good.py", "mlruns", "sqlite:///", MLFLOW_TRACKING_URI="./mlruns"),
    flags("no port in a store's address", "study good.py", "http://h:x", MLFLOW_TRACKING_URI="http://h:x"),
    Case("a folder that can't be written", ("study", "good.py"), (".raypar", "can't be written"), {".raypar": ""}),
    Case("logs that can't be written", ("study", "good.py"), ("logs", "can't be written"), {".raypar/logs": ""}),
    Case("a page below a file", ("report", "s", "--html", "good.py/x.html"), ("no study `s`",)),
)

CASES = (*STUDY_FILES, *STUDIES, *FLAGS, *ENVIRONMENTS)
