"""Files named on a command line: which they are, the documents in them, and where a new one may be made."""
