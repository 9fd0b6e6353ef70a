"""From what happened to what a client is told."""

from typing import get_args

import pytest

from api.errors import RETRY_AFTER_SECONDS_MAX, ApiError, of_failure, of_generate_error
from inference.requests import ErrorCode, Failed
from node.service import GenerateError, ModelNotFound, NoRoute, QueueFull

DID_NOT_START: dict[str, tuple[GenerateError, int, str, str | None, str | None]] = {
    "53: unknown model": (ModelNotFound("x."), 404, "model_not_found", "model", None),
    "58: no route": (NoRoute("x.", 7), 503, "no_route", None, "7"),
    "no route for long": (NoRoute("x", 900), 503, "no_route", None, "60"),
    "queue full": (QueueFull("x.", 0), 429, "queue_full", None, "1"),
    "any other": (GenerateError("x."), 400, "invalid_request", "model", None),
}


@pytest.mark.parametrize(("error", "status", "code", "param", "retry_after"), DID_NOT_START.values(), ids=DID_NOT_START)
def test_requests_that_did_not_start(
    error: GenerateError, status: int, code: str, param: str | None, retry_after: str | None
) -> None:
    told = of_generate_error(error)

    assert (told.status, told.code, told.param, told.message) == (status, code, param, "x.")
    assert told.headers.get("Retry-After") == retry_after


@pytest.mark.parametrize("code", get_args(ErrorCode))
def test_every_failure_has_a_status(code: ErrorCode) -> None:
    told = of_failure(Failed("r", code, "x."))

    assert told.code == code
    assert told.type == ("invalid_request_error" if told.status < 500 else "server_error")


def test_a_failure_that_names_its_parameter_keeps_it() -> None:
    assert of_failure(Failed("r", "invalid_parameter", "x.", "top_k")).param == "top_k"
    assert of_failure(Failed("r", "context_length_exceeded", "x.")).param == "messages"


def test_nobody_is_told_to_wait_for_more_than_a_minute() -> None:
    assert ApiError(503, "c", "x.", retry_after=10**6).headers["Retry-After"] == str(RETRY_AFTER_SECONDS_MAX)
