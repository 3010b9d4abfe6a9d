"""Tests of the exported package: what is in it, what it refuses, and that it runs alone."""
