"""One HTTP request and what its response must carry, whoever makes it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import web

from api.errors import ApiError


@dataclass(frozen=True)
class Exchange:
    """A request that passed the door. `headers` grow on the way and are on its response, whatever becomes of it."""

    request: web.BaseRequest
    headers: dict[str, str]
    argument: str = ""  # what the route's pattern holds, a model's id


Respond = Callable[[Exchange], Awaitable[web.StreamResponse]]


def json_response(document: object, headers: Mapping[str, str], status: int = 200) -> web.Response:
    """A document, or JSON bytes as they are."""
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def error_response(error: ApiError, headers: Mapping[str, str] = {}) -> web.Response:
    """An error as a response of its own."""
    return json_response(error.body(), {**headers, **error.headers}, error.status)
