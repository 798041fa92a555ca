"""``python -m prfaas_net.cli``: the same as ``prfaas``."""

from prfaas_net.cli.main import run

if __name__ == "__main__":
    run()
