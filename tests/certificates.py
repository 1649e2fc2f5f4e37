import subprocess

_REQUEST = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext"
_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def make_certificate(certificate: str, key: str) -> None:
    command = [*_REQUEST.split(), _NAMES, "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
