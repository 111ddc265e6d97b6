"""A certificate authority of one's own for one deployment: a server certificate, and a key pair per node."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS = 30


@dataclass(frozen=True)
class Certificates:
    """Where the files are: ca (public), server certificate and key, and the nodes' private keys, in order."""

    ca: Path
    server_certificate: Path
    server_key: Path
    node_keys: tuple[Path, ...]


def make_certificates(folder: Path, addresses: Sequence[str], nodes: int) -> Certificates:
    """Write everything a deployment of `nodes` nodes at these server addresses needs; private files are private."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "feddd testbed")])
    ca = (
        _builder(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, addresses[0])])
    server = (
        _builder(server_name, ca_name, server_key)
        .add_extension(x509.SubjectAlternativeName([*names, x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    paths = Certificates(
        folder / "ca.crt",
        folder / "server.pem",
        folder / "server.key",
        tuple(folder / f"node-{number}" for number in range(nodes)),
    )
    paths.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    paths.server_certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _write_private(paths.server_key, _pem(server_key, serialization.PrivateFormat.PKCS8))
    for path in paths.node_keys:
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(path, _pem(key, serialization.PrivateFormat.OpenSSH))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        path.with_suffix(".pub").write_bytes(public + b"\n")
    return paths


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
    )


def _pem(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write_private(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
