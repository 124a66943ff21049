# SPDX-License-Identifier: Apache-2.0
"""Alembic migrations of the service's database, run by the service when it starts."""
