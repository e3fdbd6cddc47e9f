"""Predicts the time of allreduces on clusters that nobody here owns: python -m mpiring simulate."""
