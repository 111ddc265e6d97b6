"""What exists outside the method: data, models and fleets."""
