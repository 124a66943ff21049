# SPDX-License-Identifier: Apache-2.0
"""Alembic's entry: runs the migrations on the connection that the service hands over."""

from alembic import context

from horowatt_allocator.adapters.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
