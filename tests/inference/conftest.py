"""Fixtures of the tests about models and runners."""

from tests.real_model import smollm2

__all__ = ["smollm2"]
