"""Table of bad input: study files, studies, flags and environments, with words that the message must contain."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nothing_starts import NOWHERE

HEAD = """import functools
from raypar import Option, Study, Workload, choice, grid, loguniform, randint, uniform
from raypar.workloads import digits, mnist_mlp
Own, LOOP = functools.partial(Workload, name='w', model=len, data=len), Workload.from_train_loop(len)
"""
GOOD = HEAD + 'study = Study(workload=digits, space={"lr": grid(0.1, 0.2)}, num_repeats=1)\n'


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        arguments: those of `raypar`.
        words: texts in the message; " | " separates texts.
        files: files in the folder, beside a valid ``good.py``.
        environment: additional variables.
        setup: prepares the folder further.
        out: standard output, which only the study file may write.
    """

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Callable[[Path], object] | None = None
    out: str = ""


def flags(name, command, *words, **variables):
    return Case(name, tuple(command.split()), words, environment=variables)


def source(name, text, *words, out=""):
    """Return the case of a bad study file."""
    return Case(name, ("plan", "bad.py"), ("bad.py", *words), {"bad.py": text}, out=out)


def study(name, fields, *words, before=""):
    """Return the case of a bad study in an otherwise valid file."""
    given = fields if "workload=" in fields else f"workload=digits, {fields}"
    return source(name, f"{HEAD}{before}\nstudy = Study({given})\n", *words)


def data(name, path, content, *words):
    """Return the case of unusable files of MNIST."""
    return Case(name, ("plan", "mnist.py", "--data-dir", "data"), words, {path: content})


def at(name, make, *words, path="bad.py"):
    """Return the case of a path that is not a file."""
    return Case(name, ("plan", path), (path, *words), setup=make)


FAILS = HEAD + "study = Study(workload=Own(prepare=lambda config: 1 / 0))\n"
BAD_MODULE = {"bad.py": "import helper_of_bad\n", "helper_of_bad.py": "\nx = = 1\n"}
FAILING = "FAILING = {'a': Option(1, int, 'x', lambda v: 1 / 0)}"
UNSHOWN = "class E(Exception):\n    def __str__(self): raise ValueError\n"
STUDY_FILES = (
    flags("no such file", "study god.py", "god.py", "no such file", "did you mean good.py?"),
    flags("a folder", "study .", "is a folder", "good.py"),
    Case("no Python file", ("plan", "study.txt"), ("study.txt", "not a Python file", ".py"), {"study.txt": GOOD}),
    flags("a path below a file", "plan good.py/bad.py", "good.py/bad.py", "no folder good.py"),
    flags("a name that is too long", f"plan {'x' * 300}.py", "xxx.py", "can't be read: File name too long"),
    flags("an empty name", "plan " + "\N{NO-BREAK SPACE}.py", "no such file"),
    at("a FIFO", lambda folder: os.mkfifo(folder / "bad.py"), "is not a regular file", "a study file"),
    source("an empty file", "", "defines no Study", "study = Study("),
    source("a syntax error", "x = (\n", "line 1", "syntax error", "'(' was never closed"),
    source("not UTF-8", b"# caf\xe9\nx = 1\n", "line 1", "byte 0xe9 is not UTF-8", "save the file as UTF-8"),
    source("nested too deeply", f"x = {'-' * 100_000}1\n", "nested too deeply"),
    source("endless recursion", "def f(): f()\nf()\n", "RecursionError", "line 1"),
    source("sys.exit", "import sys\nsys.exit(3)\n", "line 2", "SystemExit: 3", "leave sys.exit() out"),
    source("an exception", "x = 1 / 0\n", "line 1", "ZeroDivisionError", "fix that line"),
    source("an exception without words", f"{UNSHOWN}raise E\n", "line 3 | str() failed"),
    source("an extra that is missing", "raise ModuleNotFoundError('x', name='optuna.samplers')\n", "'raypar[search]'"),
    source(
        "a searcher that is missing", "assert False, 'Optuna must be installed! Run `pip …`.'\n", "'raypar[search]'"
    ),
    source("a module that is missing", "import nowhere_to_be\n", "line 1", "install nowhere_to_be", "spelling"),
    source("a workload that there is not", "from raypar.workloads import digit\n", "did you mean 'digits'?"),
    source("no study", GOOD.replace("study = Study", "asked = dict"), "defines no Study"),
    source("a list of studies", GOOD + "study = [study]\n", "is a list, not a Study"),
    source("two studies", GOOD.replace("study = ", "one = ") + "two = Study(workload=digits)\n", "one, two", "`study`"),
    source("no workload", HEAD + "study = Study()\n", "line 5", "workload", "raypar.workloads"),
    source("a workload by position", HEAD + "study = Study(digits)\n", "line 5", "positional"),
    source("prints", "print('hello')\n" + HEAD + "study = Study(workload=digits, seed=-1)\n", "seed", out="hello\n"),
    source("goes elsewhere", "import os\nos.chdir('/')\n" + GOOD.replace("0.2", "0.1"), "duplicate values: 0.1"),
    Case("a bad module", ("plan", "bad.py"), ("helper_of_bad.py", "line 2", "syntax error"), BAD_MODULE),
    source("a module that raypar lacks", "from raypar.workload import digits\n", "line 1", "check the spelling"),
)

