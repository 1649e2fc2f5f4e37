"""Attacks run against servers of their own, with the fixtures of the end-to-end tests."""

from __future__ import annotations

from tests.e2e.conftest import client, http, server

__all__ = ["client", "http", "server"]
