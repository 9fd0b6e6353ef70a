"""HTTP, the only package that knows asyncio and aiohttp. It talks to the node through `api.bridge` alone."""