STUDIES = (
    study("an odd mode", "mode='most'", "mode = 'most'", '"max" or "min"'),
    study("a grid as a value", "config={'lr': grid(1., 2.)}", "config['lr'] = grid(1.0, 2.0)", "put it into"),
    study("0 workers of a loop", "workload=LOOP, config={'num_workers': 0}", "config['num_workers'] = 0 | at least 1"),
    study("a workload's name", "workload='digits'", "workload = 'digits'", "is a str, not a Workload"),
    study(
        "a field that there is not", "repeats=1", "line 6", "repeats", "did you mean 'max_repeats' or 'num_repeats'?"
    ),
    study("a hyperparameter as a field", "momentum=1", "momentum", "config={...}"),
    study("too many repeats", "num_repeats=10**30", "num_repeats = 1000000000000000000", "more than 100,000"),
    study("many trials", "num_repeats=100_000, space={'lr': grid(1., 2.)}", "200,000 trials of 2 points"),
    study("an unknown until", "until='forever'", "until = 'forever': is unknown", '"settled"'),
    study("a search until settled", "until='settled', space={'lr': uniform(0.1, 1.)}", "until", "runs each point once"),
    study("a scheduler until settled", "until='settled', scheduler=print", "until", "a scheduler stops trials"),
    study("a text as margin", "until='settled', margin='small'", "margin = 'small': must lie between 0 and 1", "5%"),
    study("a margin beyond all floats", "until='settled', margin=10**400", "margin = 1000", "must lie between 0 and 1"),
    study("a budget without until", "budget='10m'", "budget = 600.0: limits a study", "--until settled"),
    study("a budget beyond all floats", "until='settled', budget=10**400", "budget = 1000", "a time greater than 0"),
    study("too many repeats until settled", "until='settled', max_repeats=101", "max_repeats = 101", "from 3 to 100"),
    study("a large minimum", "until='settled', num_repeats=9, max_repeats=8", "num_repeats = 9: is more than", "8"),
    study("a name that is a path", "name='../up'", "name = '../up'", "choose another name"),
    study("a long name", "name='x' * 300", "longer than 150 characters"),
    study("a price of NaN", "price_per_node_hour=float('nan')", "price_per_node_hour = nan", "greater than 0"),
    study("a price beyond all floats", "price_per_node_hour=10**400", "price_per_node_hour = 1000", "greater than 0"),
    study("a searcher's name", "searcher='random'", "searcher = 'random'", "is a str", "OptunaSearch()"),
    study("a scheduler's class", "scheduler=int", "scheduler = <class 'int'>", "ASHAScheduler()"),
    study("a key that is no text", "space={1: grid(1)}", "space[1]", "must be text, not int", "'1'"),
    study("an unknown key", "config={'batchsize': 3}", "config['batchsize'] = 3", "did you mean 'batch_size'?"),
    study("a list for a grid", "space={'lr': [0.1, 0.2]}", "space['lr'] = [0.1, 0.2]", "write grid(0.1, 0.2)"),
    study(
        "a list in a choice", "space={'lr': choice([0.1, 0.2])}", "a list as its only value", "write choice(0.1, 0.2)"
    ),
    study(
        "a domain that only Ray Tune has",
        "space={'lr': tune.quniform(0, 1, 0.1)}",
        "space['lr']",
        "uniform, loguniform",
        before="from ray import tune",
    ),
    study(
        "a grid of Ray Tune",
        "config={'lr': tune.grid_search([1, 2])}",
        "config['lr'] = grid(1, 2)",
        "a single value",
        before="from ray import tune",
    ),
    study("a million values", "space={'epochs': grid(*range(1, 10**6))}", "999,999 values", "randint(low, high)"),
    study("many points", "space=dict.fromkeys(('epochs', 'hidden_size'), grid(*range(1, 1001)))", "1,000,000 points"),
    study("repeated values", "workload=LOOP, space={'a': grid(1, 1.0)}", "count as the same: 1 and 1.0", "that differ"),
    study("a choice of repeated values", "workload=LOOP, space={'a': choice(True, 1)}", "the same: True and 1"),
    study("NaN among values", "workload=LOOP, space={'a': grid(1., float('nan'))}", "nan can't be kept", "a finite"),
    study(
        "NaN in a value of any type",
        "workload=Own(options={'a': Option(None, object, 'x', optional=True)}), config={'a': (float('inf'),)}",
        "`a` can't be kept with the results: a finite number",
    ),
    study("a lone surrogate", "workload=LOOP, space={'a': grid('\\ud83d', 'b')}", "holds '\\ud83d', half of a"),
    study("a lone surrogate in a name", "workload=LOOP, config={'\\udc80': 1}", "config['\\udc80'] = 1", "half of a"),
    study("a lone surrogate as a question", "description='Why\\ud83d?'", "description = 'Why\\ud83d?'", "leave it out"),
    study(
        "half a character in a command",
        "workload=Workload.from_command('echo \\ud83d {x}'), config={'x': 1}",
        "workload.command",
        "half of a character",
    ),
    study("a Cyrillic letter", "config={'b\u0430tch_size': 3}", "'batch_size'?", "U+0430 CYRILLIC SMALL LETTER A"),
    study("a value that is swept", "space={'lr': grid(1.)}, config={'lr': 2.}", "config['lr'] = 2.0", "also swept"),
    study("too many cores to list", "config={'cpu_affinity': '0-99999999999'}", "no machine has 1,000,000 cores"),
    study("more cores than there are", "config={'cpus_per_worker': 10**6}", "CPUs in one gang", "the cluster has"),
    study("a missing device", "config={'device': 'mps'}", "mps", "device = 'mps'", "--set device=cpu")
    if os.uname().sysname != "Darwin"
    else study("an unknown device", "config={'device': 'tpu'}", "device'] = 'tpu'", "choose from"),
    study("a baseline of no point", "space={'lr': grid(1.)}, baseline={'lr': 2.}", "baseline['lr'] = 2.0", "1.0"),
    study("a baseline that is not swept", "baseline={'lr': 2.}", "baseline['lr'] = 2.0", "is not swept"),
    study("a workload without a model", "workload=Workload(name='w')", "workload.model = None", "workload.data = None"),
    study(
        "a workload of wrong types",
        "workload=Workload(name=3, model=len, data=len, options=4, loaders='x', metrics=5, loss=6)",
        "workload.name = 3 | workload.options = 4 | workload.loaders = 'x' | workload.metrics = 5 | workload.loss = 6",
    ),
    study("a size that raises", "workload=Own(num_train_samples=lambda c: 1 / 0)", "num_train_samples | ZeroDivision"),
    study(
        "an optimizer that is none",
        "workload=Own(optimizer='adam')",
        "workload.optimizer = 'adam'",
        "must be a function",
    ),
    study(
        "an optimizer beside the workload's own",
        "workload=Own(optimizer=len), space={'optimizer': grid('sgd', 'adam')}",
        "optimizer = 'adam' | the workload has its own optimizer= | read config[\"optimizer\"] there",
    ),
    study("a bad check", "workload=Own(options=FAILING), config={'a': 2}", "['a'] = 2 | be checked", before=FAILING),
    Case("data that fails", ("plan", "bad.py"), ("workload w: prepare raises Zero",), {"bad.py": FAILS}),
    study("no train loop", "workload=Workload.from_train_loop(3)", "workload.train_loop = 3", "must be a function"),
    study("a set as a value", "workload=LOOP, config={'own': {1}}", "config['own'] = {1} | a set can't be kept"),
    study(
        "mistakes beside a bad workload",
        "workload='x', num_repeats=-1, config={'epochs': 'many'}, space={'lr': grid()}",
        "4 mistakes | workload = 'x' | num_repeats = -1 | config['epochs'] = 'many' | space['lr']",
    ),
    study("one cause", "space={'num_worker': grid(1, 2)}, baseline={'num_workers': 1}", "1 mistake", "'num_workers'?"),
    study(
        "defaults that are none",
        "workload=Own(options={'width': None}, defaults={'epoch': 3, 'lr': -1.0})",
        "workload.options['width'] = None | its type is the option's | workload.defaults['epoch'] = 3 | 3 mistakes",
        "did you mean 'epochs'? | workload.defaults['lr'] = -1.0",
    ),
    study(
        "counts below their bounds",
        "max_retries=-1, num_trials=0, max_concurrent_trials=0, price_per_node_hour=0",
        "set max_retries=0 | set num_trials=1 | set max_concurrent_trials=1 | set price_per_node_hour=2.5",
    ),
    study(
        "prices of other kinds than the study has",
        "space={'node_label': grid('type=a', 'type=b')}, price_per_node_hour={'type=a': -1, 'type=c': 2.5, 'b': 1}",
        "4 mistakes | price_per_node_hour['type=a'] = -1 | price_per_node_hour['type=c'] = 2.5: no point has this | "
        "price_per_node_hour['b'] = 1: its key must be a label | space['node_label'] = 'type=b': has no price",
    ),
    study("prices without a label", "price_per_node_hour={'type=a': 1}", "needs points that name their kind"),
    study("mappings of other types", "config='lr=0.1', baseline=1", "set config={", "set baseline={"),
    study("a grid for a searcher", "space={'lr': grid(0.1, 0.2)}, searcher=object()", "write choice(0.1, 0.2)"),
    study("values out of bounds", "space={'epochs': grid(0), 'lr': uniform(-1, 1)}", "epochs'] = 0 | space['lr'] = -1"),
    study("a baseline beside no space", "space=[], baseline={'epoch': 1}", "2 mistakes | ['epoch'] = 1 | 'epochs'"),
    study("a baseline of a range", "space={'lr': uniform(0.1, 1)}, baseline={'lr': 0.1}", "needs grid(...)"),
    study(
        "a baseline beside values that are wrong themselves",
        "space={'num_workers': grid(1, 0, 2), 'lr': grid(-1.)}, baseline={'num_workers': 4, 'lr': 0.1}",
        "4 mistakes | baseline['num_workers'] = 4: matches no point → take one of 1, 2, or",
        "baseline['lr'] = 0.1: matches no point → add it to the space",
    ),
    study("two batch sizes", "config={'per_worker_batch_size': 32, 'batch_size': 64}", "leave one out"),
)

