"""A trial's precision sets all of torch's switches, whatever was set before."""

import json
import subprocess
import sys

import pytest

OLDER = "matmul", "float32_matmul", "cudnn"
# Forks of one process that has imported torch: each starts with torch's default switches, and without delay.
IN_FORKS = """
import json, os, sys
import torch, torch._dynamo, torch.export
from torch import backends, nn
from raypar.train.precision import numerics_of

READ = {
    "matmul": lambda: backends.cuda.matmul.allow_tf32,
    "float32_matmul": lambda: torch.get_float32_matmul_precision() == "high",
    "cudnn": lambda: backends.cudnn.allow_tf32,
    "new matmul": lambda: backends.cuda.matmul.fp32_precision == "tf32",
    "new conv": lambda: backends.cudnn.conv.fp32_precision == "tf32",
    "new rnn": lambda: backends.cudnn.rnn.fp32_precision == "tf32",
}

def read(get):
    try:
        return get()
    except RuntimeError as error:
        return f"{error}".partition(",")[0]

def compiles_and_exports():
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 2), torch.ones(2, 3)
    exported = torch.export.export(layer, (x,)).module()
    return torch.equal(torch.compile(layer, backend="eager")(x), layer(x)) and torch.equal(exported(x), layer(x))

def in_fork(before, precision, device, after, builds):
    receiver, sender = os.pipe()
    if os.fork() == 0:
        exec(before)
        numerics_of({"precision": precision, "channels_last": False}, torch.device(device))
        exec(after)
        state = {name: read(get) for name, get in READ.items()}
        on_cpu = {getattr(backends.mkldnn, name).fp32_precision for name in ("matmul", "conv", "rnn")}
        works = not builds or read(compiles_and_exports)
        os.write(sender, json.dumps([state, sorted(on_cpu), works]).encode())
        os._exit(0)
    os.close(sender)
    os.wait()
    with os.fdopen(receiver) as answer:
        return json.loads(answer.read())

compiles_and_exports()
print(json.dumps([in_fork(*case) for case in json.loads(sys.argv[1])]))
"""
OLD = [
    *(f"backends.{name}.allow_tf32 = {allowed}" for name in ("cuda.matmul", "cudnn") for allowed in (False, True)),
    *(f"torch.set_float32_matmul_precision({name!r})" for name in ("highest", "high", "medium")),
]
NEW = [
    f"backends{name}.fp32_precision = {precision!r}"
    for name in ("", ".cuda.matmul", ".cudnn", ".cudnn.conv", ".mkldnn")
    for precision in ("ieee", "tf32")
]
ALLOWS = {"fp32": False, "tf32": True}
# Switches set before, the precision, the device, switches set after; whether to compile and export as well.
BEFORE = [(before, precision, "cuda", "", before not in NEW) for before in ("", *OLD, *NEW) for precision in ALLOWS]
AFTER = [("", precision, "cuda", after, False) for precision in ALLOWS for after in OLD]
ON_THE_CPU = [("torch.set_float32_matmul_precision('high')", "tf32", "cpu", "", True)]


@pytest.fixture(scope="module")
def outcomes():
    """By case: switches, True where they allow TF32; those of the CPU; whether torch.compile and torch.export work."""
    cases = [*BEFORE, *AFTER, *ON_THE_CPU]
    done = subprocess.run([sys.executable, "-c", IN_FORKS, json.dumps(cases)], stdout=subprocess.PIPE, check=False)
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def test_all_switches_agree_with_the_precision_whatever_was_set_before(outcomes):
    for case in (*BEFORE, *ON_THE_CPU):
        _, precision, device, *_ = case
        switches, on_cpu, works = outcomes[case]
        assert set(switches.values()) == {ALLOWS[precision] and device == "cuda"}, (case, switches)
        assert on_cpu == ["ieee"] and works is True, (case, on_cpu, works)


def test_a_workload_may_set_older_switches_after_it(outcomes):
    for case in AFTER:
        switches, *_ = outcomes[case]
        assert all(switches[name] in (False, True) for name in OLDER), (case, switches)
