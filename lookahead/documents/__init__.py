"""Input documents: which files an argument names, how they are read, and where output files may be written."""
