"""The names of Flower's that this package uses, in one place, from its public modules."""

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

__all__ = [
    "Array",
    "ArrayRecord",
    "ClientApp",
    "ClientAppCallable",
    "ConfigRecord",
    "Context",
    "Grid",
    "Message",
    "MessageType",
    "MetricRecord",
    "Mod",
    "RecordDict",
    "Result",
    "ServerApp",
    "Strategy",
]
