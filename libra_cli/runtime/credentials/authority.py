"""The certificates by which the hosts of one run know each other (mutual TLS).

A run has a certificate authority of its own, which signs one certificate for each of its nodes and
none for anybody else. Hosts trust that authority alone, so nobody who is not of this run can read
weights, gradients or checkpoints on their way, give others, or ask for any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

BEFORE = timedelta(days=1)
"""How much a host's clock may be behind the controller's when certificates are made."""
VALID = timedelta(days=3650)
"""Longer than any run: who trusts the authority ends with the run, and no date must end it."""
NAME_CHARACTERS = 64
"""The longest common name (RFC 5280, appendix A, ub-common-name)."""


def certified_name(node: str) -> str:
    """The DNS name in a node's certificate: any name of a node makes one, and no two the same."""
    return f"{hashlib.sha256(node.encode()).hexdigest()[:32]}.node"


def peer_url(address: str, port: int, node: str) -> str:
    """Where hosts reach a server of a node, and whose certificate it must show."""
    return f"https://{address}:{port}#{certified_name(node)}"


@dataclass(frozen=True, slots=True)
class Authority:
    """The certificate authority of one run, which signs the certificates of its hosts."""

    certificate: str
    """Its own certificate in PEM, as is its ``key``."""
    key: str

    @classmethod
    def make(cls) -> Self:
        """Make a new authority with a key of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("libra run")
        built = (
            _certificate(name, name, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(_pem(built), _private_pem(key))

    def issue(self, node: str) -> Mapping[str, str]:
        """Return a new ``certificate`` and ``key`` for a node, and the ``authority``, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        own = x509.load_pem_x509_certificate(self.certificate.encode())
        signer = load_pem_private_key(self.key.encode(), password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey), "it was made here"
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names = x509.SubjectAlternativeName([x509.DNSName(certified_name(node))])
        built = (
            _certificate(_name(node), own.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(names, critical=False)
            .sign(signer, hashes.SHA256())
        )
        return {
            "certificate": _pem(built),
            "key": _private_pem(key),
            "authority": self.certificate,
        }


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BEFORE)
        .not_valid_after(now + VALID)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:NAME_CHARACTERS])])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    form = PrivateFormat.PKCS8
    return key.private_bytes(Encoding.PEM, form, NoEncryption()).decode()
