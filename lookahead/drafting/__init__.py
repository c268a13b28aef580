"""Token trees, their selection under a node budget, and the control of whether and how much to draft."""
