# SPDX-License-Identifier: Apache-2.0
"""The world behind the ports: inventory and configuration files, the database, the clock."""
