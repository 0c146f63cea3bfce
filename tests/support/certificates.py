"""Certificate authorities and what they sign, made fresh for a test."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, as PEM files."""

    cert_file: Path
    key_file: Path


class Authority:
    """A certificate authority whose files stand in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")])
        certificate = (
            self._builder(self._name, DAY, -2 * DAY)
            .public_key(self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(
        self,
        name: str,
        *,
        valid: datetime.timedelta = DAY,
        host: str = "127.0.0.1",
        begins: datetime.timedelta = -2 * DAY,
    ) -> Signed:
        """Sign a certificate for a server at `host`, or for a client.

        Of several, names or IP addresses, with commas, it is for each.
        A negative `valid` makes one that expired so long ago, a positive `begins` one that is not
        valid yet.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(subject, valid, begins)
            .public_key(key.public_key())
            .add_extension(
                x509.SubjectAlternativeName([_named(each) for each in host.split(",")]),
                critical=False,
            )
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        signed = Signed(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        signed.cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return signed

    def _builder(
        self, subject: x509.Name, valid: datetime.timedelta, begins: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins)
            .not_valid_after(now + valid)
        )


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
