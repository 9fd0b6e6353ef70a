"""The HTTP server of a node: its doors, its routes, and its life as one trio task."""

import asyncio
import re
from collections.abc import Mapping

import structlog
import trio
from aiohttp import web
from msgspec import Struct

from api import hygiene
from api.body import BodyReader
from api.bridge import Bridge, BridgeClosed, open_bridge
from api.chat import Chat
from api.cluster import ClusterRoutes
from api.errors import ApiError, internal, stopping
from api.exchange import Exchange, Respond, error_response
from api.listen import ListenError, authority, listen, urls
from api.models import Models
from api.server import HttpServer
from api.settings import ApiSettings, Draws
from node.service import ClusterService, Service

_log = structlog.get_logger("api")


class Route(Struct, frozen=True):
    """What answers which methods of which paths; `is_open` to all, key or not."""

    path: re.Pattern[str]  # its first group is the argument
    methods: Mapping[str, Respond]
    is_open: bool = False


def find_route(routes: tuple[Route, ...], method: str, path: str) -> tuple[Route, Respond, str]:
    """The route of a request, who answers it, and the path's argument.

    Raises: ApiError (404, 405).
    """
    for route in routes:
        found = route.path.fullmatch(path)
        if found is not None:
            respond = route.methods.get("GET" if method == "HEAD" else method)
            if respond is None:
                allowed = ", ".join(sorted(route.methods))
                text = f"{path} does not know the method {method}, only {allowed}."
                raise ApiError(405, "method_not_allowed", text, headers={"Allow": allowed})
            return route, respond, found[1] if found.re.groups else ""
    raise ApiError(404, "not_found", f"There is nothing at {path[:200]}.")


def _cluster_routes(cluster: ClusterRoutes) -> tuple[Route, ...]:
    return (
        Route(re.compile("/cluster/state"), {"GET": cluster.state}),
        Route(re.compile("/cluster/dump"), {"GET": cluster.dump}),
        Route(re.compile("/cluster/events"), {"GET": cluster.events}),
        Route(re.compile("/cluster/tasks/([^/]+)"), {"GET": cluster.task}),
        Route(re.compile("/cluster/tasks/([^/]+)/cancel"), {"POST": cluster.cancel}),
    )


class Api:
    """What is asked over HTTP, answered from one service."""

    def __init__(
        self, bridge: Bridge, service: Service, settings: ApiSettings, draws: Draws, cluster: ClusterService | None
    ) -> None:
        models = Models(bridge, service)
        bodies = BodyReader(settings.body_bytes_max, settings.bodies_bytes_max, settings.body_seconds)
        chat = Chat(bridge, service, bodies, settings, draws)
        self._settings = settings
        self._draws = draws
        self._keys = hygiene.Keys(settings.api_keys)
        self._host_names = frozenset(name.lower() for name in settings.host_names)
        self._checks_host = not settings.exposed  # a server that is open to others goes by names that it can't know
        self._routes = (
            Route(re.compile("/v1/chat/completions"), {"POST": chat.complete}),
            Route(re.compile("/v1/models"), {"GET": models.list}),
            Route(re.compile("/v1/models/(.+)"), {"GET": models.one}),
            Route(re.compile("/healthz"), {"GET": models.healthy}, is_open=True),
            Route(re.compile("/readyz"), {"GET": models.ready}, is_open=True),
            *(() if cluster is None else _cluster_routes(ClusterRoutes(bridge, cluster, settings))),
        )

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """The response to any request; only a client that has gone gets none."""
        request_id = hygiene.request_id(request.headers.get("x-request-id"), self._draws.identifier())
        headers = {"Server": "shoal", "x-request-id": request_id, **hygiene.cross_origin_headers(request.headers.get("Origin"))}
        response = await self._response(request, headers)
        try:
            async with asyncio.timeout(self._settings.stalled_seconds):
                await response.prepare(request)
                await response.write_eof()
        except TimeoutError:  # the client takes nothing of it
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _response(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        try:
            return await self._respond(request, headers)
        except ApiError as error:
            return error_response(error, headers)
        except BridgeClosed:
            return error_response(stopping(), headers)
        except ConnectionError:
            if request.transport is None or request.transport.is_closing():
                raise  # the client has gone; aiohttp knows
            return self._internal(headers)
        except Exception:  # noqa: BLE001 - a fault while one request is answered is that request's end alone
            return self._internal(headers)

    def _internal(self, headers: Mapping[str, str]) -> web.StreamResponse:
        _log.exception("a request failed for a fault of this program")
        return error_response(internal(), headers)

    async def _respond(self, request: web.BaseRequest, headers: dict[str, str]) -> web.StreamResponse:
        if self._checks_host:
            hygiene.check_host(request.headers.get("Host"), self._host_names)
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={**headers, **hygiene.preflight_headers(request.headers)})
        try:
            route, respond, argument = find_route(self._routes, request.method, request.path)
        except ApiError:
            self._keys.check(request.headers.get("Authorization"))  # strangers do not learn what is there
            raise
        if not route.is_open:
            self._keys.check(request.headers.get("Authorization"))
        return await respond(Exchange(request, headers, argument))


async def serve(
    service: Service,
    settings: ApiSettings,
    *,
    cluster: ClusterService | None = None,
    draws: Draws = Draws(),  # noqa: B008 - frozen
    task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """trio: serve HTTP until cancelled; reports started with the URLs once connections are accepted.

    Without a `cluster` there is nothing at `/cluster`.

    Cancelled, it accepts nothing more, ends open answers with an error, and is gone within `close_seconds` and a moment.

    Raises: ListenError (an OSError) whose text is one sentence for people.
    """
    if settings.exposed and not (settings.api_keys or settings.insecure):
        raise ListenError(f"The API address {authority(*settings.exposed[0])} is open to others and needs an API key.")
    sockets = listen(settings.addresses, families_optional=settings.families_optional)
    found_urls = urls(sockets)
    async with open_bridge() as bridge:
        api = Api(bridge, service, settings, draws, cluster)

        async def start() -> HttpServer:
            server = HttpServer(api.handle)
            await server.listen(sockets)
            return server

        server = await bridge.host(start)
        try:
            task_status.started(found_urls)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                bridge.close()
                await bridge.host(server.close, settings.close_seconds)
