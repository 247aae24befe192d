"""The paper's experiments: data, networks, training runs, sweeps and reports.

Everything here is what the ``cabs`` command is made of and needs the ``experiments`` extra; the library itself
does not import it.
"""
