"""Modules of Horovod that do not depend on an array package."""
