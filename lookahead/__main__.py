"""`python -m lookahead`: the command line."""

from lookahead.cli import main

main()
