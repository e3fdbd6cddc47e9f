"""A simulated cluster: networks, nodes and prices for the same schedules."""
