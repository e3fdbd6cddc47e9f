"""Exceptions, for programs that import `horovod.common.exceptions`."""

from ..requests import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
