"""A cluster in one machine, with slow links: `python -m mpiring lab`."""
