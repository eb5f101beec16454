"""Signed messages: bytes that only somebody with the same secret can have written, for this place and no other.

Pickles are read from peers that were started with the secret. What a stranger writes is refused before it is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import logging

_SIZE = hashlib.sha256().digest_size
_log = logging.getLogger("reap")


class Forged(ConnectionError):
    """A message whose signature is not right."""


class MessageSigner:
    """Signs messages with a secret that both sides know, and checks the signatures of those that come."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, data: bytes, place: str) -> bytes:
        """Return the data behind its signature. `place` says what and which it is, so that it cannot be replayed."""
        return self._signature(data, place) + data

    def verified(self, signed: bytes, place: str) -> bytes:
        """Return the data of a signed message; `Forged` if its signature is not right."""
        signature, data = signed[:_SIZE], signed[_SIZE:]
        if not hmac.compare_digest(signature, self._signature(data, place)):
            _log.warning("refused %d bytes that claim to be %s: they were not written by a peer", len(signed), place)
            raise Forged(f"what claims to be {place} was not written by a peer")
        return data

    def _signature(self, data: bytes, place: str) -> bytes:
        return hmac.digest(self._secret, place.encode() + b"\0" + data, "sha256")
