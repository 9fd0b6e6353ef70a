"""Reading a request's body: bounded in bytes for one request and for all together, and in time."""

import asyncio

from aiohttp import HttpVersion11, web

from api.errors import ApiError

# A prompt of a million tokens is about 5 MB of text, which JSON's escapes may triple; a frame to a runner holds 64 MiB.
BODY_BYTES_MAX = 16 << 20

# Of all bodies that are being read or checked: what a node lets strangers make it hold.
BODIES_BYTES_MAX = 64 << 20

# From a request's first line to the last byte of its body: the largest body over 2 Mbit/s.
BODY_SECONDS_MAX = 60.0

_CLOSE = {"Connection": "close"}


class BodyReader:
    """Reads bodies whole, within bounds."""

    def __init__(
        self,
        bytes_max: int = BODY_BYTES_MAX,
        bytes_max_together: int = BODIES_BYTES_MAX,
        seconds_max: float = BODY_SECONDS_MAX,
    ) -> None:
        self._bytes_max = bytes_max
        self._bytes_max_together = bytes_max_together
        self._seconds_max = seconds_max
        self._held_bytes = 0

    async def read(self, request: web.BaseRequest) -> bytearray:
        """The body, decompressed where it came compressed.

        Raises: ApiError (413, 408, 400, or 503 while other bodies take up all the room).
        """
        if (request.content_length or 0) > self._bytes_max:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._seconds_max):
                await _invite(request)
                async for piece in request.content.iter_any():
                    self._held_bytes += len(piece)
                    body += piece
                    self._check(len(body))
        except TimeoutError:
            message = f"The body did not arrive within {self._seconds_max:g} seconds."
            raise ApiError(408, "timed_out", message, headers=_CLOSE) from None
        except web.RequestPayloadError:
            message = "The body is not what its headers say: its chunks or its compression are broken."
            raise ApiError(400, "bad_http", message, headers=_CLOSE) from None
        finally:
            self._held_bytes -= len(body)
        return body

    def _check(self, size: int) -> None:
        if size > self._bytes_max:
            raise self._too_large()
        if self._held_bytes > self._bytes_max_together:
            message = "Too many large requests are arriving at once."
            raise ApiError(503, "overloaded", message, retry_after=1, headers=_CLOSE)

    def _too_large(self) -> ApiError:
        return ApiError(413, "request_too_large", f"The body is larger than {self._bytes_max} bytes.", headers=_CLOSE)


async def _invite(request: web.BaseRequest) -> None:
    """Ask a client for the body that it holds back until it hears that it is welcome."""
    if request.version >= HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        writer = request.writer
        await writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        writer.output_size = 0  # it is no part of the response, which may still be any
