"""What the gateway says to nodes, one module for each kind: our own, and whoever serves by another protocol."""

from prfaas_net.gateway.attempt import Attempt
from prfaas_net.gateway.engines.prfaas import PrfaasAttempt

__all__ = ["Attempt", "PrfaasAttempt"]
