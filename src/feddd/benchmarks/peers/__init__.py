"""One round of federated averaging in other frameworks; each script is run by the interpreter of its framework."""
