"""The sub-commands of ``cabs`` that belong to the experiments, a file each."""
