"""`python -m lookahead`: the command line."""

from lookahead.cli.app import main

main()
