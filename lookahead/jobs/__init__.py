"""Jobs over many documents that survive what stops them, and can be asked what they would take.

`identity` tells jobs and documents apart, `manifest` says what a results file is of, `results` and `journal` write
lines that are there whole or not at all, `arranging` puts them in the order of the inputs, `parquet` makes a table of
them, `selection` takes some of the documents, `job` runs them, `estimate` only counts, `jobfile` reads a job from TOML
and `memory` keeps earlier outputs from one job to the next. `ray_worker` is an engine on a Ray cluster, `ray_crew`
several of them and the documents between them, and `ray_cluster` the way there.
"""
