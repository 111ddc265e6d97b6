"""FedDD on Flower: a strategy for the server and a mod for the clients. Nothing else of the package imports flwr."""

try:
    from feddd.flower.links import FixedLinks, Link, MeasuredLinks
    from feddd.flower.mod import feddd_mod
    from feddd.flower.round_facts import RoundFacts
    from feddd.flower.strategy import FedDDStrategy
    from feddd.strategies.checks import Limits
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flwr":
        raise
    raise ModuleNotFoundError('feddd.flower needs Flower: pip install "feddd[flower]"', name="flwr") from error

__all__ = ["FedDDStrategy", "FixedLinks", "Limits", "Link", "MeasuredLinks", "RoundFacts", "feddd_mod"]