SECRET = "--tracking-uri http://me:pa55word@y:1"
FLAGS = (
    flags("a large seed", f"plan good.py --seed {2**32}", "--seed = 4294967296", "more than 4,294,967,295"),
    flags("a page's page", "study good.py --address http://x:1/jobs", "--address 'http://x:1/jobs'", "host:port"),
    flags(
        "attached to a Ray", "cluster attach good --address auto", "--address 'auto'", "must be the URL of a dashboard"
    ),
    flags("--set without a value", "plan good.py --set lr=", "lacks a value"),
    flags("--set without a key", "plan good.py --set =1", "lacks a key"),
    flags("too many steps", f"model profile good.py --steps {10**20}", "--steps", "from 1 to 1000"),
    flags("no such command", "stuudy good.py", "stuudy", "study"),
    flags("no argument", "study", "TARGET", "raypar study --help"),
    flags("too many arguments", "study good.py good.py", "good.py", "in quotes", "raypar study --help"),
    flags("an option of a script", "study train.py --dim-out 3", "--grid dim_out=VALUE", "raypar study --help"),
    flags("no such option", "study good.py --repeat 3", "--repeat", "--repeats"),
    flags("a Cyrillic letter in an option", "plan good.py --s\u0435ed 3", "--seed?", "U+0435 CYRILLIC SMALL LETTER IE"),
    flags("a dash for hyphens", "plan good.py \u2014repeats=3", "did you mean --repeats?", "U+2014 EM DASH"),
    flags("another kind of hyphen", "plan good.py --max\u2011repeats 3", "--max-repeats?", "U+2011 NON-BREAKING"),
    flags("an invisible character", "plan good.py --set l\u200br=1", "did you mean 'lr'?", "U+200B ZERO WIDTH SPACE"),
    flags("a verb of another alphabet", "p\u04cf\u0430n good.py", "did you mean `raypar plan`?", "U+04CF"),
    flags(
        "a study's flag before it", "ab A B --budget 3m -- study good.py", "--budget", "ab A B -- study FILE --budget"
    ),
    flags(
        "half a bracket", "list --tracking-uri http://[::1", "http://[::1", "not the address", "Invalid IPv6", "sqlite:"
    ),
    flags(
        "two slashes", "list --tracking-uri sqlite://x.db", "sqlite://x.db", "two slashes", "three", "sqlite:///x.db"
    ),
    flags("repeats of text", "study good.py --repeats many", "--repeats 'many'", "integer"),
    flags("0 repeats", "study good.py --repeats 0", "good.py", "--repeats = 0", "at least 1"),
    flags("an unknown --until", "study good.py --until forever", "--until = 'forever': is unknown", "settled"),
    flags("a margin of 0", "study good.py --until settled --margin 0", "--margin", "must lie between 0 and 1", "5%"),
    flags(
        "a text as budget", "study good.py --until settled --budget soon", "--budget = 'soon'", "must be a time", "10m"
    ),
    flags("few --max-repeats", "plan good.py --until settled --max-repeats 2", "--max-repeats = 2", "from 3 to 100"),
    flags("--until of a search", "plan good.py --until settled --set lr=uniform(0.1,1)", "--until", "each point once"),
    flags("--budget without --until", "study good.py --budget 10m", "--budget = '10m': is for", "add --until settled"),
    flags("--margin without --until", "study good.py --margin 5%", "--margin", "add --until settled"),
    flags("--set of until", "plan good.py --set until=settled", "--set until", "use --until settled"),
    flags("a negative seed", "plan good.py --seed -1", "good.py", "--seed = -1", "at least 0"),
    flags("no time", "study good.py --trial-timeout 0", "--trial-timeout 0", "greater than 0", "seconds"),
    flags("an odd isolation", "study good.py --isolation cold", "--isolation cold", "warm, fresh"),
    flags("a cluster without Ray", "study good.py --no-ray --address x:1", "--address x:1", "--no-ray", "leave one"),
    flags(
        "a cluster's cores to share", "study good.py --share-machine --address auto", "--share-machine", "leave it out"
    ),
    flags("--exclusive alone", "study good.py --exclusive", "--exclusive without --address", "leave it out"),
    flags("--min-nodes alone", "study good.py --min-nodes 2", "--min-nodes without --address", "leave it out"),
    flags("0 nodes", "study good.py --address x:1 --min-nodes 0", "--min-nodes 0", "at least 1", "the head counts"),
    flags("a local address", "plan good.py --address local", "--address 'local'", "leave it out"),
    flags("an address without a port", "plan good.py --address head", "--address 'head'", "no port", "host:6379"),
    flags("Ray's client mode", "study good.py --address ray://h:10001", "ray://h:10001", "http://HEAD:8265", "auto"),
    flags("a dashboard as an address", "plan good.py --address http://x:1", "--address 'http://x:1'", "is a dashboard"),
    flags("no dashboard there", f"study good.py --address {NOWHERE}", f"at --address {NOWHERE}", "ssh -N -L"),
    flags("a page without Ray", "study good.py --no-ray --address http://x:1", "http://x:1 and --no-ray", "leave one"),
    flags("local data", "study good.py --data-dir data --address http://x:1", "--data-dir data", "cluster's head"),
    flags("a password", f"study good.py --address http://x:1 {SECRET}", "http://me:***@y:1 | MLFLOW_TRACKING_URI"),
    flags("nothing to attach", f"cluster attach good --address {NOWHERE}", f"at --address {NOWHERE}", "ssh -N -L"),
    flags("a pod without an image", "cluster kubernetes good.py --volume v", "--image: missing", "docs/clusters.md"),
    flags("a job that loses its results", "cluster kubernetes good.py --image i", "--volume: missing", "name a claim"),
    flags(
        "pods that don't exist and a study that does not train",
        "cluster kubernetes good.py --image A --workers 0 --memory-per-worker 8GB --volume v --set lr=-1",
        "4 mistakes | --image A | --workers 0 | 8GB: must be a quantity | --set lr = -1",
    ),
    flags("an invalid port", "plan good.py --address x:99999", "--address 'x:99999'", "host:port"),
    flags("no cluster at the address", "plan good.py --address 127.0.0.1:9", "--address 127.0.0.1:9", "no Ray cluster"),
    flags("--set of a key alone", "plan good.py --set lr", "--set = 'lr'", "lacks `=`", "--set lr=0.1"),
    flags("--set of an unknown key", "plan good.py --set epoch=1", "--set epoch", "did you mean 'epochs'?"),
    flags("--set of a field", "plan good.py --set num_repeats=2", "--set num_repeats", "use --repeats 2"),
    flags("--set twice", "plan good.py --set lr=1 --set lr=2", "--set lr", "given twice", "lr=A,B"),
    flags("--set of an empty grid", "plan good.py --set lr=grid()", "--set lr", "is empty"),
    flags("--set of half a range", "plan good.py --set lr=uniform(1)", "--set lr", "two numbers, low and high"),
    flags("--set of the workload", "plan good.py --set workload=digits", "change it in the study's file"),
    flags("--set of a named range", "plan good.py --set lr=uniform(low=1,high=2)", "takes plain values"),
    flags("--set beyond the data", "plan good.py --set batch_size=4000", "larger than the training set"),
    flags("several flags", "plan good.py --set lr=-1 --set epoch=1 --seed -1", "3 mistakes", "lr", "epoch", "--seed"),
    flags("no data folder", "study good.py --data-dir nowhere", "--data-dir nowhere", "no such folder"),
    flags("an efficiency in per cent", "recommend s --min-efficiency 70", "--min-efficiency 70", "0.7"),
    flags("a margin below 0", "recommend s --metric-margin -1", "--metric-margin -1", "0 or more", "0.005"),
    flags("a margin of NaN", "recommend s --metric-margin nan", "--metric-margin nan", "0 or more", "0.005"),
    flags("a margin with a target", "recommend s --metric-margin 0.01 --target accuracy=0.9", "exclude each other"),
    flags("a start without a target", "recommend s --start launch", "--start launch", "--target"),
    flags("a study against itself", "store compare s s", "`s` would be compared with itself", "--baseline-uri"),
    flags(
        "--inconclusive alone", "store compare s t --inconclusive ok", "--inconclusive ok", "add --fail-if-slower 5%"
    ),
    flags("a limit in seconds", "store compare s t --fail-if-slower 5s", "--fail-if-slower 5s", "percentage", "5%"),
    flags("an odd exit code", "store compare s t --fail-if-slower 5% --inconclusive no", "--inconclusive 'no'", "ok"),
    flags("a bucket below 0", "model predict s --workers 4 --bucket-mb -1", "--bucket-mb -1", "0 or more"),
    flags("no --workers", "model predict s", "--workers", "raypar model predict --help"),
    flags("an unknown kind of plot", "model predict s --workers 4 --plot a.txt", "a.txt", ".png"),
    flags("a missing table", "model fit gone.csv", "gone.csv", "there is no such file"),
    Case(
        "a table of text", ("model", "fit", "t.csv"), ("t.csv", "line 2", "'many'"), {"t.csv": "workers,time\nmany,1\n"}
    ),
    Case(
        "a table with decimal commas",
        ("model", "fit", "t.csv"),
        ("t.csv: 1 mistake", "line 3 = '2,5,4': has 3 cells, the head 2", "12.5"),
        {"t.csv": "workers,time\n1,10,\n2,5,4\n4,3\n"},
    ),
    Case(
        "a table of a million lines",
        ("model", "fit", "t.csv"),
        ("t.csv: the table is longer than 5,000 lines or 5 MB", "a few dozen"),
        {"t.csv": "workers,time\n" + "1,x\n" * 10**6},
    ),
    Case(
        "an endless line", ("model", "fit", "t.csv"), ("t.csv: the table is longer than",), {"t.csv": "workers" * 10**6}
    ),
    Case(
        "a table of too many worker counts",
        ("model", "fit", "t.csv"),
        ("t.csv: the table has 201 worker counts, over 200",),
        {"t.csv": "workers,time\n" + "".join(f"{n},1\n" for n in range(1, 202))},
    ),
    Case("an empty table", ("model", "fit", "t.csv"), ("t.csv", "workers"), {"t.csv": ""}),
    flags("an import of nothing", "store import gone --as new", "no experiment `gone`", "--from URI"),
    flags("an import of a missing table", "store import gone.csv", "gone.csv: there is no such file"),
    flags("an import of a table from a store", "store import t.csv --from sqlite:///x.db", "t.csv is a file"),
    flags("an import with a bad name", "store import gone.csv --as a/b", "'a/b': the name of a study"),
    Case(
        "an import of one worker count",
        ("store", "import", "t.csv"),
        ("t.csv: all runs have the same number of workers", "--workers"),
        {"t.csv": "workers,time\n2,1\n2,3\n"},
    ),
    Case(
        "an import with an unknown metric",
        ("store", "import", "t.csv", "--metric", "accuracy"),
        ("--metric accuracy: no such column", "workers"),
        {"t.csv": "workers,time\n1,1\n2,3\n"},
    ),
    flags("an unknown format", "store export s t.xlsx", "t.xlsx", ".csv"),
    flags("an existing file", "store export s good.py", "good.py"),
    flags("no file", "store export s", "nothing to write", "--tensorboard FOLDER"),
    flags("a file as a folder", "store export s --tensorboard good.py", "good.py", "is not a folder"),
    flags("no such workload", "model work digit", "no workload `digit`", "did you mean 'digits'?"),
    flags("a peak of NaN", "model work digits --peak-tflops nan", "--peak-tflops nan", "greater than 0"),
    flags(
        "a GPU's memory without a unit",
        "model memory good.py --gpu-memory 80",
        "--gpu-memory 80",
        "write --gpu-memory 80GB",
    ),
    flags("a plan's GPU without a unit", "plan good.py --gpu-memory 80", "--gpu-memory 80", "write --gpu-memory 80GB"),
    flags(
        "a recommended GPU of nothing", "recommend s --gpu-memory 0GB", "--gpu-memory 0GB", "write --gpu-memory 80GB"
    ),
    flags(
        "more nodes than workers",
        "model network --nodes 4 --workers 2",
        "--nodes 4 is more than --workers 2",
        "write --workers 4",
    ),
    flags("several values", "model work digits --peak-tflops 1 --set lr=1,2", "lr: several values", "--set key=value"),
    flags("an unknown kind of figure", "report s --figures f --format gif", "--format 'gif'", "svg"),
    *(
        flags(f"{command.partition(' s')[0]} of no study", command, "no study `s`", "raypar study FILE")
        for command in (
            *("report s", "store show s", "store resume s", "recommend s", "store compare s t", "model fit s"),
            *("model predict s --workers 4", "store export s t.csv", "model generate s --prompt x"),
        )
    ),
)

