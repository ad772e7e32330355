"""Studies that make no sense, in files that are fine."""

from __future__ import annotations

import os

from bad_cases import HEAD, Case, study

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
)
