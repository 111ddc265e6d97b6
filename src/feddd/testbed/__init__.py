"""A real Flower deployment on this machine, described by an experiment: processes, TLS, keys, shaped links."""
