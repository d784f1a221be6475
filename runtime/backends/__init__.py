"""Implementations of `edgeinfer.runtime.backend.Backend`. Only `edgeinfer.runtime.load` knows them by name."""
