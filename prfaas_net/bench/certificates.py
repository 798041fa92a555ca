"""A certificate for the bench alone: made for it, signed by itself, gone with its directory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from prfaas_net.transport.tls import TlsFiles

__all__ = ["make_certificates", "tls_files"]

NAME = "prfaas-bench"


def tls_files(directory: Path) -> TlsFiles:
    """Both ends show the same certificate, and it is its own authority."""
    certificate = directory / "certificate.pem"
    return TlsFiles(certificate, directory / "key.pem", certificate, NAME)


def make_certificates(directory: Path) -> bool:
    """False where there is no openssl command to make them with."""
    if shutil.which("openssl") is None:
        return False
    files = tls_files(directory)
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}",
        "-keyout", str(files.key), "-out", str(files.certificate),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
