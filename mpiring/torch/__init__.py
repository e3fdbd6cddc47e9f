"""Joins PyTorch: the back end `mpiring` of torch.distributed, registered by importing this."""

from . import process_group, rendezvous
from .process_group import ProcessGroup
from .rendezvous import export_environment

process_group.register()
rendezvous.register()

__all__ = ["ProcessGroup", "export_environment"]
