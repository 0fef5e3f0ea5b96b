"""Requests drawn from the OpenAPI document, and broken ones: 2xx or 4xx, never 5xx."""

from __future__ import annotations

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings

EXAMPLES = int(os.environ.get("MLX_LLAMA_MUTATIONS", "6"))  # per operation
RULES = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CHECKS = settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate], **RULES)
LIMITS = dict.fromkeys(("/v1/completions", "/v1/messages", "/v1/jobs"), ("max_tokens",)) | {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens", "max_tokens"),
    "/completion": ("n_predict", "max_tokens"),
}


@pytest.fixture(scope="module")
def document(guide):
    return schemathesis.openapi.from_url(f"{guide.url}/openapi.json")


def test_every_route_is_in_the_document(document):
    routes = (
        "POST /v1/chat/completions, POST /v1/chat/completions/input_tokens, POST /v1/completions, "
        "GET /v1/models, POST /v1/responses, POST /v1/messages, POST /v1/messages/count_tokens, "
        "POST /completion, POST /infill, POST /tokenize, POST /detokenize, POST /apply-template, "
        "GET /props, GET /slots, POST /v1/jobs, GET /v1/jobs/{job_id}/stream, "
        "DELETE /v1/jobs/{job_id}, GET /health, GET /ready, GET /v1/loading/progress, GET /metrics"
    )
    known = {operation.ok().label for operation in document.get_all_operations()}
    assert set(routes.split(", ")) <= known


def shorten(body: dict, *names: str) -> None:
    """Ask for a short answer by limits of these names, unless one is refused."""
    for name in names:
        if isinstance(body.get(name), (int, float)) and body[name] >= 0:
            body[name] = min(body[name], 3)
    if not any(name in body for name in names):
        body[names[0]] = 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_drawn_requests(mode, document, guide):
    from hypothesis import given
    from schemathesis import GenerationMode

    statuses: dict[int, int] = {}
    for result in document.get_all_operations():
        operation = result.ok()
        try:
            strategy = operation.as_strategy(generation_mode=GenerationMode(mode))
        except Exception as error:  # nothing to break in a route without parameters
            assert mode == "negative", error
            continue

        @given(case=strategy)
        @CHECKS
        def check(case):
            limits = LIMITS.get(operation.label.removeprefix("POST "))
            if isinstance(case.body, dict) and limits:
                if mode == "positive":
                    case.body["model"] = "guide"
                shorten(case.body, *limits)
            response = case.call(base_url=guide.url, timeout=30)
            # The guide has no tokens for fill-in-the-middle.
            highest = 501 if operation.label == "POST /infill" else 499
            assert response.status_code <= highest, (operation.label, response.text, case.body)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

        try:
            check()
        except Exception as error:
            if type(error).__name__ in ("Unsatisfiable", "InvalidArgument", "SkipTest", "Skipped"):
                continue
            raise
    print(mode, sum(statuses.values()), "requests:", statuses)  # pytest -s shows it
    assert statuses.get(200 if mode == "positive" else 400, 0) > 20, statuses
    guide.wait_idle()
