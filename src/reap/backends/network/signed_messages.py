"""Signed messages: bytes that only a peer with the same secret can have written, and only for one place.

Pickles are read from peers that were started with the secret. Bytes of a stranger are refused before they are parsed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging

_SIZE = hashlib.sha256().digest_size
_log = logging.getLogger("reap")


class Forged(ConnectionError):
    """A message has a wrong signature."""


class MessageSigner:
    """Signs outgoing messages with a secret that both sides know, and checks the signatures of incoming ones."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, data: bytes, place: str) -> bytes:
        """Return the signature followed by the data. `place` identifies the message, so that it cannot be replayed."""
        return self._signature(data, place) + data

    def verified(self, signed: bytes, place: str) -> bytes:
        """Return the data of a signed message; raise `Forged` if its signature is wrong."""
        signature, data = signed[:_SIZE], signed[_SIZE:]
        if not hmac.compare_digest(signature, self._signature(data, place)):
            _log.warning("refused %d bytes that claim to be %s: their signature is wrong", len(signed), place)
            raise Forged(f"bytes that claim to be {place} have a wrong signature")
        return data

    def _signature(self, data: bytes, place: str) -> bytes:
        return hmac.digest(self._secret, place.encode() + b"\0" + data, "sha256")
