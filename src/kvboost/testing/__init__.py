"""Conformance suites that certify an extension: a store, a chunker, an eviction policy."""
