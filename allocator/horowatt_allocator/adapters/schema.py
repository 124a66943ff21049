# SPDX-License-Identifier: Apache-2.0
"""The tables. A change here needs a migration in ``adapters/migrations/versions``.

Records are kept whole as JSON in ``document``; a column of its own has what is looked up or summed.
Energy intervals have columns only: they are many, and the ledger is summed in the database.
"""

import sqlalchemy as sa

metadata = sa.MetaData()

_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)
agents = sa.Table(
    "agents",
    metadata,
    sa.Column("agent_id", sa.String(128), primary_key=True),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("acked_seq", sa.BigInteger, nullable=False),
)
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("tenant", sa.String(255), nullable=False, index=True),
    sa.Column("uid", sa.BigInteger, nullable=False, index=True),
    sa.Column("phase", sa.String(16), nullable=False, index=True),
    sa.Column("submitted_at_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("lease_id", sa.String(128), primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
estimates = sa.Table(
    "estimates",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)
decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("number", _ID, primary_key=True, autoincrement=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)
stories = sa.Table(
    "stories",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False, index=True),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("sentence", sa.Text, nullable=False),
    sqlite_autoincrement=True,
)
intervals = sa.Table(
    "intervals",
    metadata,
    sa.Column("agent_id", sa.String(128), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("gpu_uuid", sa.String(128), nullable=False),
    sa.Column("gpu_type", sa.String(128), nullable=False),
    sa.Column("simulated", sa.Boolean, nullable=False),
    sa.Column("start_s", sa.Double, nullable=False),
    sa.Column("end_s", sa.Double, nullable=False),
    sa.Column("counter_start_j", sa.Double),
    sa.Column("counter_end_j", sa.Double),
    sa.Column("energy_j", sa.Double),
    sa.Column("unmeasured", sa.Text, nullable=False),
    sa.Column("method", sa.String(16), nullable=False),
    sa.Column("job_id", sa.String(64), index=True),
    sa.Column("lease_id", sa.String(128)),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("attributable", sa.Boolean, nullable=False),
    sa.Index("ix_intervals_gpu_start", "gpu_uuid", "start_s"),
    sa.Index("ix_intervals_end", "end_s"),
)
streams = sa.Table(
    "streams",
    metadata,
    sa.Column("job_id", sa.String(64), primary_key=True),
    sa.Column("node", sa.String(255), primary_key=True),
    sa.Column("stream", sa.String(255), primary_key=True),
    sa.Column("offset_bytes", sa.BigInteger, nullable=False),
    sa.Column("kept_bytes", sa.BigInteger, nullable=False),
    sa.Column("tail", sa.Text, nullable=False),
)
log_pieces = sa.Table(
    "log_pieces",
    metadata,
    sa.Column("id", _ID, primary_key=True),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("node", sa.String(255), nullable=False),
    sa.Column("stream", sa.String(255), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Index("ix_log_pieces_job", "job_id", "id"),
    sqlite_autoincrement=True,
)
submissions = sa.Table(
    "submissions",
    metadata,
    sa.Column("uid", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("job_id", sa.String(64), nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
)
