"""The command line: the commands, their options, and what they print."""

import os

# Read when torch loads its OpenMP. By default its threads wait for milliseconds without sleeping, so that a prompt is
# read at half the speed beside a program that has one of two cores. An idle machine sees no difference.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
