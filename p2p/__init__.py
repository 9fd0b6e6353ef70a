"""Facts and bytes between nodes. Knows nothing of models.

Connections, from the contract down:

- `transport`, `stream`: the contract; peers, dialling, streams of typed messages. `wire` is their codec
- `memory_transport`, `memory_stream`: it in one process, with faults at will
- `libp2p_transport` (listen, dial, greet), `libp2p_connections` (tasks and streams of a connection), `libp2p_handshake` (Noise
  with the cluster in it), `libp2p_stream`, `libp2p_mending`, `libp2p_sealed` (yamux and the one task that writes): it over the
  network. Only these import libp2p
- `hello`: what two nodes say first, and which of two connections is kept; `tcp`, `addresses`, `interfaces`: where nodes are
- `dialler`, `address_book`, `discovery`: whom to be connected to, kept up, kept on disk, found
- `identity`, `ids`, `cluster_key`: who a node is, and of which cluster
"""
