"""The data sets of the experiments, from their official files."""

from cabs.experiments.problems.data.images import ImageData as ImageData
from cabs.experiments.problems.data.images import ImageSet as ImageSet
from cabs.experiments.problems.data.store import data_root as data_root
