"""What Flower starts: the apps are in the package."""

from feddd.testbed.apps import client, server

__all__ = ["client", "server"]
