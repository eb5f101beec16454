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
    """A message without the right seal."""


class MessageSigner:
    """Made with a secret both sides know."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def close(self, data: bytes, place: str) -> bytes:
        """Sealed. `place` says what it is and which number it has, so that it cannot be played again elsewhere."""
        return self._mark(data, place) + data

    def open(self, sealed: bytes, place: str) -> bytes:
        """What was sealed, if the seal is whole."""
        mark, data = sealed[:_SIZE], sealed[_SIZE:]
        if not hmac.compare_digest(mark, self._mark(data, place)):
            _log.warning("refused %d bytes that claim to be %s: they were not written by a peer", len(sealed), place)
            raise Forged(f"what claims to be {place} was not written by a peer")
        return data

    def _mark(self, data: bytes, place: str) -> bytes:
        return hmac.digest(self._secret, place.encode() + b"\0" + data, "sha256")
