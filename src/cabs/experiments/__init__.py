"""The paper's experiments: problems, training runs, sweeps and reports.

Everything here is what the ``cabs`` command is made of and needs the ``experiments`` extra; the library itself does not
import it. Imports go only downwards in this list:

- ``commands``: the command line;
- ``sweeps``: grids of runs, as processes of this machine or on a Ray cluster;
- ``reports``: from runs to selections, tables, figures and the page;
- ``runs``: one training run, its directory, and reading it back;
- ``problems``: data, networks, losses and metrics;
- ``wording``, ``files``, ``errors``: what all of them share.
"""
