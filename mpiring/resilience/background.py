"""Runs a function in a thread of its own, and keeps what it returns or raises."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> "Future[T]":
    """Begin to run a function, and return its Future; the process does not end before it has.

    (An executor's threads can begin nothing more once the main thread has ended.)
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mpiring-checkpoint").start()
    return future
