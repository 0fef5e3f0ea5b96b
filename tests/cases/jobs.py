"""Files of batch jobs."""

from __future__ import annotations

import json


def lines_of(server, job: dict) -> list[dict]:
    """The events of a job as lines of JSON."""
    return [json.loads(line) for line in server.http.get(job["jsonl_url"]).text.splitlines()]
