"""The names of Flower's that this package uses, in one place, from its public modules."""

from logging import getLogger

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

APP_NOT_LOADED, APP_RAISED = 1, 2
"""The codes of error replies that come from a client app, and not from the SuperLink."""

logger = getLogger("flwr")
"""Flower's own, as its strategies use it: `flwr run --stream` and `flwr log` show what is said here."""

__all__ = [
    "APP_NOT_LOADED",
    "APP_RAISED",
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ClientAppCallable",
    "ConfigRecord",
    "Context",
    "Grid",
    "Message",
    "MessageType",
    "Metadata",
    "MetricRecord",
    "Mod",
    "RecordDict",
    "Result",
    "ServerApp",
    "Strategy",
    "logger",
]
