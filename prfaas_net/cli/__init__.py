"""The ``prfaas`` command. It joins the parts (this is where an engine meets the nodes) and has no logic of its own."""
