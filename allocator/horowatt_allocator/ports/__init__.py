# SPDX-License-Identifier: Apache-2.0
"""What the service needs from the world, as Protocols: the clock and the store."""
