"""Input documents: find the files that an argument names, and read them."""
