"""The proposer interface under its public name; defined in `lookahead.drafting.proposal`."""

from lookahead.drafting.proposal import *  # noqa: F403
from lookahead.drafting.proposal import Feedback as Outcome  # noqa: F401  # the former name of `Feedback`
