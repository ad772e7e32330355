"""raypar: declare a training study, run it on warm Ray Train gangs, and learn what parallelism bought."""

from raypar.errors import RayparError, StudyError
from raypar.study.space import choice, grid, loguniform, randint, uniform
from raypar.study.study import Study
from raypar.study.workload import Data, Option, Split, Statistic, Workload

__version__ = "0.1.0"

__all__ = [
    "Data",
    "Option",
    "RayparError",
    "Split",
    "Statistic",
    "Study",
    "StudyError",
    "Workload",
    "choice",
    "grid",
    "loguniform",
    "randint",
    "uniform",
]
