# SPDX-License-Identifier: Apache-2.0
"""One module per version of the schema; a released one never changes."""
