"""What is served here: OpenAI's list of models, and whether any of it can be had now."""

from aiohttp import web

from api.bridge import Bridge
from api.errors import ApiError, sentence
from api.exchange import Exchange, json_response
from node.service import ServedModel, Service

OWNER = "shoal"


def model_document(model: ServedModel) -> dict[str, object]:
    """OpenAI's model object, and what clients can't know else: how many tokens a request may have."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": OWNER,
        "context_length": model.context,
        "model_hash": model.model_hash,
    }


class Models:
    """`/v1/models`, `/v1/models/{id}`, `/healthz`, `/readyz`."""

    def __init__(self, bridge: Bridge, service: Service) -> None:
        self._bridge = bridge
        self._service = service

    async def list(self, exchange: Exchange) -> web.Response:
        """All models."""
        models = await self._bridge.call(self._models)
        return json_response({"object": "list", "data": [model_document(model) for model in models]}, exchange.headers)

    async def one(self, exchange: Exchange) -> web.Response:
        """The model that the path names.

        Raises: ApiError (404).
        """
        for model in await self._bridge.call(self._models):
            if model.name == exchange.argument:
                return json_response(model_document(model), exchange.headers)
        raise ApiError(404, "model_not_found", f"There is no model {exchange.argument[:200]!r} here.", "model")

    async def healthy(self, exchange: Exchange) -> web.Response:
        """200 while the process lives: both its halves, since the answer takes a turn through trio."""
        await self._bridge.call(self._reason)
        return json_response({"status": "ok"}, exchange.headers)

    async def ready(self, exchange: Exchange) -> web.Response:
        """200 once a model can be served from here.

        Raises: ApiError (503) with the reason.
        """
        reason = await self._bridge.call(self._reason)
        if reason is not None:
            raise ApiError(503, "not_ready", sentence(reason), retry_after=1)
        return json_response({"status": "ready"}, exchange.headers)

    # The service is asked in its own trio run, never from asyncio's thread.

    async def _models(self) -> tuple[ServedModel, ...]:
        return self._service.models()

    async def _reason(self) -> str | None:
        return self._service.not_ready()
