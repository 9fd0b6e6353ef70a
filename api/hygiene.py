"""Who may ask: foreign Host headers, bearer keys, and browsers' rules for requests from other sites. Pure.

A page in a browser can send requests to a server on the same device under a name of its own that it lets resolve to 127.0.0.1
(DNS rebinding); its Host header gives it away. Requests of pages under their own name are answered as browsers want them to be:
a chat page in the cloud may use a model at home.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence

from api.errors import ApiError

REQUEST_ID_CHARACTERS_MAX = 128
PREFLIGHT_SECONDS = 600  # for as long a browser need not ask again

EXPOSED_HEADERS = "X-Request-Id, Retry-After, X-Shoal-Task, X-Shoal-Accepted-By, X-Shoal-Executed-By"
_METHODS = "GET, POST, DELETE, OPTIONS"
_ANY_HEADERS = "Authorization, Content-Type"
_SANE_ID = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARACTERS_MAX}}}")
_HOST = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")


def check_host(host: str | None, own_names: Collection[str]) -> None:
    """Let pass addresses, localhost and this device's names; also no Host at all, which no browser sends.

    Raises: ApiError (403).
    """
    if not host:
        return
    found = _HOST.fullmatch(host.strip())
    name = (found["six"] or found["name"] or "").lower().rstrip(".") if found else None
    if name is None or not (_is_address(name) or name == "localhost" or name.endswith(".localhost") or name in own_names):
        raise ApiError(403, "forbidden_host", "This server does not go by the name in the Host header; use its address.")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Keys:
    """The bearer keys that are accepted; none: no key is asked for."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Compare in a time that tells nothing about the keys.

        Raises: ApiError (401).
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            message = "The API key is wrong." if key else "An API key is required: send 'Authorization: Bearer KEY'."
            raise ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def request_id(given: str | None, fresh: str) -> str:
    """The client's own id where it is short and printable, else the fresh one."""
    return given if given is not None and _SANE_ID.fullmatch(given) else fresh


def cross_origin_headers(origin: str | None) -> dict[str, str]:
    """What every response to a page of another site needs, errors and streams included."""
    if origin is None:
        return {"Vary": "Origin"}
    return {"Vary": "Origin", "Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED_HEADERS}


def preflight_headers(request_headers: Mapping[str, str]) -> dict[str, str]:
    """The answer to a browser that asks what it may send: any header, since clients invent new ones."""
    headers = {
        "Access-Control-Allow-Methods": _METHODS,
        "Access-Control-Allow-Headers": request_headers.get("Access-Control-Request-Headers", _ANY_HEADERS),
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        "Vary": "Origin, Access-Control-Request-Headers",
    }
    if request_headers.get("Access-Control-Request-Private-Network") == "true":
        headers["Access-Control-Allow-Private-Network"] = "true"
    return headers
