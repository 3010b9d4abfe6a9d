"""Tests of dispatch, decode loop and adapters, with the models that they run."""
