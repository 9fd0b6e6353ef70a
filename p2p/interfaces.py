"""The device's own IP addresses."""

import ifaddr


def interface_addresses() -> tuple[str, ...]:
    """All IPv4 and IPv6 addresses of the interfaces that are up, loopback included, sorted; none where that fails."""
    try:
        adapters = list(ifaddr.get_adapters())
    except OSError:
        return ()
    found = [ip.ip if isinstance(ip.ip, str) else ip.ip[0] for adapter in adapters for ip in adapter.ips]
    return tuple(sorted(dict.fromkeys(found)))
