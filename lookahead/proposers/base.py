"""The proposer interface, under its public name. The definitions stand in `lookahead.drafting.proposal`."""

from lookahead.drafting.proposal import *  # noqa: F403
from lookahead.drafting.proposal import Feedback as Outcome  # noqa: F401  # what `Feedback` was called before
