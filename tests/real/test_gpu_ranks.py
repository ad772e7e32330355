"""The GPUs and the environment that ranks see on a Ray cluster.

Ray is started with a number of GPUs. In the ranks a stand-in replaces CUDA and NCCL, with a GPU for each visible index.
"""

import json

import pytest
from harness import Cli, ray_head

pytestmark = pytest.mark.ray

NUM_WORKERS = 2
CARDS = """
import os
from types import SimpleNamespace
import torch.distributed

used = {}


def join(backend, device_id=None, plain=torch.distributed.init_process_group, **how):
    used["nccl"] = str(device_id) if backend == "nccl" else None
    plain("gloo", **how)


torch.distributed.init_process_group = join
torch.cuda.device_count = lambda: len(list(filter(None, os.environ["CUDA_VISIBLE_DEVICES"].split(","))))
torch.cuda.set_device = lambda device: used.update(current=str(device))
torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="none")
torch.cuda.get_device_name = lambda _: "stand-in"
"""
STUDY = """
from raypar import Study, Workload, grid


def loop(config):
    import json, os
    from pathlib import Path
    import cards, ray.train

    device = "cuda" if os.environ["CUDA_VISIBLE_DEVICES"] else "cpu"
    path = Path({folder!r}) / (device + os.environ["RANK"])
    path.write_text(json.dumps({{**os.environ, "used": cards.used}}))
    ray.train.report({{"loss": 1.0}})


study = Study(
    workload=Workload.from_train_loop(loop, preload=("ray.train.torch", "cards")),
    space={{"device": grid("cpu", "cuda")}},
    config={{"num_workers": {num_workers}}},
    num_repeats=1,
)
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Environment and CUDA calls of each rank, by device of its trial and rank."""
    folder = tmp_path_factory.mktemp("gpus")
    cli = Cli(folder)
    cli.write("cards.py", CARDS)
    cli.write("study.py", STUDY.format(folder=str(folder), num_workers=NUM_WORKERS))
    with ray_head(folder, "--include-dashboard=false", "--num-gpus=4") as (address, _):
        changes = {"HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder), "NCCL_IB_HCA": "mlx5"}
        done = cli.run("study", "study.py", "--address", address, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        (device, rank): json.loads((folder / f"{device}{rank}").read_text())
        for device in ("cpu", "cuda")
        for rank in range(NUM_WORKERS)
    }


def test_all_ranks_see_their_gangs_gpus_in_one_order_and_local_rank_is_an_index(seen):
    ranks = [seen["cuda", rank] for rank in range(NUM_WORKERS)]
    (visible,) = {rank["CUDA_VISIBLE_DEVICES"] for rank in ranks}
    numbers = visible.split(",")
    assert len(set(numbers)) == NUM_WORKERS and set(numbers) <= set("0123")
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    assert [rank["used"] for rank in ranks] == [{"current": each, "nccl": each} for each in ("cuda:0", "cuda:1")]


def test_a_trial_on_the_cpu_sees_no_gpu(seen):
    for rank in range(NUM_WORKERS):
        environment = seen["cpu", rank]
        assert (environment["CUDA_VISIBLE_DEVICES"], environment["HIP_VISIBLE_DEVICES"]) == ("", "-1")
        assert environment["used"] == {"nccl": None}


def test_ranks_have_the_clusters_home_and_the_drivers_network_variables(seen):
    for environment in seen.values():
        assert environment["NCCL_IB_HCA"] == "mlx5"
        assert not environment["HOME"].endswith("home") and "XDG_CACHE_HOME" not in environment
