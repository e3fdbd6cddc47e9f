"""Stands for scikit-learn in the jobs that tests start: only its digits, without 2 s of imports."""
