"""Runs a wrong kernel in a forked child: one that reads wild addresses may end its process, which is a finding too."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

CRASHED = "crashed"
TIME_LIMIT_S = 120


def isolated(function: Callable[[], Any]) -> tuple[str, Any]:
    """(`""`, the JSON-able result) of a call in a forked child, or (`crashed`, the signal's name).

    Forking is safe here because the child keeps torch to one thread (those that other tests made in this process do
    not live on in it), and the kernels' pool starts anew in a child.

    Raises:
        RuntimeError: the call raised; its traceback went to stderr.
        TimeoutError: it did not end; that proves nothing about the kernel.
    """
    read_fd, write_fd = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_fd)
            faulthandler.disable()  # the crash is the finding; its traceback would only look like one of pytest's
            signal.alarm(TIME_LIMIT_S)
            torch.set_num_threads(1)
            with os.fdopen(write_fd, "w") as results:
                json.dump(function(), results)
            code = 0
        except BaseException:  # noqa: BLE001 - the child must never return into pytest
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    os.close(write_fd)
    with os.fdopen(read_fd) as results:
        text = results.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        raise TimeoutError(f"no result within {TIME_LIMIT_S} s")
    if status < 0:
        return CRASHED, signal.Signals(-status).name
    if status:
        raise RuntimeError(f"the child ended with code {status}; see its traceback above")
    return "", json.loads(text)
