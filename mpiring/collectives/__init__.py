"""The collective algorithms: generators that run on any transport."""
