"""prfaas-net: cross-datacenter prefill/decode disaggregation over Ethernet.

The packages, from the floor up (imports point down only, a test checks it):

    errors, units, clock, config, metrics    shared by all
    kv           what is moved: layouts, manifests, block hashes
    wire         the KV stream protocol, sans-IO
    transport    links and connections: moves what ``wire`` says
    scheduling   where to prefill and where to decode: events in, decisions out
    nodes        prefill and decode daemons around an engine
    gateway      OpenAI-compatible HTTP over a fleet of nodes
    localfleet   all of it on one machine, for a first look and for tests
    cli          the ``prfaas`` command
"""

__version__ = "0.1.0"
