"""Grids of runs, as processes of this machine or on a Ray cluster."""
