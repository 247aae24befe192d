"""What is trained, and on what: data, networks, losses and metrics."""

from cabs.experiments.problems.problem import Problem as Problem
from cabs.experiments.problems.table import CIFAR10 as CIFAR10
from cabs.experiments.problems.table import CIFAR100 as CIFAR100
from cabs.experiments.problems.table import DIGITS as DIGITS
from cabs.experiments.problems.table import MNIST as MNIST
from cabs.experiments.problems.table import PROBLEMS as PROBLEMS
from cabs.experiments.problems.table import SHAKESPEARE as SHAKESPEARE
from cabs.experiments.problems.table import SVHN as SVHN
from cabs.experiments.problems.table import full_name as full_name
from cabs.experiments.problems.table import metric_of as metric_of
from cabs.experiments.problems.table import optimizer_of as optimizer_of
from cabs.experiments.problems.table import problem as problem
from cabs.experiments.problems.table import title_of as title_of
