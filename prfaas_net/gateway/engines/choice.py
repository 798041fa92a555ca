"""Which kind of attempt serves a decision."""

from __future__ import annotations

from prfaas_net.gateway.attempt import Attempt
from prfaas_net.gateway.engines.attempts import EngineAttempt
from prfaas_net.gateway.engines.prfaas import PrfaasAttempt
from prfaas_net.gateway.record import RequestRecord
from prfaas_net.gateway.request import ServingRequest
from prfaas_net.gateway.services import Services
from prfaas_net.scheduling import Decision

__all__ = ["begin"]


def begin(
    request: ServingRequest,
    decision: Decision,
    keys: bytes,
    services: Services,
    record: RequestRecord,
    *,
    resumed: bool = False,
) -> Attempt:
    """An attempt in the protocol of the decode node; see :class:`~prfaas_net.gateway.attempt.Attempt`.

    Raises:
        BusyError: that node has just disappeared.
    """
    kind = PrfaasAttempt if services.fleet.find(decision.decode_node).engine is None else EngineAttempt
    return kind(request, decision, keys, services, record, resumed=resumed)
