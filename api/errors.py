"""Everything that can go wrong, as OpenAI clients see it: one table from what happened to a status and a body.

Pure. An `ApiError` is raised by the translations and answered by `api.app`; after a stream's first byte it becomes an error
event instead (`api.sse`).

Which statuses are retried by clients is part of the choice: 408, 409, 429 and 5xx are, all others are final.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from inference.requests import ErrorCode, Failed
from node.service import GenerateError, ModelNotFound, NoRoute, QueueFull

RETRY_AFTER_SECONDS_MAX = 60

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]

# What a failed request is answered with before its first byte. A fault of the request is final; a fault of ours may be retried.
_FAILURE_STATUS: Mapping[ErrorCode, int] = {
    "context_length_exceeded": 400,
    "template_error": 400,
    "invalid_parameter": 400,
    "engine_error": 500,
    "runner_crashed": 500,
    "runner_stopped": 503,
    "timed_out": 504,
}

# Where the fault lies for a client that names its parameters, unless the failure itself says so.
_FAILURE_PARAM: Mapping[ErrorCode, str] = {"context_length_exceeded": "messages", "template_error": "messages"}


class ApiError(Exception):
    """An answer that is no success: its HTTP status, and OpenAI's four fields. `str()` is the message, one sentence."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        assert 400 <= status < 600
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:  # seconds; clients wait as long as they are told, within reason
            self.headers["Retry-After"] = str(min(max(retry_after, 1), RETRY_AFTER_SECONDS_MAX))

    @property
    def type(self) -> ErrorType:
        """OpenAI's coarse kind of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The JSON document `{"error": {...}}`, of a response and of an error event alike."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def sentence(text: str) -> str:
    """The same with a full stop, as all messages have here; its first word may be a model's name and stays."""
    return text if text.endswith((".", "!", "?")) else text + "."


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """The request is at fault: 400."""
    return ApiError(400, code, message, param)


def unsupported(param: str, reason: str) -> ApiError:
    """A parameter that is known but can't be honoured: refused by name, never ignored."""
    return ApiError(400, "unsupported_parameter", f"'{param}' is not supported here: {reason}.", param)


def of_generate_error(error: GenerateError) -> ApiError:
    """What the sender of a request that did not start is told."""
    message = sentence(str(error))
    match error:
        case ModelNotFound():
            return ApiError(404, "model_not_found", message, "model")
        case QueueFull():
            return ApiError(429, "queue_full", message, retry_after=error.retry_after)
        case NoRoute():
            return ApiError(503, "no_route", message, retry_after=error.retry_after)
        case _:
            return ApiError(400, "invalid_request", message, "model")


def of_failure(failed: Failed) -> ApiError:
    """What the sender of a request that started, or that the engine would not start, is told."""
    status = _FAILURE_STATUS[failed.code]
    param = failed.param or _FAILURE_PARAM.get(failed.code)
    return ApiError(status, failed.code, sentence(failed.message), param, retry_after=1 if status == 503 else None)


def cancelled() -> ApiError:
    """The task was ended by someone else than its client, who must not send it again by itself: 410 is not retried."""
    return ApiError(410, "cancelled", "The request was cancelled before its answer was complete.")


def incomplete() -> ApiError:
    """The service broke its word: events without an end."""
    return ApiError(500, "incomplete", "The answer broke off before it was complete.")


def stopping() -> ApiError:
    """The node is going away and can't finish the answer."""
    return ApiError(503, "node_stopping", "This node is stopping; the answer is not complete.", retry_after=1)


def internal() -> ApiError:
    """A fault of this program; its trace is in the log."""
    return ApiError(500, "internal_error", "An internal error happened here; the node's log says more.")
