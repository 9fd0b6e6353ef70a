"""How the text of an option becomes its value. Pure; each parser raises ValueError with what the text should have been.

The message completes a sentence that begins with the option, its source and the text: "--max-disk 4XB is no size such as
4GB or 512MiB".
"""

import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Literal

NAME_CHARACTERS_MAX = 64
SECONDS_MAX = 10 * 365 * 86400.0
CLUSTER_KEY_BYTES_MIN = 16  # 128 bits: an offline guess must be hopeless, since a handshake can be recorded
CLUSTER_KEY_BYTES_MAX = 64

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?(?:([kmgt])(i?)b|b)?", re.IGNORECASE | re.ASCII)
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?) ?(ms|s|m|h)?", re.ASCII)
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")
_MULTIADDR = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/\s]+/tcp/(\d{1,5})(?:/p2p/[1-9A-HJ-NP-Za-km-z]+)?")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
_LOG_FORMATS: dict[str, LogFormat] = {"console": "console", "json": "json"}
_LOG_LEVELS: dict[str, LogLevel] = {"debug": "debug", "info": "info", "warning": "warning", "error": "error"}


@dataclass(frozen=True)
class Address:
    """A TCP address as people write it; `host` is an IP address without brackets, or a host name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this device can reach it; of a host name only `localhost` is known to be so."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


def address(text: str) -> Address:
    """`127.0.0.1:52416`, `[::1]:0`, `localhost:8080`."""
    wrong = ValueError("is no HOST:PORT such as 127.0.0.1:52416 or [::1]:52416")
    host, colon, port_text = text.strip().rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()):
        raise wrong
    if int(port_text) > 65535:
        raise ValueError("has a port above 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            return Address(str(ipaddress.IPv6Address(host[1:-1])), int(port_text))
        except ValueError:
            raise wrong from None
    try:
        return Address(str(ipaddress.IPv4Address(host)), int(port_text))
    except ValueError:
        if not _HOST_NAME.fullmatch(host) or host.replace(".", "").isdigit():
            raise wrong from None
    return Address(host, int(port_text))


def address_or_none(text: str) -> Address | None:
    """An address, or None for `none`."""
    return None if text.strip().lower() == "none" else address(text)


def peer_address(text: str) -> str:
    """A multiaddr over TCP, or `host:port`; as text, for the transport to dial."""
    text = text.strip()
    if text.startswith("/"):
        found = _MULTIADDR.fullmatch(text)
        if found is None or not 0 < int(found[1]) <= 65535:
            raise ValueError("is no multiaddr such as /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo...")
        return text
    parsed = address(text)
    if parsed.port == 0:
        raise ValueError("has port 0, at which no peer can be reached")
    return str(parsed)


def size(text: str) -> int:
    """Bytes: `4GB` (powers of 1000), `512MiB` (of 1024), or a plain number."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError("is no size such as 4GB or 512MiB")
    number, unit, binary = found.groups()
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def duration(text: str) -> float:
    """Seconds: `600`, `0.5`, or with a unit `500ms`, `90s`, `10m`, `2h`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError("is no time in seconds such as 600, 90s or 10m")
    seconds = float(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    if not math.isfinite(seconds) or seconds > SECONDS_MAX:
        raise ValueError("is longer than ten years")
    return seconds


def positive_duration(text: str) -> float:
    """Seconds, above 0."""
    seconds = duration(text)
    if seconds <= 0:
        raise ValueError("must be above 0 seconds")
    return seconds


def count(text: str) -> int:
    """A whole number from 0."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError("is no whole number from 0 to 999999999")
    return int(text)


def positive_count(text: str) -> int:
    """A whole number from 1."""
    number = count(text)
    if number < 1:
        raise ValueError("must be at least 1")
    return number


def switch(text: str) -> bool:
    """Yes or no in any of the usual spellings."""
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("is neither true nor false")


def name(text: str) -> str:
    """A name shown to people: 1 to 64 characters, all printable."""
    text = text.strip()
    if not 0 < len(text) <= NAME_CHARACTERS_MAX or not text.isprintable():
        raise ValueError(f"is no name of 1 to {NAME_CHARACTERS_MAX} printable characters")
    return text


def path(text: str) -> str:
    """A path as written; `~` and relative ones are resolved where its source is known."""
    if not text or "\0" in text:
        raise ValueError("is no path")
    return text


def model(text: str) -> str:
    """A model's name in any of its forms, or `none`."""
    text = text.strip()
    if not text or not text.isprintable():
        raise ValueError("is no model name")
    return text


def alias(text: str) -> tuple[str, str]:
    """`NAME=MODEL`."""
    left, equals, right = (part.strip() for part in text.partition("="))
    if not (left and equals and right) or not text.isprintable():
        raise ValueError("is no NAME=MODEL such as gpt-4o=smollm2:135m")
    return left, right


def api_key(text: str) -> str:
    """A bearer key: visible ASCII characters, as it must fit into an HTTP header."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise ValueError("is no key of visible ASCII characters without spaces")
    return text


def cluster_key(text: str) -> bytes:
    """The shared secret, as `node key` prints it: hexadecimal, of 128 to 512 bits."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        raise ValueError("is no hexadecimal key: `node key` makes one") from None
    if len(key) < CLUSTER_KEY_BYTES_MIN:
        raise ValueError(
            f"has {len(key) * 8} bits, at least {CLUSTER_KEY_BYTES_MIN * 8} are needed: `node key` makes a key of 256"
        )
    if len(key) > CLUSTER_KEY_BYTES_MAX:
        raise ValueError(f"has {len(key) * 8} bits, at most {CLUSTER_KEY_BYTES_MAX * 8} are taken")
    return key


def log_format(text: str) -> LogFormat:
    """How log lines look."""
    if text not in _LOG_FORMATS:
        raise ValueError(f"is none of {', '.join(_LOG_FORMATS)}")
    return _LOG_FORMATS[text]


def log_level(text: str) -> LogLevel:
    """From which level on lines are logged."""
    if text not in _LOG_LEVELS:
        raise ValueError(f"is none of {', '.join(_LOG_LEVELS)}")
    return _LOG_LEVELS[text]
