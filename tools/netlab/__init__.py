"""A laboratory for links: impaired links between network namespaces of one machine, behind one interface.

    with netlab.link(rate_bps=200e6, delay_ms=20, queue_bytes=1 << 20) as link:
        link.run_in("a", ["ping", "-c", "3", link.b.address])
        link.set(rate_bps=50e6)

See docs/netlab.md.
"""

from __future__ import annotations

from tools.netlab.choosing import Choice, available, choose, why_not
from tools.netlab.flows import Load
from tools.netlab.link import Link, link
from tools.netlab.settings import Counters, Way
from tools.netlab.traffic import Traffic

__all__ = ["Choice", "Counters", "Link", "Load", "Traffic", "Way", "available", "choose", "link", "why_not"]
