"""How a model scores token trees: one protocol, implementations in plain torch, for CPUs and for GPUs."""
