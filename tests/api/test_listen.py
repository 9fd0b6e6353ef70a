"""Sockets: shared ports, missing families, sentences for what can't be."""

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from api import listen as module
from api.listen import ListenError, listen, urls


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_both_families_share_the_number_that_was_picked_62(stack: ExitStack) -> None:
    four, six = (stack.enter_context(bound) for bound in listen([("127.0.0.1", 0), ("::1", 0)]))

    port = four.getsockname()[1]
    assert port == six.getsockname()[1] != 0
    assert urls([four, six]) == (f"http://127.0.0.1:{port}", f"http://[::1]:{port}")


def test_a_taken_port_is_told_in_one_sentence(stack: ExitStack) -> None:
    (taken,) = (stack.enter_context(bound) for bound in listen([("127.0.0.1", 0)]))
    taken.listen()
    port = taken.getsockname()[1]

    with pytest.raises(OSError, match=rf"^The API address 127\.0\.0\.1:{port} is already in use; .*\.$") as caught:
        listen([("127.0.0.1", port)])
    assert isinstance(caught.value, ListenError)


def test_an_address_of_another_device(stack: ExitStack) -> None:
    with pytest.raises(ListenError, match="does not belong to this device"):
        listen([("192.0.2.1", 0)])


def test_a_name_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)

    with pytest.raises(ListenError, match="can't be resolved"):
        listen([("no-such-host.invalid", 0)])


def without_ipv6(host: str, port: int) -> socket.socket:
    if ":" in host:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
    return _real_bind(host, port)


_real_bind = module._bind


def test_ipv6_may_be_missing(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bind", without_ipv6)

    (four,) = (stack.enter_context(bound) for bound in listen([("127.0.0.1", 0), ("::1", 0)]))

    assert four.family is socket.AF_INET
    with pytest.raises(ListenError):
        listen([("::1", 0)])
    with pytest.raises(ListenError):
        listen([("127.0.0.1", 0), ("::1", 0)], families_optional=False)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_another_number_is_tried_where_the_first_is_taken_on_one_address(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = 0

    def bind(host: str, port: int) -> socket.socket:
        nonlocal refused
        if host == "::1" and refused < 3:
            refused += 1
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return _real_bind(host, port)

    monkeypatch.setattr(module, "_bind", bind)

    one, two = (stack.enter_context(bound) for bound in listen([("127.0.0.1", 0), ("::1", 0)]))

    assert refused == 3
    assert one.getsockname()[1] == two.getsockname()[1]


def test_loopback() -> None:
    assert module.is_loopback("127.0.0.1")
    assert module.is_loopback("::1")
    assert not module.is_loopback("0.0.0.0")
    assert not module.is_loopback("example.org")
