"""Jobs over many documents: lines of results, journals, resuming, estimates, and workers on a Ray cluster."""
