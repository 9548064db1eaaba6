"""A program that starts two ranks which wait for ever, for the test that kills it: prints their process numbers."""

import os
import sys
import time
from functools import partial

from chimera.launch import run_local

__all__ = []


def wait_for_ever(place, tell):
    tell((place.rank, os.getpid()))
    time.sleep(600)


def show(_, message):
    print(message[1], flush=True)


if __name__ == "__main__":
    run_local(partial(wait_for_ever), int(sys.argv[1]), on_message=show)
