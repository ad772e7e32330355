"""Do models of a population that copy the best of them reach a higher accuracy on MNIST than models left alone?

A trial is a whole population of eight models, divided among the workers. With `copy_best`, the two worst continue every
second epoch from the weights of the two best, with a learning rate near theirs: population-based training. Without, it
is a random search of the same eight learning rates. docs/searches.md has the same search in plain Ray Tune.
"""

from raypar import Study, grid
from workloads.population import population

study = Study(
    workload=population,
    space={"copy_best": grid(False, True), "num_workers": grid(1, 2)},
    baseline={"copy_best": False, "num_workers": 1},
    config={"device": "cpu"},
    num_repeats=5,
)
