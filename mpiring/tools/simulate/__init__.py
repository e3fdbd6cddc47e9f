"""Predicts the time of allreduces on other clusters: `python -m mpiring simulate`."""
