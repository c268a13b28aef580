"""Jobs over many documents: journals, resuming, estimates, job files, and workers on a Ray cluster."""
