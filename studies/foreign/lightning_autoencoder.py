"""Does a second worker pay off for Lightning's autoencoder example?

The script is not part of raypar; it runs unchanged, and downloads MNIST into its own clone:

    git clone --depth 1 https://github.com/Lightning-AI/pytorch-lightning studies/foreign/pytorch-lightning
    pip install lightning 'jsonargparse[signatures]' tensorboard

Its batch size and `num_batches` are per worker, so two workers train on twice as many samples. Its losses are read from
TensorBoard's event files at the end. Their steps have three counters (training, validation, test), so only the whole
command is timed.
"""

from foreign_scripts import cloned

from raypar import Study, Workload, grid

LIGHTNING, FOLDER = "https://github.com/Lightning-AI/pytorch-lightning", "pytorch-lightning/examples/pytorch/basics"
autoencoder = Workload.from_command(
    "python autoencoder.py --trainer.devices={num_workers} --trainer.accelerator={device}"
    " --trainer.default_root_dir={output_dir} --trainer.log_every_n_steps=10"
    " --trainer.max_epochs={max_epochs} --trainer.limit_train_batches={num_batches} --data.batch_size={batch_size}",
    folder=FOLDER,  # it reads ./data, and writes images where it runs: into its clone
    name="autoencoder.py",
    tensorboard="{output_dir}/lightning_logs",
    metric="train_loss",
    prepare=cloned(LIGHTNING, f"{FOLDER}/autoencoder.py"),
)
study = Study(
    workload=autoencoder,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    config={"max_epochs": 1, "num_batches": 400, "batch_size": 64},
)
