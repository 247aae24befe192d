"""What measuring costs: the ratio of a step's time and memory to the plain step, for us and for others."""
