"""Fast execution of a strategy on simulated clients."""
