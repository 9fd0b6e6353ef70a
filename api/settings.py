"""What the HTTP side is told, and what it draws from outside."""

import secrets
import time
from collections.abc import Callable

from msgspec import Struct

from api.body import BODIES_BYTES_MAX, BODY_BYTES_MAX, BODY_SECONDS_MAX
from api.listen import is_loopback

SEED_BITS = 63


class ApiSettings(Struct, frozen=True, kw_only=True):
    """How to serve HTTP.

    A stream on which nothing was sent for one to two `pulse_seconds` gets a comment: well under the 5 s that clients are
    promised. A client that takes none of what waits for it within `stalled_seconds` loses its connection, and its task with it.
    `close_seconds` is how long answers under way have to say that they are not complete when serving ends.
    """

    addresses: tuple[tuple[str, int], ...] = (("127.0.0.1", 52416), ("::1", 52416))
    families_optional: bool = True  # without IPv6 on this device its address is left out
    api_keys: tuple[str, ...] = ()
    insecure: bool = False  # open to others without a key
    host_names: tuple[str, ...] = ()  # by which requests on loopback may call this device, apart from localhost
    body_bytes_max: int = BODY_BYTES_MAX
    bodies_bytes_max: int = BODIES_BYTES_MAX
    body_seconds: float = BODY_SECONDS_MAX
    pulse_seconds: float = 2.0
    stalled_seconds: float = 30.0
    close_seconds: float = 3.0

    @property
    def exposed(self) -> tuple[tuple[str, int], ...]:
        """The addresses that others than this device may reach."""
        return tuple((host, port) for host, port in self.addresses if not is_loopback(host))


class Draws(Struct, frozen=True):
    """What differs from call to call: chance and time."""

    random_bits: Callable[[int], int] = secrets.randbits
    now: Callable[[], float] = time.time  # Unix seconds

    def identifier(self) -> str:
        """32 hex digits, unique."""
        return f"{self.random_bits(128):032x}"

    def seed(self) -> int:
        """For a request that brought none: 0..2^63-1."""
        return self.random_bits(SEED_BITS)
