"""Input documents: resolve arguments to files, and read the files."""
