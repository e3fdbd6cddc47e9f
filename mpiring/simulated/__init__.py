"""A cluster that is only calculated: networks, nodes and prices for the same schedules."""
