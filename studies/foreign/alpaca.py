"""Does a second worker pay off for Stanford Alpaca's script, which fine-tunes with the Trainer of transformers?

The script is not part of raypar; it runs unchanged:

    git clone --depth 1 https://github.com/tatsu-lab/stanford_alpaca studies/foreign/stanford_alpaca
    pip install 'transformers<5' accelerate 'openai<1'

On CPUs, try it with a small model and part of its data: `--set model=FOLDER --set data=FILE.json` with absolute paths.
Its batch size is per worker. The Trainer writes the model into `--output_dir`, which is kept with each trial.
"""

from foreign_scripts import cloned

from raypar import Study, Workload, grid

NUMBER = r"([-+\d.e]*\d|nan|inf)"
alpaca = Workload.from_command(
    "torchrun --standalone --nproc-per-node={num_workers} stanford_alpaca/train.py --output_dir {output_dir}"
    " --model_name_or_path {model} --data_path {data} --num_train_epochs {epochs} --learning_rate {lr}"
    " --per_device_train_batch_size {batch_size} --seed {seed} --logging_steps 1 --save_strategy no --report_to none"
    " --model_max_length {max_length}",
    metrics={"loss": rf"'loss': '?{NUMBER}", "train_loss": rf"'train_loss': '?{NUMBER}"},
    options={"model": "facebook/opt-125m", "data": "stanford_alpaca/alpaca_data.json", "max_length": 512},
    metric="train_loss",
    prepare=cloned("https://github.com/tatsu-lab/stanford_alpaca", "stanford_alpaca/train.py"),
)
study = Study(
    workload=alpaca,
    space={"num_workers": grid(1, 2)},
    baseline={"num_workers": 1},
    config={"epochs": 1, "lr": 2e-5, "batch_size": 4},
)
