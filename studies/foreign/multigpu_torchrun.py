"""Does a second GPU pay off for the last script of PyTorch's DDP tutorial?

The script is not part of raypar; it runs unchanged:

    git clone --depth 1 https://github.com/pytorch/examples studies/foreign/examples

It needs a GPU for each worker, since it always uses NCCL and `cuda:N`. It prints no loss, so only the time of the whole
command is measured, and whether points do equal work is unknown. Its batch size is per worker.
"""

from foreign_scripts import HERE, cloned

from raypar import Study, Workload, grid

EXAMPLES = "https://github.com/pytorch/examples"
SCRIPT = "examples/distributed/ddp-tutorial-series/multigpu_torchrun.py"
torchrun = Workload.from_command(
    [
        *("torchrun", "--standalone", "--nproc-per-node={num_workers}", str(HERE / SCRIPT)),
        *("{total_epochs}", "{save_every}", "--batch_size", "{batch_size}"),
    ],
    folder="{output_dir}",  # it continues from a snapshot.pt in its folder, so each trial gets an empty one
    name="multigpu_torchrun.py",
    prepare=cloned(EXAMPLES, SCRIPT),
)
study = Study(
    workload=torchrun,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    config={"total_epochs": 20, "save_every": 20, "batch_size": 32, "device": "cuda"},
)
