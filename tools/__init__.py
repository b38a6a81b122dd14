"""Instruments and converters beside the engine, which runs without them: see the README."""