MNIST = HEAD + "study = Study(workload=mnist_mlp, num_repeats=1)\n"
IMAGES = "data/MNIST/raw/train-images-idx3-ubyte"
HALF = b"\0\0\x08\3\0\0\xea\x60\0\0\0\x1c\0\0\0\x1c" + b"\0" * 100
ENVIRONMENTS = (
    flags("no data folder here", "plan mnist.py", "nowhere", "no such folder", "--data-dir", RAYPAR_DATA_DIR="nowhere"),
    flags("a folder without the data", "plan mnist.py --data-dir .", "MNIST/raw/train-images", "no such file"),
    data("incomplete data", IMAGES, HALF, "incomplete", "47,040,016"),
    data("packed data", IMAGES + ".gz", b"\x1f\x8b", "train-images-idx3-ubyte.gz", "gunzip -k"),
    data("data of another kind", IMAGES, b"<html>no such page</html>", "train-images-idx3-ubyte", "header"),
    data("data that is a folder", IMAGES + "/x", b"", "train-images-idx3-ubyte", "can't be read"),
    flags("no cache", "plan mnist.py", "MNIST is not in the cache", "--data-dir", XDG_CACHE_HOME="/dev/null"),
    flags("no folder of locks", "study good.py", "can't lock", "RAYPAR_LOCK_DIR", RAYPAR_LOCK_DIR="good.py"),
    flags("an odd store", "study good.py", "foo://bar", "sqlite:///", MLFLOW_TRACKING_URI="foo://bar"),
    flags("a folder as store", "study good.py", "mlruns", "sqlite:///", MLFLOW_TRACKING_URI="./mlruns"),
    flags("half a bracket in a variable", "study good.py", "http://[::1", "sqlite:", MLFLOW_TRACKING_URI="http://[::1"),
    flags("no port in a store's address", "study good.py", "http://h:x", MLFLOW_TRACKING_URI="http://h:x"),
    Case("a folder that can't be written", ("study", "good.py"), (".raypar", "can't be written"), {".raypar": ""}),
    Case(
        "a folder of files that is gone",
        ("study", "good.py"),
        ("mlartifacts is a link to gone, which does not exist", "remove the link"),
        setup=lambda folder: (folder / "mlartifacts").symlink_to("gone"),
    ),
    Case("logs that can't be written", ("study", "good.py"), ("logs", "can't be written"), {".raypar/logs": ""}),
    Case("a report below a file", ("report", "s", "--html", "good.py/x.html"), ("good.py/x.html: can't be written",)),
)

ALL_AT_ONCE = Case(
    "a faulty study and faulty flags",
    ("plan", "bad.py", "--set", "epoch=3", "--set", "lr", "--repeats", "-1", "--margin", "2%"),
    ("5 mistakes", "num_repeats = 0", "did you mean 'epochs'?", "--set = 'lr'", "--repeats = -1", "--margin"),
    {"bad.py": f'{HEAD}study = Study(workload=digits, space={{"lr": grid(0.1)}}, num_repeats=0)\n'},
)
CASES = (*STUDY_FILES, *STUDIES, *FLAGS, *ENVIRONMENTS, ALL_AT_ONCE)
