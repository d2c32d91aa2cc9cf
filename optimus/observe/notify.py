"""Notifies a webhook or a command of the end, the failure or a restart of a run."""

import json
import math
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

_SECONDS = 10.0


def notify(to: str, message: Mapping[str, Any]) -> str | None:
    """Posts `message` as JSON to an http or https URL `to`; runs any other `to` as a command with the JSON on its
    standard input. A value of `message` that is not finite becomes null.

    Returns a description of a failure, or None.
    """
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in message.items()
    }
    text = json.dumps(finite, default=str)
    try:
        if to.startswith(("http://", "https://")):
            request = urllib.request.Request(to, text.encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_SECONDS):
                return None
        done = subprocess.run(shlex.split(to), input=text, text=True, timeout=_SECONDS, stdout=sys.stderr, check=False)
    except (OSError, ValueError, HTTPException, subprocess.TimeoutExpired) as error:
        return f"observe.notify: {to}: {error}"
    return f"observe.notify: {to}: exit code {done.returncode}" if done.returncode else None
