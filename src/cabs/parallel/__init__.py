"""Several processes that train one model together: how their gradients become one, and what they tell one another."""

from cabs.parallel.finding import team_of
from cabs.parallel.replicas import Replicas
from cabs.parallel.shards import Shards
from cabs.parallel.team import Team

__all__ = ["Replicas", "Shards", "Team", "team_of"]
