"""Bridges between the runtime and model libraries. Each imports its library only when it is used."""
