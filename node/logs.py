"""Logs: structlog to stderr, for people or for machines. Nothing that a client wrote is logged at info or above."""

import logging
from collections.abc import MutableMapping
from typing import Any, Protocol

import structlog

from node.option_values import LogFormat, LogLevel

SHORT_ID_CHARACTERS = 8  # of a node id's end; its beginning is the same for all


class LogStream(Protocol):
    """What lines are written to."""

    def write(self, text: str, /) -> object:
        """Take a piece of text."""

    def flush(self) -> None:
        """Pass on what was written."""

    def isatty(self) -> bool:
        """Whether it is a terminal, so that colours show."""


def configure(log_format: LogFormat, log_level: LogLevel, node_id: str, stream: LogStream) -> None:
    """Send everything that is logged in this process, by libraries too, to `stream`, each line bound to the node."""
    level = logging.getLevelNamesMapping()[log_level.upper()]
    short_id = node_id[-SHORT_ID_CHARACTERS:]

    def bind_node(_logger: object, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("node", node_id if log_format == "json" else short_id)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if log_format == "json" else "%H:%M:%S", utc=log_format == "json"),
        bind_node,
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format, stream)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    logging.raiseExceptions = False  # a stderr that nobody reads any more must not stop the node
    for chatty in ("asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(max(level, logging.WARNING))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _renderers(log_format: LogFormat, stream: LogStream) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    colors = stream.isatty()
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
