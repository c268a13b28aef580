"""The command line: the commands, their options, and what they print."""

import os

# Read when torch loads its OpenMP. By default its threads wait for milliseconds without sleeping, which slows down the
# reading of a prompt beside a program that has one of the cores.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
