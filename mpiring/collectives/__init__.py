"""Holds the collective algorithms: generators that run on any transport."""
