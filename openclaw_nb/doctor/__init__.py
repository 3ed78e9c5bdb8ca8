"""What may be wrong with a host or a cluster: one check a thing, each with what was seen and what to do."""
