"""Jobs over many documents: results, journals, resuming, estimates, and workers on a Ray cluster."""
