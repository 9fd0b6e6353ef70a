"""The subprocess that computes. It imports neither trio, libp2p nor aiohttp, and reads no configuration of its own."""
