"""The proposer interface, under its public name. The definitions stand in `lookahead.drafting.proposal`."""

from lookahead.drafting.proposal import *  # noqa: F403
